"""The pair of models and the prompts that the benchmarks here share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from saccade.pocket import TASKS, draft_path, draw, target_path
from saccade.pocket.answering import messages

FIRST_SEED = 300_000
"""Pictures are drawn from here on; training and evaluation use other seeds."""

Inputs = Mapping[str, torch.Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose models, number formats and threads."""
    parser.add_argument(
        "--target", type=Path, default=target_path(), help="model folder (default: the pocket's)"
    )
    parser.add_argument(
        "--draft", type=Path, default=draft_path(), help="model folder (default: the pocket's)"
    )
    parser.add_argument("--target-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--draft-dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")


def load(folder: Path, dtype: str, device: str) -> Any:
    """A model of the pair, fresh from disk."""
    from transformers import AutoModelForImageTextToText

    if not folder.is_dir():
        raise SystemExit(
            f"There is no model folder {folder}; train one with `python -m saccade.pocket.train`."
        )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def prompts(folder: Path, count: int, grammar: str, dtype: str, device: str) -> list[Inputs]:
    """Questions about fresh pictures, task after task, as the processor prepares them for `generate`."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    made = []
    for number in range(count):
        sample = draw(FIRST_SEED + number, list(TASKS)[number % len(TASKS)], grammar)
        text = processor.apply_chat_template(messages(sample), add_generation_prompt=True)
        batch = processor(text=text, images=[[sample.image]], return_tensors="pt")
        made.append(batch.to(device, dtype=getattr(torch, dtype)))
    return made
