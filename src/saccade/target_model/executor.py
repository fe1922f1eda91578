"""Executors: what runs a decoder's forward on blocks of tokens and a cache: the stock modules, or fused weights.

A `Target` has the stock modules and, where the architecture fits, one faster executor beside them (`EXECUTORS`), whose
logits equalled theirs when it was made. Where that is not `is_current` any more, since the model was changed or hooked,
the stock modules run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.errors import InputError
from saccade.options import EXECUTORS
from saccade.target_model.attention import ALL
from saccade.target_model.blocks import (
    ForwardOutput,
    Requirements,
    TokenBlock,
    concat_outputs,
    pack_deepstack,
    split_outputs,
)
from saccade.target_model.cache import RowCache
from saccade.target_model.fusing import are_whole
from saccade.target_model.linear import PackedModules
from saccade.target_model.recurrent import UNMASKED_TYPES
from saccade.target_model.sharding import HOLDER
from saccade.target_model.stock import (
    can_switch_attention,
    captured_states,
    mask_labels,
    packing,
    replaced_embeddings,
    routes_on_device,
)
from saccade.target_model.traits import sharing_modes

SWITCH = "SACCADE_EXECUTOR"  # environment variable: the executor of models for which none is named


def chosen(name: str = "auto") -> str:
    """Return the executor to use: the one named or, for auto, that of `SWITCH`."""
    value = os.environ.get(SWITCH) or "auto" if name == "auto" else name
    if value not in EXECUTORS:
        source = f"{SWITCH} must" if name == "auto" else "executor must"
        raise InputError(f"{source} be one of {', '.join(EXECUTORS)}, not {value!r}.")
    return value


class Unread(NamedTuple):
    """Tokens that the device has chosen and the host has not read yet."""

    tokens: Tensor  # `[A, n]`
    counts: Tensor  # `[A]` of each row's, which come first


class Ahead(NamedTuple):
    """Tokens of some rows, and the greedy ones that follow them."""

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]] | Unread  # of every row
    steps: int  # greedy tokens of every row, the last of which has no entry
    vocab: int  # leading ids from which they are chosen


class Executor(Protocol):
    """Forwards of one `Target`."""

    name: str
    rounds: bool = False
    """Whether activations are rounded to int8 before products."""
    fixed_shapes: bool = False
    """Whether forwards are fast in few shapes alone: rows of one size, with logits of all tokens or of the last."""

    @property
    def reserved(self) -> int:
        """Bytes that it may take on the device besides caches."""
        return 0

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules and weights that it was made of."""
        return True

    def new_cache(self, rows: int, max_slots: int, in_levels: bool) -> RowCache:
        """Return an empty cache, for trees that grow level by level (``in_levels``); others as of `RowCache`."""

    def keep(self, cache: RowCache) -> None:
        """Take back a cache whose owner is gone."""
        return

    def forward(self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements) -> list[ForwardOutput]:
        """Run new tokens behind their rows' entries; theirs are pending."""

    def early_exit(self, cache: RowCache, block: TokenBlock, layer: int) -> Tensor:
        """Return the input ``[A, n, d]`` of a layer, and run no further."""

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the LM head's outputs ``[..., V]`` of states ``[..., d]`` after the final norm."""

    def run_ahead(self, cache: RowCache, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """Return the logits ``[steps, A, V]`` behind tokens and the greedy ones behind them, whose entries are pending.

        None where that takes a forward per token. Behind tokens that are not read, no entry is pending yet: the caller
        adds them. ``first``: position of the first token of every row.
        """
        return None


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
        if target.ranks is None and getattr(target.decoder, HOLDER, None) is None:
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
