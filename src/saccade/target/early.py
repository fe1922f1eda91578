"""Leaving a stock model's forward before one of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class _Reached(Exception):
    """The layer is about to run; nobody but `leaving_before` sees this."""


@contextmanager
def leaving_before(layer: nn.Module) -> Iterator[list[Tensor]]:
    """A forward in this block ends where ``layer`` would begin: later layers, final norm and LM head never run.

    Yields:
        A list, in which the stream ``[B, Q, d]`` that enters the layer is found afterwards.
    """
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    handle = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield found
    except _Reached:
        pass
    finally:
        handle.remove()
