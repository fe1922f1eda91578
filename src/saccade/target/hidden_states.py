"""Capture of chosen layers' hidden states, and early exit, in a stock forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from saccade.errors import ModelError

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")
"""Attribute names of the norm before the LM head in decoders of transformers."""


class StockModel(Protocol):
    """The part of a `Target` that capturing needs."""

    decoder: Any
    layers: nn.ModuleList
    device: torch.device

    def stock(self) -> AbstractContextManager[None]:
        """Run forwards through the stock modules."""
        ...


class FeatureTap:
    """Capture of the residual stream during unchanged forwards.

    Index i is the stream *entering* decoder layer i: 0 is the embeddings with the visual features in place, and
    features added between layers (deepstack of Qwen3-VL) are included. Index ``len(target.layers)`` is
    the stream after the last layer.
    Shapes: hidden ``[B, Q, d]``.
    """

    def __init__(self, target: StockModel, layers: Sequence[int], final: Literal["post", "pre"] = "post") -> None:
        count = len(target.layers)
        for index in layers:
            if not -count - 1 <= index <= count:
                raise ModelError(
                    f"Layer {index} does not exist; this decoder has {count} layers, so give 0 (the first one's "
                    f"input) to {count} (the last one's output)."
                )
        self.hidden: dict[int, Tensor] = {}
        self._target = target
        self._places = {index: index % (count + 1) for index in layers}
        self._final = final
        self._norm = final_norm(target.decoder) if count in self._places.values() else None
        self._handles: list[Any] = []
        self._hold = ExitStack()

    def __enter__(self) -> FeatureTap:
        self._hold.enter_context(self._target.stock())  # hooks do not fire in a lean decoder
        for index, place in self._places.items():
            if place < len(self._target.layers):
                self._before(self._target.layers[place], index)
            elif self._norm is not None and self._final == "pre":
                self._before(self._norm, index)
            elif self._norm is not None:
                hook = partial(self._leaving, index)
                self._handles.append(self._norm.register_forward_hook(hook))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hold.close()

    def _before(self, module: nn.Module, index: int) -> None:
        hook = partial(self._entering, index)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _entering(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take(index, args[0] if args else kwargs["hidden_states"])

    def _leaving(self, index: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        self._take(index, output)

    def _take(self, index: int, stream: Tensor) -> None:
        self.hidden[index] = stream.to(self._target.device)


def final_norm(decoder: nn.Module) -> nn.Module:
    """Return the norm before the LM head."""
    for name in FINAL_NORMS:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise ModelError(
        f"{type(decoder).__name__} has no final norm under a known name ({', '.join(FINAL_NORMS)}); read the "
        "layers before it instead."
    )


class _Reached(Exception):
    """Raised right before the layer runs; caught by `early_exit`."""


@contextmanager
def early_exit(layer: nn.Module) -> Iterator[list[Tensor]]:
    """End a forward at the input of ``layer``: later layers, final norm and LM head never run.

    Shapes: returns ``[B, Q, d]``.
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
