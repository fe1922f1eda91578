"""Optimisers, learning-rate schedules, and the health of the weights that they update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.cpu import has_instructions
from saccade.train.recipe import Recipe, Stage


def _turned(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Move the singular values of a matrix to about 1 by Newton-Schulz steps (as `torch.optim.Muon`)."""
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    matrix = (update.T if tall else update).float()
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if tall else matrix


class WideMuon(torch.optim.Muon):
    """`torch.optim.Muon` at AdamW's rates, in float32: its own bfloat16 is 22 times slower where it is emulated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, rate, momentum = self.state[weight], float(group["lr"]), group["momentum"]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(mean, momentum) if group["nesterov"] else mean
                turned = _turned(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(turned.to(weight.dtype), alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))


def rate_at(stage: Stage, step: int) -> float:
    """Return the learning rate of a stage's step, counted from 0: linear warmup, then a cosine."""
    if step < stage.warmup:
        return stage.rate * (step + 1) / stage.warmup
    done = (step - stage.warmup) / max(stage.steps - stage.warmup, 1)
    falling = (1 + math.cos(math.pi * done)) / 2
    return stage.rate * (stage.final + (1 - stage.final) * falling)


def muon_and_adamw(
    matrices: Sequence[nn.Parameter],
    weights: Sequence[nn.Parameter],
    rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    *,
    fused: bool | None = None,
    precision: str = "auto",
) -> list[torch.optim.Optimizer]:
    """Make Muon for matrices, if any, with rates matched to AdamW's, and AdamW for all other weights."""
    turned = {id(matrix) for matrix in matrices}
    others = [weight for weight in weights if id(weight) not in turned]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        narrow = precision != "fp32" and dtype_for(matrices[0].device) == torch.bfloat16
        muon = torch.optim.Muon if narrow else WideMuon
        made.append(muon(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    made.append(torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=weight_decay, fused=fused))
    return made


class Optimisers:
    """Optimisers under one learning rate and one clipped gradient norm."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], weights: Sequence[nn.Parameter], clip: float) -> None:
        self._parts, self.weights, self._clip = parts, list(weights), clip

    def step(self, rate: float) -> float:
        """Clip the gradients, update the weights, unless the norm is not finite, and `clear`."""
        norm = float(nn.utils.clip_grad_norm_(self.weights, self._clip or math.inf))
        for part in self._parts if math.isfinite(norm) else ():
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
        self.clear()
        return norm

    def clear(self) -> None:
        """Remove all gradients: a weight that a step does not use remains as it is."""
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


class Optimiser(Optimisers):
    """AdamW for all weights, or Muon for matrices and AdamW for the rest."""

    def __init__(self, head: nn.Module, recipe: Recipe) -> None:
        self._all = [p for p in head.parameters() if p.requires_grad]
        matrices: list[nn.Parameter] = []
        if recipe.optimiser == "muon":
            # Without tables, of which a step uses only some rows.
            tables = _tables(head)
            matrices = [p for p in self._all if p.dim() == 2 and id(p) not in tables]
        parts = muon_and_adamw(matrices, self._all, 1.0, recipe.weight_decay, recipe.betas, precision=recipe.precision)
        super().__init__(parts, self._all, recipe.clip)

    def train_only(self, weights: Sequence[nn.Parameter]) -> None:
        """Train these weights alone from here on; others get no gradient, no decay and no moments."""
        chosen = {id(weight) for weight in weights}
        for weight in self._all:
            weight.requires_grad_(id(weight) in chosen)
            if not weight.requires_grad:
                weight.grad = None
            elif weight.grad is None:  # zero, as after `clear`, also in the first step of a resumed run
                weight.grad = torch.zeros_like(weight)
        self.weights = [weight for weight in self._all if weight.requires_grad]

    def clear(self) -> None:
        """Set all gradients to zero, also of weights that the next step does not use."""
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)


def _tables(module: nn.Module) -> set[int]:
    """Ids of parameters that are looked up rather than multiplied: HiViS's r^s, embeddings and LM head."""
    found = [getattr(module, "residuals", None)]
    for name in ("get_input_embeddings", "get_output_embeddings"):
        if hasattr(module, name):
            found.append(getattr(module, name)().weight)
    return {id(table) for table in found if table is not None}


def dtype_for(device: torch.device) -> torch.dtype:
    """The format that matrix products of training are computed in on a device."""
    if device.type == "cuda":
        multiplies = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        multiplies = device.type == "cpu" and has_instructions(torch.bfloat16)
    return torch.bfloat16 if multiplies else torch.float32


def precision_on(device: torch.device, wanted: str) -> str:
    """``fp32`` or ``bf16`` for a recipe's precision, of which ``auto`` is `dtype_for`."""
    if wanted != "auto":
        return wanted
    return "bf16" if dtype_for(device) == torch.bfloat16 else "fp32"


def fast_products(device: torch.device) -> AbstractContextManager[None]:
    """Autocast to `dtype_for`; nothing where that is float32."""
    dtype = dtype_for(device)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def description(device: torch.device) -> str:
    """Device and number format of a run, such as `"2 CPU threads, float32"`."""
    kind = "float32" if dtype_for(device) == torch.float32 else "bfloat16 autocast"
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name()}, {kind}"
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'' if threads == 1 else 's'}, {kind}"


FAR = 10  # factor by which the loss, or the largest weight, of a run in order stays below that of its beginning


@torch.no_grad()
def largest_of(weights: Sequence[Tensor]) -> float:
    """Largest magnitude among weights; not finite if one of them is not."""
    return float(torch.stack([weight.abs().max().float() for weight in weights if weight.numel()]).max())


@dataclass(slots=True)
class Health:
    """What a run began with, and how far it was in order."""

    sound: int = 0  # updates after which the weights were last in order
    loss: float = 0.0  # of the first step; 0 before it
    largest: float = 0.0  # weight before the first step

    def observe(self, step: int, loss: float, weights: Sequence[Tensor]) -> bool:
        """Note loss and weights after the update of a step; False if the weights are not finite."""
        self.loss = self.loss or loss
        largest = largest_of(weights)
        if loss > FAR * self.loss:  # of the weights before this update
            self.sound = min(self.sound, step - 1)
        elif largest <= FAR * self.largest:
            self.sound = step + 1
        return largest < torch.inf
