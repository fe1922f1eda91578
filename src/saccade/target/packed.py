"""Stock modules on a packed sequence, by an attention function over each row's own cache entries.

Modules of transformers call the attention function named in their configuration. During a packed forward it splits the
sequence into rows, each of which attends over its segment of the KV arena by the model's own function (fused or eager,
with its windows, soft caps and sinks). The masks passed to the modules are only labels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from saccade.errors import ModelError
from saccade.target.cache import RowCache
from saccade.target.layout import ALL

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
