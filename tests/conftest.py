"""Shared test settings: no network, one thread."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # so that every test can `from families import FAMILIES`

import torch
from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
torch.set_num_threads(1)  # the models are tiny: more threads only add waiting

settings.register_profile("no deadline", deadline=None)  # it would only measure how busy the machine is
settings.load_profile("no deadline")
