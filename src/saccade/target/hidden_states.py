"""Hidden states of chosen layers, and early exit from a stock forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from saccade.errors import ModelError

if TYPE_CHECKING:
    from saccade.target.adapter import Target

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")
"""Names under which decoders of transformers keep the norm before the LM head."""


class FeatureTap:
    """Reads the residual stream while the target runs as it always does.

    Index i is the stream *entering* decoder layer i: 0 is the embeddings with the visual features in place, and
    what a model adds between layers (deepstack features of Qwen3-VL) is included. Index ``len(target.layers)`` is
    the stream after the last layer.

    Args:
        target: whose decoder is read.
        layers: indices; negative ones count from the end, -1 being the stream after the last layer.
        final: whether the last index is read after (``post``) or before (``pre``) the final norm.

    Attributes:
        hidden: index as given -> ``[B, Q, d]`` of the last forward, on the target's input device; empty before it.

    Raises:
        ModelError: there is no such layer, or the decoder's final norm is not where it is known to be.
    """

    def __init__(self, target: Target, layers: Sequence[int], final: Literal["post", "pre"] = "post") -> None:
        count = len(target.layers)
        for index in layers:
            if not -count - 1 <= index <= count:
                raise ModelError(
                    f"Layer {index} does not exist; this decoder has {count} layers, so give 0 (what enters the "
                    f"first) to {count} (what leaves the last)."
                )
        self.hidden: dict[int, Tensor] = {}
        self._target = target
        self._places = {index: index % (count + 1) for index in layers}
        self._final = final
        self._norm = final_norm(target.decoder) if count in self._places.values() else None
        self._handles: list[Any] = []
        self._hold = ExitStack()

    def __enter__(self) -> FeatureTap:
        self._hold.enter_context(self._target.stock())  # a lean decoder would pass the hooks by
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
    """The norm before the LM head.

    Raises:
        ModelError: it has none under a known name.
    """
    for name in FINAL_NORMS:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise ModelError(
        f"{type(decoder).__name__} has no final norm under a known name ({', '.join(FINAL_NORMS)}); read the "
        "layers before it instead."
    )


class _Reached(Exception):
    """The layer is about to run; nobody but `early_exit` sees this."""


@contextmanager
def early_exit(layer: nn.Module) -> Iterator[list[Tensor]]:
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
