"""Muon in float32, for processors that would emulate the bfloat16 in which PyTorch's own turns its matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _turned(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix with its singular values moved to about 1, by Newton-Schulz steps (as `torch.optim.Muon`)."""
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    matrix = (update.T if tall else update).float()
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if tall else matrix


class WideMuon(torch.optim.Muon):
    """`torch.optim.Muon` with rates matched to AdamW's, its matrices turned in float32; same settings and state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient.

        Raises:
            ValueError: a closure is given, or another rule for the learning rate.
        """
        if closure is not None:
            raise ValueError("This optimiser takes no closure; compute the gradients before the step.")
        for group in self.param_groups:
            if group["adjust_lr_fn"] != "match_rms_adamw":
                raise ValueError(
                    f"The learning rate is matched to AdamW's here, not {group['adjust_lr_fn']!r}."
                )
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum, rate = group["momentum"], float(group["lr"])
        mean = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        wanted = grad.lerp(mean, momentum) if group["nesterov"] else mean
        turned = _turned(wanted, group["ns_coefficients"], group["ns_steps"], group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(turned.to(weight.dtype), alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))
