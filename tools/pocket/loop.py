"""One training stage: a number of steps, with checkpoints that a kill cannot spoil and a resume repeats exactly.

Optimisers, number format and atomic writes are those of `saccade.train`; its loop is not used, because a stage has no
target, no data files and no drafts to measure, writes one checkpoint by the clock, and is complete when the file of its
weights exists.
"""

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from saccade.errors import TrainingError
from saccade.files import write_file
from saccade.train.optimiser import Optimisers, muon_and_adamw
from saccade.wording import duration
from tools.pocket.recipe import Schedule

_Batch = TypeVar("_Batch")
_PROGRESS_SECONDS = 30.0
_AHEAD = 3  # batches per worker
_CLIP = 1.0


def save(value: Any, path: Path) -> None:
    """Write a file with `torch.save`, atomically."""
    write_file(path, partial(torch.save, value), error=TrainingError)


def optimisers_for(named: Iterable[tuple[str, nn.Parameter]], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW for embeddings, heads, norms and biases."""
    weights = dict(named)
    inside = [weight for name, weight in weights.items() if weight.ndim == 2 and "layers." in name]
    return muon_and_adamw(inside, list(weights.values()), rate, 0.02, (0.9, 0.95), fused=True)


def batches(make: Callable[[int], _Batch], first: int, last: int, device: torch.device) -> DataLoader[_Batch]:
    """Batches `first` to `last - 1`, made by spare cores; for a model that trains on the CPU by this process."""
    workers = 0 if device.type == "cpu" else max(1, (os.cpu_count() or 2) - 2)
    # Workers are spawned, because a process that has used CUDA cannot be forked; the generator keeps torch's own state.
    options: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": _AHEAD} if workers else {}
    return DataLoader(
        range(first, last),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=workers,
        collate_fn=make,  # type: ignore[arg-type]  # without batches it gets one number
        generator=torch.Generator(),
        **options,
    )


def train(
    name: str,
    model: nn.Module,
    make: Callable[[int], _Batch],
    loss_of: Callable[[_Batch], Tensor],
    schedule: Schedule,
    folder: Path,
    checkpoint_seconds: float,
) -> float:
    """Train a stage to its end, or resume it from its checkpoint, and leave `<name>.pt` in `folder`.

    Trains the parameters that require gradients; returns the minutes.
    """
    complete, resume = folder / f"{name}.pt", folder / f"{name}.checkpoint.pt"
    if complete.exists():
        state = torch.load(complete, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        return float(state["seconds"]) / 60
    trained = [(label, p) for label, p in model.named_parameters() if p.requires_grad]
    optimisers = Optimisers(optimisers_for(trained, schedule.rate), [p for _, p in trained], _CLIP)
    first, before = 0, 0.0
    if resume.exists():
        state = torch.load(resume, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimisers.load_state_dict(state["optimisers"])
        first, before = state["step"], state["seconds"]
        print(f"[{name}] resumed at step {first}, {before:.0f} s in", flush=True)
    start = saved = reported = time.monotonic()
    smooth, parts = None, schedule.parts
    device = next(model.parameters()).device
    made = iter(batches(make, first * parts, max(first, schedule.steps) * parts, device))
    for step in range(first, schedule.steps):
        loss: Tensor | float = 0.0
        for _ in range(parts):
            share = loss_of(next(made)) / parts
            share.backward()
            loss = loss + share.detach()
        optimisers.step(schedule.rate_at(step))
        done, now = step + 1, time.monotonic()
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        if now - reported > _PROGRESS_SECONDS:
            left = duration((now - start) / (done - first) * (schedule.steps - done))
            print(f"[{name}] step {done} of {schedule.steps}, loss {float(smooth):.4f}, about {left} left", flush=True)
            reported = now
        if now - saved > checkpoint_seconds and done < schedule.steps:
            state = {"model": model.state_dict(), "optimisers": optimisers.state_dict()}
            save({**state, "step": done, "seconds": before + now - start}, resume)
            saved = time.monotonic()
    seconds = before + time.monotonic() - start
    steps = max(first, schedule.steps)
    save({"model": model.state_dict(), "step": steps, "seconds": seconds}, complete)
    resume.unlink(missing_ok=True)
    print(f"[{name}] done: {steps} steps in {seconds / 60:.1f} min", flush=True)
    return seconds / 60
