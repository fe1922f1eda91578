"""Stock modules of transformers on a packed sequence: attention by row, capture of hidden states, early exit.

Modules call the attention function named in their configuration. During a packed forward it splits the sequence into
rows, each of which attends over its segment of the KV arena by the model's own function (fused or eager, with its
windows, soft caps and sinks). The masks passed to the modules are only labels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from saccade.errors import ModelError
from saccade.target_model.cache import RowCache
from saccade.target_model.layout import ALL

FUSED, EAGER = "saccade_packed", "saccade_packed_eager"
"""Names of the attention functions of models on a fused kernel, and of models that need eager attention."""

_RUNNING: list[RowCache] = []
"""The cache of the forward under way."""


def can_pack(decoder: Any) -> bool:
    """Whether a decoder calls the attention function named in its configuration."""
    return bool(getattr(decoder, "_can_set_attn_implementation", lambda: False)())


def mask_labels(kinds: tuple[str, ...], like: Tensor) -> Tensor | dict[str, Tensor]:
    """Return labels that modules receive as masks: each names one kind of a row's masks."""

    def label(kind: str) -> Tensor:
        made = like.new_zeros(1, 1, 1, 1)
        made.saccade_kind = kind  # type: ignore[attr-defined]
        return made

    return {kind: label(kind) for kind in kinds} if kinds else label(ALL)


@contextmanager
def packing(decoder: nn.Module, cache: RowCache) -> Iterator[None]:
    """Run the decoder's attention on packed sequences laid out by ``cache.layout`` while the context is open."""
    configs: dict[int, Any] = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
    before = [(c, c._attn_implementation_internal) for c in configs.values()]
    if any(str(name).startswith("saccade_probe") for _, name in before):
        raise ModelError("Attention cannot be probed in a packed forward; run the rows one after the other.")
    for config, name in before:
        config._attn_implementation_internal = EAGER if name == "eager" else FUSED
    _RUNNING.append(cache)
    try:
        yield
    finally:
        _RUNNING.pop()
        for config, name in before:
            config._attn_implementation_internal = name


def _by_row(
    attention: Any, module: nn.Module, query: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    cache = _RUNNING[-1]
    kind = getattr(attention_mask, "saccade_kind", None)
    if kind is None:
        raise ModelError(
            f"{type(module).__name__} changes its attention mask before it is used, so that rows cannot share a pass."
        )
    layer: Any = cache.layers[module.layer_idx]
    out = []
    for span in cache.layout.spans:
        seen = slice(span.start, span.start + span.visible)
        part = query[:, :, span.first : span.first + span.count]
        keys, values = layer.keys[None, :, seen], layer.values[None, :, seen]
        mask = span.mask(kind)
        if mask is None:
            mask = query.new_zeros(1, 1, span.count, span.visible)
        out.append(attention(module, part, keys, values, mask, **options)[0])
    return torch.cat(out, 1), None


def _fused(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    return _by_row(sdpa_attention_forward, module, query, attention_mask, **more)


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Run the architecture's own eager attention, row by row."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    return _by_row(own, module, query, attention_mask, **more)


# Both interfaces: without a mask function of the same name transformers would drop masks silently.
for _name, _function, _like in ((FUSED, _fused, "sdpa"), (EAGER, _eager, "eager")):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_like])


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
