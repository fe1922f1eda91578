"""Forecasts beside real runs on this processor: `python -m benchmarks.forecasts --like pocket 1024x16x16`.

Trains a few steps of every recipe on the pocket target and on it inflated, and prints what the forecast of
`saccade train --preset NAME --plan` says of the same run for a processor of this one's measured rate: weights, bytes of
the features and of the folder, bytes of a micro batch at its peak, and seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import saccade
from saccade import pocket
from saccade.distill import distill
from saccade.sizing.machine import Preset
from saccade.train.data import Answers
from saccade.train.forecasting import Forecast, forecast
from saccade.train.recipe import Recipe, read_recipe
from saccade.train.trainer import Trainer
from tools.pocket.inflate import inflate

STEPS = 6
SMALL = {
    "batch_size": 4,
    "micro_batch": 4,
    "precision": "fp32",
    "validation_samples": 0,
    "checkpoint_every": 2,
    "feature_cache": "disk",
    "min_words": 0,
}
WHOLE = {"hivis": {"loss.early_stop": False}}
"""Settings under which an untrained head computes as much as a trained one."""


def rate(size: int = 1024, rounds: int = 7) -> float:
    """Return products and sums per second of a float32 matrix product."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        left @ right
        spent.append(time.perf_counter() - begun)
    return 2 * size**3 / median(spent)


def small(name: str, recompute: bool) -> Recipe:
    """Return a recipe cut to a few steps."""
    recipe = read_recipe(name)
    stages = {f"stage{n}.steps": 0 for n in range(1, len(recipe.stages))}
    more = WHOLE.get(name, {})
    return recipe.with_settings(
        {**SMALL, **more, "recompute": recompute, **stages, f"stage{len(recipe.stages)}.steps": STEPS}
    )


def peak(trainer: Trainer, step: int) -> int:
    """Return the most bytes that a training step has allocated at a time, beyond what stays."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        trainer.train_step(step)
    held = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def measured(vlm: saccade.VLM, recipe: Recipe, data: Path, out: Path) -> dict[str, float]:
    """Train, and return weights, seconds of a step, bytes at its peak, bytes of features and folder."""
    source = Answers(data, vlm.processor, min_words=recipe.min_words, max_tokens=recipe.max_tokens)
    trainer = Trainer(vlm.target, recipe, source, out, processor=vlm.processor, say=lambda _: None)
    trained = sum(w.numel() for w in trainer.learner.module.parameters() if w.requires_grad)
    trainer.run()
    again = Trainer(
        vlm.target, recipe.with_settings({"feature_cache": "none"}), source, out / "again", processor=vlm.processor,
        say=lambda _: None,
    )  # fmt: skip
    again.train_step(0)  # gradients and moments stay
    spent = []
    for step in range(1, STEPS):
        begun = time.perf_counter()
        again.train_step(step)
        spent.append(time.perf_counter() - begun)
    most = peak(again, STEPS - 1)
    bytes_of = {
        name: sum(f.stat().st_size for f in (out / name).rglob("*") if f.is_file()) for name in ("features", "")
    }
    seen = len({i for step in range(STEPS) for i in trainer.order.at(step)})
    return {
        "weights": trained,
        "seconds": median(spent),
        "peak": most,
        "features": bytes_of["features"] / seen,
        "folder": bytes_of[""] - bytes_of["features"],
    }


def computed(found: Forecast) -> dict[str, float]:
    """Return the same of a forecast."""
    weights = 4 * found.work.trained
    without = found.recipe.with_settings({"feature_cache": "none"})
    each = Forecast(found.preset, {}, without, found.size, found.lengths, found.work).seconds[0]
    return {
        "weights": found.work.trained,
        "seconds": each,
        "peak": found.work.memory["features"] / 3 + found.work.memory["micro batch"],
        "features": found.work.cache,
        "folder": 2 * 3 * weights + weights,
    }


def rows(
    like: str, recipes: list[str], count: int, speed: float, folder: Path, recompute: bool = False
) -> list[dict[str, Any]]:
    """Return a row per recipe, of each quantity computed, measured, and their ratio."""
    target = pocket.target_path()
    if like != "pocket":
        target = folder / like
        inflate(pocket.target_path(), target, like, dtype="float32")
    vlm = saccade.load(str(target), method="plain", dtype="float32")
    data = folder / f"answers-{like}"
    distill(vlm, "pocket:scene,chart", data, count=count, max_new_tokens=64, batch=4)
    here = Preset("here", "this processor", 1, speed, 1e12, 1.0, {}, {})
    made = []
    for name in recipes:
        recipe = small(name, recompute)
        out = folder / f"run-{like}-{name}"
        real, said = measured(vlm, recipe, data, out), computed(forecast(recipe, target, data, here, dtype="float32"))
        shutil.rmtree(out)
        made.append(
            {"like": like, "recipe": name}
            | {
                key: {"computed": said[key], "measured": real[key], "ratio": round(said[key] / real[key], 3)}
                for key in real
            }
        )
    return made


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--like", nargs="+", default=["pocket", "1024x16x16"], help="pocket, or WIDTHxLAYERSxHEADS")
    words.add_argument("--recipes", nargs="+", default=["eagle2", "eagle3", "hivis", "dream", "medusa"])
    words.add_argument("--count", type=int, default=6, help="answers of each of two tasks")
    words.add_argument("--recompute", action="store_true", help="activations computed again instead of kept")
    given = words.parse_args()
    torch.set_num_threads(1)
    speed = rate()
    print(f"{speed / 1e9:.1f} GFLOP/s in a float32 product of 1024x1024 matrices")
    with tempfile.TemporaryDirectory() as folder:
        for like in given.like:
            for row in rows(like, given.recipes, given.count, speed, Path(folder), given.recompute):
                print(f"{row.pop('like'):10} {row.pop('recipe'):8} " + json.dumps(row))


if __name__ == "__main__":
    main()
