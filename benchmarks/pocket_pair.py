"""The pair of models and the prompts that all measurements share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import CLOCKS
from saccade.cpu import suitable_dtype
from saccade.inputs.batching import join
from saccade.inputs.processor import InputProcessor
from saccade.pocket import draft_path, draw, target_path
from tools.pocket.world.followup import FIRST_TASKS

FIRST_SEED = 300_000
"""Pictures are drawn from here on; training and evaluation use other seeds."""

Inputs = Mapping[str, torch.Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose models, number formats and threads."""
    parser.add_argument("--target", type=Path, default=target_path(), help="model folder (default: the pocket's)")
    parser.add_argument("--draft", type=Path, default=draft_path(), help="model folder (default: the pocket's)")
    best = str(suitable_dtype(torch.bfloat16)).removeprefix("torch.")
    parser.add_argument(
        "--target-dtype",
        default=best,
        choices=("bfloat16", "float32"),
        help="default: bfloat16 where this processor computes in it, else float32",
    )
    parser.add_argument("--draft-dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")


def add_step_options(parser: argparse.ArgumentParser, prompts: int) -> None:
    """The options of measurements that time every step of a chain."""
    parser.add_argument("--gamma", type=int, default=5, help="guesses per step (default: 5)")
    parser.add_argument("--prompts", type=int, default=prompts, help="prompts that count (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="cpu counts processor time: use it with one thread where other work shares the cores (default: wall)",
    )


def load(folder: Path, dtype: str, device: str) -> Any:
    """A model of the pair, fresh from disk."""
    from transformers import AutoModelForImageTextToText

    if not folder.is_dir():
        raise SystemExit(f"There is no model folder {folder}; train one with `python -m tools.pocket train`.")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def prompts(folder: Path, count: int, grammar: str, dtype: str, device: str) -> list[Inputs]:
    """Questions about fresh pictures, task after task, as tensors for `generate`."""
    processor = InputProcessor.load(str(folder))
    made = []
    for number in range(count):
        sample = draw(FIRST_SEED + number, FIRST_TASKS[number % len(FIRST_TASKS)], grammar)
        prompt = processor.prompt(sample.messages())
        ids = torch.tensor([prompt.ids], device=device)
        media = {
            name: tensor.to(device, getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in join(processor.config, prompt.media).items()
        }
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), **media})
    return made
