"""Attention statistics of the target's decoder, read during prefill."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from saccade.errors import ModelError
from saccade.inputs.batching import visual_mask
from saccade.inputs.prompt import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.forward import Requirements

FUSED, EAGER = "saccade_probe", "saccade_probe_eager"
"""Names of the probing attention functions of models on a fused kernel, and of models that need eager attention
(soft-capping and attention sinks of Gemma 2, gpt-oss)."""

ROWS_AT_ONCE = 64
"""Queries whose attention is in memory at a time."""

_PROBES: WeakKeyDictionary[nn.Module, tuple[AttentionProbe, int]] = WeakKeyDictionary()


class AttentionProbe:
    """Column sums and entropies of attention in the target's decoder, while the context is open; one row at a time.

    The vision tower is not probed; the decoder's attention is restored on exit, also after an exception.
    Shapes: columns ``[B, K]``; entropies ``[B, R]``.
    """

    def __init__(
        self, target: Target, *, queries: Sequence[int] | None = None, layers: Sequence[int] | None = None
    ) -> None:
        count = len(target.layers)
        self.columns: dict[int, Tensor] = {}
        self.entropies: dict[int, Tensor] = {}
        self._target = target
        self._queries = None if queries is None else list(queries)
        self._layers = range(count) if layers is None else [i + count if i < 0 else i for i in layers]
        for index in self._layers:
            if not 0 <= index < count:
                raise ModelError(f"Layer {index} does not exist; this decoder has layers 0 to {count - 1}.")
        self._before: list[tuple[Any, str | None]] = []
        self._hold = ExitStack()

    def __enter__(self) -> AttentionProbe:
        if any(m in _PROBES for layer in self._target.layers for m in layer.modules()):
            raise ModelError("This model's attention is already being probed; close that probe first.")
        decoder = self._target.decoder
        if not decoder._can_set_attn_implementation():
            raise ModelError(
                f"{type(decoder).__name__} has attention code of its own that cannot be probed; choose a method "
                "that does not need attention statistics."
            )
        self._hold.enter_context(self._target.stock())  # a lean decoder bypasses the attention interface
        configs = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
        self._before = [(c, c._attn_implementation_internal) for c in configs.values()]
        for config, name in self._before:
            config._attn_implementation_internal = EAGER if name == "eager" else FUSED
        for index in self._layers:
            for module in self._target.layers[index].modules():
                _PROBES[module] = (self, index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for config, name in self._before:
            config._attn_implementation_internal = name
        for index in self._layers:
            for module in self._target.layers[index].modules():
                _PROBES.pop(module, None)
        self._hold.close()

    def _rows(self, count: int) -> list[int]:
        if self._queries is None:
            return list(range(count))
        for query in self._queries:
            if not -count <= query < count:
                raise ModelError(
                    f"Query row {query} does not exist; this forward has {count} tokens, so give -{count} to "
                    f"{count - 1}."
                )
        return [query % count for query in self._queries]

    def _observe(self, layer: int, count: int, attention: Callable[[Tensor], Tensor], device: Any) -> None:
        """Sum up ``attention(rows)``, which returns ``[B, H, R, K]`` of some queries in fp32."""
        columns, entropies = [], []
        for part in torch.tensor(self._rows(count), dtype=torch.long, device=device).split(ROWS_AT_ONCE):
            weights = attention(part)
            columns.append(weights.mean(1).sum(1))
            # half the time of torch.special.entr
            logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()
            entropies.append(logs.mul_(weights).sum(-1).mean(1).neg())
        self.columns[layer] = torch.stack(columns).sum(0)
        self.entropies[layer] = torch.cat(entropies, 1)


@contextmanager
def prompt_attention(
    target: Target, requirements: Requirements, prompt: Prompt, start: int, stop: int
) -> Iterator[list[Tensor]]:
    """Read the attention of a prompt's querying tokens in the pass from ``start`` to ``stop`` inside the context.

    Shapes: returns ``[S]``.
    """
    found: list[Tensor] = []
    visual = visual_mask(target.config, prompt.ids).nonzero()[:, 0].tolist()
    first = start
    if requirements.queries == "words":
        first = max(start, min(visual[-1] + 1, len(prompt) - 1)) if visual else stop
    if not visual or first >= stop:
        yield found
        return
    queries = range(first - start, stop - start)
    with AttentionProbe(target, queries=queries, layers=requirements.attention or None) as probe:
        yield found
    columns = torch.stack([c[0].to(target.device) for c in probe.columns.values()]).mean(0)
    found.append(pad(columns, (0, len(prompt) - columns.shape[0])))


def attention_rows(
    query: Tensor, key: Tensor, mask: Tensor | None, rows: Tensor, *, scale: float, causal: bool
) -> Tensor:
    """Return the fp32 attention ``[B, H, R, K]`` of some queries, as `scaled_dot_product_attention` computes it.

    Shapes: query ``[B, H, Q, D]``; key ``[B, H_kv, K, D]``; mask ``[B or 1, 1 or H, Q, K]``; rows ``[R]``.
    """
    batch, heads, _, dim = query.shape
    shared, keys = key.shape[1], key.shape[2]
    count = len(rows)
    grouped = query[:, :, rows].reshape(batch, shared, heads // shared * count, dim)
    scores = (grouped @ key.transpose(-1, -2)).view(batch, heads, count, keys).float().mul(scale)
    if mask is not None:
        part = mask[:, :, rows, :keys]
        scores += _additive(part) if part.dtype == torch.bool else part
    elif causal:
        scores += _additive(torch.arange(keys, device=query.device) <= rows[:, None])
    return scores.softmax(-1)


def _additive(mask: Tensor) -> Tensor:
    """Convert a bool mask to an additive one: one for all heads costs a fraction of filling each of them."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if module in _PROBES:
        probe, layer = _PROBES[module]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling

        def rows(part: Tensor) -> Tensor:
            return attention_rows(query, key, attention_mask, part, scale=scale, causal=causal and query.shape[2] > 1)

        probe._observe(layer, query.shape[2], rows, query.device)
    out: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return out


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Run the architecture's own eager attention, which returns its weights."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    output, weights = own(module, query, key, value, attention_mask, **kwargs)
    if module in _PROBES:
        probe, layer = _PROBES[module]
        probe._observe(layer, query.shape[2], lambda part: weights[:, :, part].float(), query.device)
    return output, weights


# Both interfaces: without a mask function of the same name transformers would drop masks silently.
for _name, _function, _like in ((FUSED, _fused, "sdpa"), (EAGER, _eager, "eager")):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_like])
