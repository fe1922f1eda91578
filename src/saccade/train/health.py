"""Health of a run: weights after every update, and the last checkpoint in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FAR = 10
"""Factor by which the loss, or the largest weight, of a run in order stays below that of its beginning."""


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

    def judge(self, step: int, loss: float, weights: Sequence[Tensor]) -> bool:
        """Judge weights after the update of a step with a finite mean loss; False if they are not finite."""
        self.loss = self.loss or loss
        largest = largest_of(weights)
        if loss > FAR * self.loss:  # of the weights before this update
            self.sound = min(self.sound, step - 1)
        elif largest <= FAR * self.largest:
            self.sound = step + 1
        return largest < torch.inf
