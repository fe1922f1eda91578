"""Stock modules of transformers on packed sequences, and what is read from them: hidden states and attention.

Modules call the attention function named in their configuration. During a packed forward it splits the sequence into
rows, each of which attends over its segment of the KV arena by the model's own function (fused or eager, with its
windows, soft caps and sinks). The masks passed to the modules are only labels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from saccade.errors import ModelError
from saccade.target_model.cache import RowCache, on_device
from saccade.target_model.executor import Executor
from saccade.target_model.fusing import are_whole
from saccade.target_model.linear import PackedModules
from saccade.target_model.recurrent import UNMASKED_TYPES
from saccade.target_model.sharding import HOLDER
from saccade.target_model.token_blocks import (
    ALL,
    ForwardOutput,
    Requirements,
    TokenBlock,
    concat_outputs,
    pack_deepstack,
    split_outputs,
)
from saccade.target_model.traits import sharing_modes

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm")
"""Attribute names of the norm before the LM head in decoders of transformers."""
ROWS_AT_ONCE = 64  # queries whose attention is in memory at a time
_RUNNING: list[RowCache] = []  # the cache of the forward under way
_PROBES: WeakKeyDictionary[nn.Module, tuple[AttentionProbe, int]] = WeakKeyDictionary()


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes, each given as owner, name and value, while the context is open."""
    with ExitStack() as restoring:
        for owner, name, value in changes:
            if hasattr(owner, name):
                restoring.callback(setattr, owner, name, getattr(owner, name))
            else:
                restoring.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def can_switch_attention(decoder: Any) -> bool:
    """Whether a decoder calls the attention function named in its configuration."""
    return bool(getattr(decoder, "_can_set_attn_implementation", lambda: False)())


def routes_on_device(target: Any) -> bool:
    """Whether a `Target` sends tokens to experts without reading on the host how many go to each.

    torch's product of groups reads that on GPUs but in bfloat16 on those of Hopper and the first Blackwell ones.
    """
    if not any(type(module).__name__.endswith("Experts") for module in target.decoder.modules()):
        return True
    implementation: str = getattr(target.text_config, "_experts_implementation", "eager")
    if implementation != "grouped_mm":
        return implementation == "batched_mm"
    if target.device.type != "cuda":
        return True
    return target.dtype == torch.bfloat16 and torch.cuda.get_device_capability(target.device)[0] in (9, 10)


def _attention(decoder: nn.Module, name: str) -> AbstractContextManager[None]:
    """Run the decoder's attention by our functions of that name while the context is open."""
    configs: dict[int, Any] = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
    changes = []
    for config in configs.values():
        kind = "eager" if config._attn_implementation_internal == "eager" else "sdpa"
        changes.append((config, "_attn_implementation_internal", f"{name}_{kind}"))
    return replaced(changes)


# -- packed sequences ----------------------------------------------------------------------------------------


def mask_labels(kinds: tuple[str, ...], like: Tensor) -> Any:
    """Return labels that modules receive as masks: each names one kind of a row's masks."""

    def label(kind: str) -> Tensor:
        made = like.new_zeros(1, 1, 1, 1)
        made.saccade_kind = kind  # type: ignore[attr-defined]
        return made

    return {kind: None if kind in UNMASKED_TYPES else label(kind) for kind in kinds} if kinds else label(ALL)


@contextmanager
def packing(decoder: nn.Module, cache: RowCache) -> Iterator[None]:
    """Run the decoder's attention on packed sequences laid out by ``cache.layout`` while the context is open."""
    if any(module in _PROBES for module in decoder.modules()):
        raise ModelError("Attention cannot be probed in a packed forward; run the rows one after the other.")
    with _attention(decoder, "saccade_packed"):
        _RUNNING.append(cache)
        try:
            yield
        finally:
            _RUNNING.pop()


def _packed(
    attention: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    cache = _RUNNING[-1]
    kind = getattr(attention_mask, "saccade_kind", None)
    if kind is None:
        raise ModelError(
            f"{type(module).__name__} changes its attention mask before it is used, so that rows cannot share a pass."
        )
    layer: Any = getattr(key, "saccade_layer", None) or cache.layers[module.layer_idx]
    (all_keys, all_values), out = layer.entries(), []
    if not cache.layout.spans:  # rows of a captured forward, together
        kernel = None if attention is sdpa_attention_forward else partial(_by_module, attention, module, options)
        scale = query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"]
        mixed = cache.layout.attend(query[0], all_keys, all_values, scale, kind, kernel)
        return mixed[None].unflatten(2, (query.shape[1], -1)), None
    for span in cache.layout.spans:
        seen = slice(span.start, span.start + span.visible)
        part = query[:, :, span.first : span.first + span.count]
        mask = span.mask(kind)
        if mask is None:
            mask = query.new_zeros(1, 1, span.count, span.visible)
        keys, values = all_keys[None, :, seen], all_values[None, :, seen]
        mixed, *_ = attention(module, part, keys, values, mask, **options)
        out.append(mixed)
    return torch.cat(out, 1), None


def _by_module(attention: Callable[..., Any], module: nn.Module, options: dict[str, Any], *tensors: Tensor) -> Tensor:
    """A kernel of `Layout.attend`: the model's own attention."""
    mixed: Tensor = attention(module, *tensors[:4], **options)[0]
    return mixed.transpose(1, 2)


# -- inputs and hidden states ----------------------------------------------------------------------------------


@contextmanager
def replaced_embeddings(
    decoder: nn.Module, embeddings: Tensor, places: Tensor, mask: Any, deepstack: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Replace the decoder's inputs ``[1, n, d]`` at ``places [1, n]`` (at all where the model hands it none) and its
    deepstack features ``[n, d]`` while the context is open."""
    calls = []

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        calls.append(module)
        if args or kwargs.get("position_ids") is None:
            raise ModelError(
                f"{type(module).__name__} is not called with positions by name, so that its embeddings cannot be "
                "replaced; use another model or plain text."
            )
        own = kwargs.get("inputs_embeds")
        merged = embeddings if own is None else torch.where(places[..., None], embeddings, own)
        kwargs = {**kwargs, "inputs_embeds": merged, "attention_mask": mask}
        if "input_ids" in kwargs:
            kwargs["input_ids"] = None
        if deepstack:
            everywhere = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
            kwargs.update(visual_pos_masks=everywhere, deepstack_visual_embeds=list(deepstack))
        return args, kwargs

    handle = decoder.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ModelError(
            f"{type(decoder).__name__} was called {len(calls)} times in one forward, where once was expected."
        )


@contextmanager
def captured_states(
    target: Any, layers: Sequence[int], final: Literal["post", "pre"] = "post"
) -> Iterator[dict[int, Tensor]]:
    """Capture the residual stream ``[B, Q, d]`` of a `Target`'s unchanged forwards while the context is open.

    Index i is the stream *entering* decoder layer i: 0 is the embeddings with the visual features in place, and
    features added between layers (deepstack of Qwen3-VL) are included. Index ``len(target.layers)`` is the stream after
    the last layer, after (``post``) or before (``pre``) the final norm.
    """
    count = len(target.layers)
    hidden: dict[int, Tensor] = {}

    def entering(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        if states.dim() != 3:
            raise ModelError(
                f"{type(target.decoder).__name__} has several residual streams, so that the states between its layers "
                "cannot be read; use a drafter that reads the last one's alone."
            )
        hidden[index] = states.to(target.device)

    def leaving(index: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        hidden[index] = output.to(target.device)

    with ExitStack() as context:
        context.enter_context(target.stock())  # hooks do not fire in a lean decoder
        for index in layers:
            if not -count - 1 <= index <= count:
                raise ModelError(
                    f"Layer {index} does not exist; this decoder has {count} layers, so give 0 (the first one's "
                    f"input) to {count} (the last one's output)."
                )
            is_last = index % (count + 1) == count
            module = final_norm(target.decoder) if is_last else target.layers[index % (count + 1)]
            if is_last and final == "post":
                handle = module.register_forward_hook(partial(leaving, index))
            else:
                handle = module.register_forward_pre_hook(partial(entering, index), with_kwargs=True)
            context.callback(handle.remove)
        yield hidden


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


# -- attention -----------------------------------------------------------------------------------------------


class AttentionProbe:
    """Column sums ``[B, K]`` and entropies ``[B, R]`` of a `Target`'s attention by layer, or the nearest with some."""

    def __init__(
        self, target: Any, *, queries: Sequence[int] | None = None, layers: Sequence[int] | None = None
    ) -> None:
        count = len(target.layers)
        self.columns: dict[int, Tensor] = {}
        self.entropies: dict[int, Tensor] = {}
        self._target, self._queries = target, queries
        self._layers = [*range(count)] if layers is None else [i + count if i < 0 else i for i in layers]
        for index in self._layers:
            if not 0 <= index < count:
                raise ModelError(f"Layer {index} does not exist; this decoder has layers 0 to {count - 1}.")
        types = target.layer_types or [""] * count
        attending = [index for index, kind in enumerate(types) if kind not in UNMASKED_TYPES]
        if not attending:
            raise ModelError("No layer of this model attends; choose a method that does not need attention statistics.")
        self._layers = sorted({max((a for a in attending if a <= i), default=attending[0]) for i in self._layers})
        self._hold = ExitStack()

    def __enter__(self) -> Self:
        decoder = self._target.decoder
        if any(module in _PROBES for module in decoder.modules()):
            raise ModelError("This model's attention is already being probed; close that probe first.")
        if not can_switch_attention(decoder):
            raise ModelError(
                f"{type(decoder).__name__} has attention code of its own that cannot be probed; choose a method "
                "that does not need attention statistics."
            )
        self._hold.enter_context(self._target.stock())  # a lean decoder bypasses the attention interface
        self._hold.enter_context(_attention(decoder, "saccade_probe"))
        for index in self._layers:
            for module in self._target.layers[index].modules():
                _PROBES[module] = (self, index)
                self._hold.callback(_PROBES.pop, module)
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.close()

    def observe(self, layer: int, query: Tensor, attention: Callable[[Tensor], Tensor]) -> None:
        """Sum up ``attention(rows)``, which returns ``[B, H, R, K]`` of some queries in fp32."""
        columns, entropies = [], []
        queries = range(query.shape[2]) if self._queries is None else self._queries
        rows = on_device(queries, query.device)
        for part in rows.split(ROWS_AT_ONCE):
            weights = attention(part)
            columns.append(weights.mean(1).sum(1))
            # half the time of torch.special.entr
            logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()
            entropies.append(logs.mul_(weights).sum(-1).mean(1).neg())
        self.columns[layer] = torch.stack(columns).sum(0)
        self.entropies[layer] = torch.cat(entropies, 1)


def attention_rows(
    query: Tensor, key: Tensor, mask: Tensor | None, rows: Tensor, *, scale: float, causal: bool
) -> Tensor:
    """Return the fp32 attention ``[B, H, R, K]`` of some queries, as `scaled_dot_product_attention` computes it.

    Shapes: query ``[B, H, Q, D]``; key ``[B, H_kv, K, D]``; mask ``[B or 1, 1 or H, Q, K]``; rows ``[R]``.
    """
    batch, heads, _, dim = query.shape
    shared, keys = key.shape[1], key.shape[2]
    grouped = query[:, :, rows].reshape(batch, shared, -1, dim)
    scores = grouped @ key.transpose(-1, -2)
    scores = scores.view(batch, heads, len(rows), keys).float().mul(scale)
    part = None if mask is None else mask[:, :, rows, :keys]
    if part is None and causal:
        part = torch.arange(keys, device=query.device) <= rows[:, None]
    if part is not None and part.dtype == torch.bool:  # one mask for all heads costs a fraction of filling each
        zeros = torch.zeros(part.shape, device=part.device)
        part = zeros.masked_fill(~part, float("-inf"))
    return (scores if part is None else scores + part).softmax(-1)


def _probed_fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if module in _PROBES:
        probe, layer = _PROBES[module]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and query.shape[2] > 1
        probe.observe(layer, query, partial(attention_rows, query, key, attention_mask, scale=scale, causal=causal))
    options.update(scaling=scaling, is_causal=is_causal)
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out


def _probed_eager(module: nn.Module, query: Tensor, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    output, weights = _eager(module, query, *tensors, **options)
    if module in _PROBES:
        probe, layer = _PROBES[module]
        probe.observe(layer, query, lambda rows: weights[:, :, rows].float())
    return output, weights


def _eager(module: nn.Module, *tensors: Any, **options: Any) -> Any:
    """Run the architecture's own eager attention, which returns its weights."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *tensors, **options)


# -- the executor ----------------------------------------------------------------------------------------------


class StockExecutor(Executor):
    """The model's own modules, one row after the other where they cannot run several as one sequence."""

    name = "stock"

    def __init__(self, target: Any) -> None:
        self._target = target
        self._packs = target.traits.tested and can_switch_attention(target.decoder)
        # Such a decoder may leave tokens out of its last layers where a number of logits is asked for.
        self._shares_entries = "reuse" in sharing_modes(target.text_config)
        if self._shares_entries:  # entries that another device attends to are copied row by row
            self._packs &= len(set(map(str, target.layer_devices))) == 1
        self._packed: PackedModules | None = None

    @property
    def repeats(self) -> bool:
        """Whether packed forwards of a model with recurrent layers, which is whole, read nothing on the host."""
        target = self._target
        weights = [*target.decoder.parameters(), *target.output_embeddings.parameters()]
        is_whole = target.has_states and self._packs and target.shards is None and are_whole(weights)
        return is_whole and routes_on_device(target)

    def pack(self) -> None:
        """Run linear modules on packed copies of their weights where that is faster."""
        target = self._target
        if not target.ranks.is_split and getattr(target.decoder, HOLDER, None) is None:
            self._packed = PackedModules(dict.fromkeys([*target.decoder.modules(), target.output_embeddings]))

    def new_cache(self, rows: int, max_slots: int, in_levels: bool) -> RowCache:
        """As of `Executor`."""
        return RowCache(max_slots=max_slots, rows=rows, **self._target.cache_shape)

    def forward(self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements) -> list[ForwardOutput]:
        """As of `Executor`."""
        with nullcontext() if self._packed is None else self._packed.running(self._target.looks):
            if self._packs and sum(len(block.rows) for block in blocks) > 1:
                return self._run_packed(cache, blocks, requirements)
            return [
                concat_outputs([self._run_row(cache, single, requirements) for single in block.split_rows()])
                for block in blocks
            ]

    def early_exit(self, cache: RowCache, block: TokenBlock, layer: int) -> Tensor:
        """As of `Executor`."""
        parts = []
        for single in block.split_rows():
            with self._target.ending_at(self._target.layers[layer]) as entering:
                self._run_row(cache, single, Requirements())
            parts.append(entering["hidden_states"].to(self._target.device))
        return torch.cat(parts)

    def lm_head(self, states: Tensor) -> Tensor:
        """As of `Executor`."""
        return self._target.output_embeddings(states)  # type: ignore[no-any-return]

    def _run_packed(
        self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements
    ) -> list[ForwardOutput]:
        _, positions, logit_indices = self._target.plan(cache, blocks)
        tokens = torch.cat([block.tokens.flatten() for block in blocks])
        embeddings = None
        if any(block.embeddings is not None for block in blocks):
            embeddings = self._target.embedded(blocks)[None]
        with self._replaced(tokens[None], embeddings, self._labels(), pack_deepstack(blocks)):
            logits, hidden = self.compute(cache, tokens, positions, requirements, logit_indices)
        return split_outputs(blocks, logits, hidden)

    def compute(
        self, cache: RowCache, tokens: Tensor, positions: Tensor, requirements: Requirements, indices: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As of `LeanExecutor`."""
        tokens = tokens.reshape(1, -1)
        inputs = self._stock_inputs(tokens, self._labels(), positions, cache)
        if indices is not None:
            inputs["logits_to_keep"] = indices
        elif self._shares_entries:
            inputs["logits_to_keep"] = torch.arange(tokens.shape[1], device=self._target.device)
        capturing = captured_states(self._target, requirements.layers, requirements.final)
        with packing(self._target.decoder, cache), capturing as hidden:
            logits = self._target.model(**inputs).logits[0].to(self._target.device)
        if indices is not None and len(logits) == tokens.shape[1]:  # some models return all logits regardless
            logits = logits[indices]
        return logits, {i: s[0] for i, s in hidden.items()}

    def _labels(self) -> Any:
        like = torch.empty(0, dtype=self._target.dtype, device=self._target.device)
        return mask_labels(self._target.traits.masks.kinds, like)

    def _run_row(self, cache: RowCache, block: TokenBlock, requirements: Requirements) -> ForwardOutput:
        """Run a block of one row on the stock modules."""
        layout, positions, _ = self._target.plan(cache, [block])
        (span,) = layout.spans
        unmasked = torch.zeros(1, 1, span.count, span.visible, dtype=self._target.dtype, device=self._target.device)
        masks = {kind: unmasked if mask is None else span.mask(kind) for kind, mask in span.masks.items()}
        masks.update(dict.fromkeys(UNMASKED_TYPES & masks.keys()))
        mask: Any = masks if self._target.traits.masks.kinds else masks[ALL]
        inputs = self._stock_inputs(block.tokens, mask, positions, cache)
        if span.row in cache.carried:
            inputs |= cache.carried[span.row].of(span.count)
        if block.logits_from:
            first = block.count - max(block.count - block.logits_from, 1)
            needs_all = self._shares_entries and bool(requirements.any or self._target.is_observed)
            inputs["logits_to_keep"] = block.count - first
            if needs_all:  # a number would be taken as leave to skip what is not kept
                inputs["logits_to_keep"] = torch.arange(first, block.count, device=self._target.device)
        replacing = self._replaced(block.tokens, block.embeddings, mask, block.deepstack)
        with captured_states(self._target, requirements.layers, requirements.final) as hidden, replacing:
            logits: Tensor = self._target.model(**inputs).logits
        first = logits.shape[1] - (block.count - block.logits_from)
        return ForwardOutput(logits[:, first:].to(self._target.device), hidden)

    def _replaced(
        self, tokens: Tensor, embeddings: Tensor | None, mask: Any, deepstack: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Replace the decoder's inputs at the placeholders among the tokens while the context is open."""
        if embeddings is None:
            return nullcontext()
        return replaced_embeddings(
            self._target.decoder, embeddings, self._target.family.visual_mask(tokens), mask, deepstack
        )

    def _stock_inputs(self, tokens: Tensor, mask: Any, positions: Tensor, cache: RowCache) -> dict[str, Any]:
        """Keyword arguments of a stock forward over positions ``[3 or 1, n]``."""
        position_ids = positions
        if self._target.has_rope_index:
            position_ids = positions[:, None].expand(self._target.rope_axes, -1, -1)
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": position_ids,
            "past_key_values": cache,
            "use_cache": True,
        }


for _name, _function, _like in (
    ("saccade_packed_sdpa", partial(_packed, sdpa_attention_forward), "sdpa"),
    ("saccade_packed_eager", partial(_packed, _eager), "eager"),
    ("saccade_probe_sdpa", _probed_fused, "sdpa"),
    ("saccade_probe_eager", _probed_eager, "eager"),
):  # both interfaces: without a mask function of the same name transformers would drop masks silently
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_like])
