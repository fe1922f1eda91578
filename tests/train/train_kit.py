"""Tiny targets, samples and heads for training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import saved_picture, says, text
from families import FAMILIES
from saccade.draft.heads.head import Head, HeadConfig, build_head
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.train.data import Listed, TrainingSample
from saccade.train.features import extract_features
from saccade.train.objectives.entries import Entries, Feeder, entries_of


def write_answers(folder: Path) -> Path:
    """Twenty answered questions about a picture, as `saccade distill` writes them."""
    saved_picture(folder / "a.png")
    lines = [
        {
            "id": str(n),
            "messages": says({"type": "image", "image": "a.png"}, text(f"What {n}?")),
            "answer": "one two three four five",
            "answer_ids": [40 + n, 41, 42, 43 + n],
        }
        for n in range(20)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "answers.jsonl"


@cache
def target(name: str) -> Target:
    made = Target(FAMILIES[name].model())
    made.model.requires_grad_(False)
    return made


def prompt(name: str, kind: str, row: int = 0) -> Prompt:
    return split(target(name).config, FAMILIES[name].row_inputs(kind, row))[0]


def samples(name: str, count: int = 3) -> list[TrainingSample]:
    """Prompts of every kind that the family takes, with answers of 4, 5, ... tokens."""
    kinds = FAMILIES[name].kinds
    return [
        TrainingSample(str(i), prompt(name, kinds[i % len(kinds)], i), tuple(range(20 + i, 24 + 2 * i)))
        for i in range(count)
    ]


def listed(name: str, count: int) -> Listed:
    return Listed((s.prompt, s.answer) for s in samples(name, count))


def head(name: str, kind: str, **options: Any) -> Head:
    """A head of random weights, all of which matter (a new HiViS head's residuals are zero)."""
    config = HeadConfig.from_target(target(name), kind, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build_head(config)
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(0.2 * torch.randn_like(weight))
    return made


def entries(own: Head, name: str = "llava") -> Entries:
    return entries_of(own, extract_features(target(name), samples(name, 3), own.layers))


def fed(feeder: Feeder, indices: Sequence[int]) -> Any:
    """The entries of some samples, as a training step gets them."""
    return feeder.entries_of(feeder.features(indices))


def lm_head(states: Tensor) -> Tensor:
    logits: Tensor = target("llava").model.get_output_embeddings()(states)
    return logits


def assert_close(one: Path, other: Path, kind: str = "head") -> None:
    """Weights of two runs in float32 whose sums had another order; a forgotten batch moves most of them by 1e-3.

    Adam divides by gradients: a single weight whose gradient nearly cancels may move by up to the rate.
    """
    first, second = (load_file(out / kind / "model.safetensors") for out in (one, other))
    for name, weight in first.items():
        far = int(((weight - second[name]).abs() > 2e-5).sum())
        assert far <= max(1, weight.numel() // 1000), f"{name}: {far} of {weight.numel()} weights are apart"
