"""One training stage: a number of steps, with checkpoints that a kill cannot spoil and a resume repeats exactly."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from saccade.train.optimiser import muon_and_adamw
from tools.pocket.files import save
from tools.pocket.prefetch import made_ahead, workers_for
from tools.pocket.recipe import Schedule

_Made = TypeVar("_Made")
_PAUSE, _CHECKED = 30.0, 600.0  # seconds between lines of progress, and between checks


def _optimisers(named: Iterable[tuple[str, nn.Parameter]], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW for embeddings, heads, norms and biases."""
    weights = dict(named)
    inside = [weight for name, weight in weights.items() if weight.ndim == 2 and "layers." in name]
    return muon_and_adamw(inside, list(weights.values()), rate, 0.02, (0.9, 0.95), fused=True)


def train(
    name: str,
    model: nn.Module,
    make: Callable[[int], _Made],
    loss_of: Callable[[_Made], Tensor],
    schedule: Schedule,
    folder: Path,
    checkpoint_seconds: float,
    check: Callable[[], str] | None = None,
) -> float:
    """Train a stage to its end, or on from its checkpoint, and leave `<name>.pt` in `folder`.

    Trains the parameters that require gradients.

    Args:
        make: the batch of that number, as a picklable function. All randomness comes from the number, so a resumed
            run sees the same batches.
        loss_of: the loss of a batch.
        check: a line about how well the model does, printed every ten minutes.

    Returns:
        The minutes of training that the stage took over all its resumes.
    """
    done, resume = folder / f"{name}.pt", folder / f"{name}.checkpoint.pt"
    if done.exists():
        state = torch.load(done, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        return float(state["seconds"]) / 60
    learning = [(label, p) for label, p in model.named_parameters() if p.requires_grad]
    optimisers = _optimisers(learning, schedule.rate)
    number, before = 0, 0.0
    if resume.exists():
        state = torch.load(resume, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        for optimiser, kept in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        number, before = state["step"], state["seconds"]
        print(f"[{name}] resumed at step {number}, {before:.0f} s in", flush=True)
    first = number
    start = saved = spoken = checked = time.monotonic()
    smooth = None
    parts = schedule.parts
    workers = workers_for(next(model.parameters()).device)
    batches = made_ahead(make, number * parts, schedule.steps * parts, workers)
    while number < schedule.steps:
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate_at(number)
        loss: Tensor | float = 0.0
        for _ in range(parts):
            partial = loss_of(next(batches)) / parts
            partial.backward()
            loss = loss + partial.detach()
        nn.utils.clip_grad_norm_([p for _, p in learning], 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        number += 1
        now = time.monotonic()
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        if now - spoken > _PAUSE:
            left = (now - start) / (number - first) * (schedule.steps - number) / 60
            print(
                f"[{name}] step {number} of {schedule.steps}, loss {float(smooth):.4f}, "
                f"about {left:.0f} min left",
                flush=True,
            )
            spoken = now
        if now - saved > checkpoint_seconds and number < schedule.steps:
            state = {"model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers]}
            save({**state, "step": number, "seconds": before + now - start}, resume)
            saved = time.monotonic()
            if check is not None and saved - checked > _CHECKED:
                print(f"[{name}] {check()}", flush=True)
                checked = saved = time.monotonic()
    seconds = before + time.monotonic() - start
    save({"model": model.state_dict(), "step": number, "seconds": seconds}, done)
    resume.unlink(missing_ok=True)
    print(f"[{name}] done: {number} steps in {seconds / 60:.1f} min", flush=True)
    return seconds / 60
