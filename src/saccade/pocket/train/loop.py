"""One training stage: steps until its time is used up, with checkpoints that a kill cannot spoil."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from saccade.pocket.train.files import save
from saccade.pocket.train.recipe import Schedule

Step = Callable[[int], Tensor]
"""Step number -> loss. All randomness comes from the number, so a resumed run sees the same batches."""


def train(
    name: str,
    model: nn.Module,
    groups: list[tuple[list[nn.Parameter], float]],
    step: Step,
    schedule: Schedule,
    folder: Path,
    checkpoint_seconds: float,
    check: Callable[[], str] | None = None,
) -> float:
    """Train a stage to its end, or on from its checkpoint, and leave `<name>.pt` in `folder`.

    Args:
        groups: parameters with a factor on the learning rate each.
        check: a line about how well the model does, printed now and then.

    Returns:
        The minutes of training that the stage took over all its resumes.
    """
    done, resume = folder / f"{name}.pt", folder / f"{name}.checkpoint.pt"
    if done.exists():
        state = torch.load(done, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        return float(state["seconds"]) / 60
    optimiser = torch.optim.AdamW(
        [{"params": parameters, "factor": factor} for parameters, factor in groups],
        lr=schedule.rate,
        betas=(0.9, 0.95),
        weight_decay=0.02,
        fused=True,
    )
    number, before = 0, 0.0
    if resume.exists():
        state = torch.load(resume, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        number, before = state["step"], state["seconds"]
        print(f"[{name}] resumed at step {number}, {before:.0f} s in", flush=True)
    total = schedule.minutes * 60
    start = saved = spoken = time.monotonic()
    smooth = None
    while (seconds := before + time.monotonic() - start) < total:
        rate = schedule.rate * min(1.0, (number + 1) / schedule.warmup)
        rate *= schedule.final + (1 - schedule.final) * (1 - seconds / total)
        for group in optimiser.param_groups:
            group["lr"] = rate * group["factor"]
        loss = step(number)
        loss.backward()
        nn.utils.clip_grad_norm_([p for parameters, _ in groups for p in parameters], 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        number += 1
        now = time.monotonic()
        smooth = loss.detach() if smooth is None else 0.95 * smooth + 0.05 * loss.detach()
        if now - spoken > 30:
            left = (total - seconds) / 60
            print(f"[{name}] step {number}, loss {float(smooth):.4f}, {left:.1f} min left", flush=True)
            spoken = now
        if now - saved > checkpoint_seconds:
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
            save({**state, "step": number, "seconds": before + now - start}, resume)
            saved = now
            if check is not None:
                print(f"[{name}] {check()}", flush=True)
    seconds = before + time.monotonic() - start
    save({"model": model.state_dict(), "step": number, "seconds": seconds}, done)
    resume.unlink(missing_ok=True)
    print(f"[{name}] done: {number} steps in {seconds / 60:.1f} min", flush=True)
    return seconds / 60
