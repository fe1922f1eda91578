"""Cost of a training step by part: `python -m benchmarks.training --target pocket --data ANSWERS`.

Every setting is measured in turn, round after round in one process; medians over rounds, in milliseconds per sample.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import saccade
from benchmarks.clock import CLOCKS, Clock
from saccade import pocket
from saccade.train.data import Answers
from saccade.train.objectives.entries import lm_head_of
from saccade.train.recipe import Stage, read_recipe
from saccade.train.trainer import Trainer


def parts(trainer: Trainer, stage: Stage, step: int, clock: Clock) -> dict[str, float]:
    """Seconds of one micro batch: the target's pass, the head's forwards and losses, the backward pass."""
    indices = trainer.order.at(step % trainer.order.steps_per_epoch)[: trainer.recipe.micro_batch]
    begun = clock()
    entries = trainer.feeder.entries(indices)
    read = clock()
    assert entries is not None
    with torch.autocast(entries.states.device.type, torch.bfloat16, enabled=trainer.recipe.precision == "bf16"):
        tally = trainer.recipe.objective(trainer.head, entries, lm_head_of(trainer.target), stage.draft_steps)
    judged = clock()
    tally.loss.backward()
    ended = clock()
    for weight in trainer.head.parameters():
        weight.grad = None
    return {"target": read - begun, "head and losses": judged - read, "backward": ended - judged}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--target", default="pocket")
    words.add_argument("--data", required=True)
    words.add_argument("--recipe", default="hivis")
    words.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    words.add_argument("--draft-steps", type=int, nargs="+", default=[1, 4])
    words.add_argument("--rounds", type=int, default=10)
    words.add_argument("--clock", choices=CLOCKS, default="wall")
    given = words.parse_args()
    vlm = saccade.load(str(pocket.target_path()) if given.target == "pocket" else given.target, method="plain")
    clock = Clock(given.clock, vlm.target.device)
    base = read_recipe(given.recipe)
    source = Answers(given.data, vlm.processor, min_words=base.min_words, max_tokens=base.max_tokens)
    runs: dict[tuple[int, int], tuple[Trainer, Stage]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for micro in given.micro_batches:
            for deep in given.draft_steps:
                stage = Stage(steps=1, rate=1e-3, draft_steps=deep)
                recipe = replace(base, stages=(stage,), batch_size=micro, micro_batch=micro)
                runs[micro, deep] = Trainer(vlm.target, recipe, source, Path(folder)), stage
        found: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number in range(given.rounds + 1):
            for setting, (trainer, stage) in runs.items():
                for part, seconds in parts(trainer, stage, number, clock).items():
                    if number:  # the first round warms up
                        found[setting][part].append(1e3 * seconds / setting[0])
    rows: list[dict[str, Any]] = [
        {
            "micro_batch": micro,
            "draft_steps": deep,
            **{part: round(median(v), 2) for part, v in values.items()},
        }
        for (micro, deep), values in found.items()
    ]
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
