"""Activations that are computed again for the gradients, instead of kept from the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_ON: ContextVar[bool] = ContextVar("recomputing", default=False)


@dataclass(slots=True)
class _Layer:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


class Kept:
    """Keys and values of the steps so far, differentiable; a `RowCache` is written in place."""

    def __init__(self, blocks: int) -> None:
        self.layers = [_Layer() for _ in range(blocks)]

    def copy(self) -> Kept:
        """Return the same entries, to which others can be added."""
        out = Kept(0)
        out.layers = [_Layer(list(layer.keys), list(layer.values)) for layer in self.layers]
        return out


@contextmanager
def recomputing(on: bool) -> Iterator[None]:
    """Let `recomputed` keep no activations while the context is open, if ``on``."""
    before = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(before)


def recomputed(work: Callable[[Sequence[Kept]], Tensor], held: Sequence[Kept] = ()) -> Tensor:
    """Run a part of a loss; within `recomputing` it runs again in the backward pass, with the same bits."""
    if not _ON.get():
        return work(held)
    before, order = [kept.copy() for kept in held], list[_Layer]()

    def pure() -> tuple[Tensor, ...]:
        copies, added = [kept.copy() for kept in before], list[Tensor]()
        out = work(copies)
        order.clear()
        for kept, old, new in zip(held, before, copies, strict=True):
            for layer, less, more in zip(kept.layers, old.layers, new.layers, strict=True):
                for place in range(len(less.keys), len(more.keys)):
                    order.append(layer)
                    added += [more.keys[place], more.values[place]]
        return out, *added

    out: Tensor
    out, *added = checkpoint(pure, use_reentrant=False, preserve_rng_state=False)
    for layer, key, value in zip(order, added[::2], added[1::2], strict=True):
        layer.keys.append(key)
        layer.values.append(value)
    return out


def recompute_layers(layers: nn.ModuleList) -> None:
    """Let the decoder layers of a model of transformers keep no activations, in training and in nothing else."""
    for layer in layers:
        switched: Any = layer
        switched.gradient_checkpointing = True
        switched._gradient_checkpointing_func = _run_again
        switched.training = True  # of the layer alone: its parts stay without dropout


def _run_again(work: Callable[..., Any], *given: Any) -> Any:
    return checkpoint(work, *given, use_reentrant=False, preserve_rng_state=False)
