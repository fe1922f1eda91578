"""Adapter of a stock Hugging Face model: forwards over prompts and draft trees of many rows at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.inputs.families import family_of, join, type_ids
from saccade.inputs.families.family import Prompt
from saccade.target_model.cache import RowCache
from saccade.target_model.forward import (
    ALL,
    ForwardOutput,
    Layout,
    Requirements,
    TokenBlock,
    concat_outputs,
    ending_at,
    pack_deepstack,
    replaced_embeddings,
    split_outputs,
)
from saccade.target_model.graphs import GraphPool
from saccade.target_model.lean import LeanDecoder, exact_decoder, gives_stock_logits, is_exact, lean_decoder
from saccade.target_model.sharding import Ranks, Shards
from saccade.target_model.stock import FeatureTap, can_switch_attention, mask_labels, packing
from saccade.target_model.traits import ModelTraits, compute_device


class Target:
    """A loaded model with the forwards of speculative decoding."""

    def __init__(self, model: Any, lean: bool = True, exact: bool = False) -> None:
        self.model = model.eval()
        self.config: Any = self.model.config
        self.text_config: Any = self.config.get_text_config(decoder=True)
        self.traits = ModelTraits.of(self.config)
        self.decoder = _decoder(self.model)
        self.layers: nn.ModuleList = self.decoder.layers
        self.ranks = Ranks.of(self.model)  # processes over which the weights are split; None for a whole model
        self.shards = Shards.of(self.decoder)
        self._embeddings: Any = self.model.get_input_embeddings()
        self.device: torch.device = compute_device(self._embeddings)
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        base = getattr(self.model, "base_model", model)
        self._rope_index = getattr(base, "get_rope_index", None)
        self._layer_devices = [compute_device(layer) for layer in self.layers]
        self._packs = self.traits.tested and can_switch_attention(self.decoder)
        self._stock_contexts = 0
        self._pins = 0
        self._pinned: bool | None = None
        self._lean: LeanDecoder | None = None
        self.graphs: GraphPool | None = None
        self.exact = exact
        if exact:
            self._use_exact()
        elif lean and self.traits.tested:
            self.use_lean()

    @property
    def dtype(self) -> torch.dtype:
        """The weights' current dtype, which masks must share."""
        dtype: torch.dtype = self._embeddings.weight.dtype
        return dtype

    @property
    def is_lean(self) -> bool:
        """Whether forwards run on a lean decoder."""
        if self._lean is None or self._stock_contexts:
            return False
        if self._pinned is not None:
            return self._pinned
        if self.graphs is not None:
            self.graphs.check_weights()
        current = self._lean.is_current
        self._pinned = current if self._pins else None
        return current

    @property
    def has_rope_index(self) -> bool:
        """Whether positions are those of M-RoPE."""
        return self._rope_index is not None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one cache entry over all layers, by the configuration."""
        text = self.text_config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        shares = 1 if self.ranks is None else self.ranks.shares
        return int(2 * heads * dim * len(self.layers) * self._embeddings.weight.element_size()) // shares

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Check only before the first forward that the model is unchanged, while the context is open."""
        self._pins += 1
        try:
            yield
        finally:
            self._pins -= 1
            if not self._pins:
                self._pinned = None

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Run forwards through the stock modules, whose hooks fire, while the context is open."""
        self._stock_contexts += 1
        try:
            yield
        finally:
            self._stock_contexts -= 1

    @torch.inference_mode()
    def use_lean(self) -> None:
        """Install a lean decoder if the architecture fits and its logits equal the stock model's."""
        if self.exact:
            return  # it has one
        self._lean = lean_decoder(self.model, self.decoder)
        if self._lean is not None and not gives_stock_logits(self):
            self._lean = None
        self.graphs = GraphPool.of(self, self._lean)

    def _use_exact(self) -> None:
        """Install the decoder of exact mode."""
        if self.ranks is not None:
            raise ModelError(
                "Exact mode needs the whole target in one process, but it is split over several; leave one of them out."
            )
        self._lean = exact_decoder(self)
        if not gives_stock_logits(self):
            raise ModelError(
                "The decoder of exact mode gives other logits than the model's own modules, so it cannot replace them; "
                "leave exact out."
            )
        if not is_exact(self):
            raise ModelError(
                "Exact mode does not hold on this machine: a tree gives other bits than its tokens one by one; leave "
                "exact out, and please report processor and version of torch."
            )
        self.graphs = GraphPool.of(self, self._lean)

    def new_cache(self, rows: int, max_slots: int = sys.maxsize) -> RowCache:
        """Return an empty KV cache for up to ``rows`` rows; ``max_slots`` as in `RowCache`."""
        if self.graphs is not None:
            return self.graphs.cache(self._layer_devices, rows, max_slots)
        return RowCache(self._layer_devices, rows, max_slots)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the decoder's embeddings ``[..., d]`` of ids."""
        embedded: Tensor = self._embeddings(ids)
        return embedded

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the LM head's outputs ``[..., V]`` of states ``[..., d]`` after the final norm, in its dtype."""
        if self.is_lean and not self.exact:
            assert self._lean is not None
            return self._lean.logits(states.flatten(0, -2)).view(*states.shape[:-1], -1)
        logits: Tensor = self.model.get_output_embeddings()(states)
        return logits

    def check_length(self, length: int) -> None:
        """Raise `InputError` when a sequence of ``length`` tokens does not fit the model's context."""
        self.traits.limits.check(length)

    def positions(self, ids: Tensor, prompt: Prompt) -> tuple[Tensor | None, int]:
        """M-RoPE positions ``[3, 1, S]`` of the prompt's ids ``[1, S]`` and its rope delta; (None, 0) without M-RoPE.

        Passed explicitly, because the model would otherwise keep the delta of an earlier request on its module.
        """
        if self._rope_index is None:
            return None, 0
        if not prompt.media:
            return torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1), 0
        inputs: dict[str, Any] = {**join(self.config, prompt.media), **type_ids(self.config, prompt.ids)}
        inputs["attention_mask"] = torch.ones_like(ids)
        wanted = inspect.signature(self._rope_index).parameters
        known = {name: value.to(ids.device) for name, value in inputs.items() if name in wanted}
        positions, delta = self._rope_index(ids, **known)
        return positions, int(delta.flatten()[0])

    # -- forwards ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements | None = None
    ) -> list[ForwardOutput]:
        """Run new tokens of some rows behind their committed and pending entries, as one packed sequence.

        Models that cannot run such a sequence run one row after the other. Rows on different sides of a longrope
        embedding's threshold never share a pass, because its longest row selects the factors for all.
        """
        requirements = requirements or Requirements()
        if self.traits.limits.longrope_threshold is None:
            if cache.graphs is None or len(blocks) > 1 or not self.is_lean:
                return self._run_blocks(cache, blocks, requirements)
            return [cache.graphs.run(blocks[0], requirements, partial(self._run_blocks, cache, blocks, requirements))]
        parts = [list(block.split_rows()) for block in blocks]
        singles = [single for part in parts for single in part]
        outputs: dict[int, ForwardOutput] = {}
        for chosen in self._group_by_rope(cache, singles):
            group = self._run_blocks(cache, [singles[i] for i in chosen], requirements)
            outputs.update(zip(chosen, group, strict=True))
        ordered = iter([outputs[i] for i in range(len(singles))])
        return [concat_outputs([next(ordered) for _ in part]) for part in parts]

    @torch.inference_mode()
    def early_exit(self, cache: RowCache, block: TokenBlock, layer: int) -> Tensor:
        """Run `forward` up to the input of ``layer``, ``[A, n, d]``.

        Entries of later layers are not written, so these pending entries can only be dropped.
        """
        singles = list(block.split_rows())
        states: list[Tensor] = [block.tokens] * len(singles)
        for chosen in self._group_by_rope(cache, singles):
            if not self.is_lean:
                for index in chosen:
                    with ending_at(self.layers[layer]) as entering:
                        self._run_stock(cache, singles[index], Requirements())
                    states[index] = entering["hidden_states"].to(self.device)
                continue
            assert self._lean is not None
            part = [singles[index] for index in chosen]
            layout, positions, _ = self._plan(cache, part)
            x = torch.cat([self.embed(single.tokens)[0] for single in part])
            reached = self._lean(x, positions, cache, layout, until=layer).normed
            for index, state in zip(chosen, reached.split(block.count), strict=True):
                states[index] = state[None]
        return torch.cat(states)

    @torch.inference_mode()
    def forward_prompt(self, cache: RowCache, row: int, prompt: Prompt, requirements: Requirements) -> ForwardOutput:
        """Run a whole prompt with its raw media through the stock model into an empty row; its entries are pending.

        For families whose placeholders are unknown; `InputError` and `ModelError` as the model raises them.
        """
        ids = torch.tensor([prompt.ids], device=self.device)
        self._plan(cache, [TokenBlock([row], ids, logits_from=len(prompt) - 1)])
        inputs: dict[str, Any] = {
            name: value.to(device=self.device, dtype=self.dtype if value.is_floating_point() else None)
            for name, value in join(self.config, prompt.media).items()
        }
        inputs.update(attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        positions, _ = self.positions(ids, prompt)
        if positions is not None:
            inputs["position_ids"] = positions
        with self._captured(requirements) as hidden:
            logits = self.model(input_ids=ids, **inputs).logits
        return ForwardOutput(logits, hidden)

    def _group_by_rope(self, cache: RowCache, blocks: Sequence[TokenBlock]) -> list[list[int]]:
        """Group single-row blocks that may share a pass: once run, on the same side of a longrope threshold."""
        sides: dict[bool, list[int]] = {False: [], True: []}
        for index, block in enumerate(blocks):
            # Only prompt tokens bring their positions; those of draft trees behind them start where logits start.
            new = 0 if block.positions is None else min(block.logits_from + 1, block.count)
            sides[self.traits.limits.is_long(cache.lengths[block.rows[0]] + new)].append(index)
        return [side for side in sides.values() if side]

    def _run_blocks(
        self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements
    ) -> list[ForwardOutput]:
        if self.exact and not self.is_lean and not self._stock_contexts:
            raise ModelError(
                "The model was changed after it was loaded in exact mode (a hook, a cast, or other modules), which its "
                "decoder cannot follow; undo that, or load it again."
            )
        if not self.is_lean and (sum(len(b.rows) for b in blocks) == 1 or not self._packs):
            return [
                concat_outputs([self._run_stock(cache, single, requirements) for single in block.split_rows()])
                for block in blocks
            ]
        layout, positions, logit_indices = self._plan(cache, blocks)
        embeddings = [b.embeddings if b.embeddings is not None else self.embed(b.tokens) for b in blocks]
        parts = [part.flatten(0, 1) for part in embeddings]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.is_lean:
            assert self._lean is not None
            deepstack = pack_deepstack(blocks)
            output = self._lean(x, positions, cache, layout, requirements=requirements, deepstack=deepstack)
            normed = output.normed if logit_indices is None else output.normed[logit_indices]
            return split_outputs(blocks, self._lean.logits(normed), output.hidden)
        tokens = torch.cat([block.tokens.flatten() for block in blocks])[None]
        labels = mask_labels(self.traits.masks.kinds, x)
        inputs = self._stock_inputs(tokens, labels, positions, cache)
        if logit_indices is not None:
            inputs["logits_to_keep"] = logit_indices
        is_replaced = any(block.embeddings is not None for block in blocks)
        deepstack = pack_deepstack(blocks)
        replacing = replaced_embeddings(self.decoder, x[None] if is_replaced else None, labels, deepstack)
        with packing(self.decoder, cache), self._captured(requirements) as hidden, replacing:
            logits = self.model(**inputs).logits[0].to(self.device)
        return split_outputs(blocks, logits, {i: s[0] for i, s in hidden.items()})

    @contextmanager
    def _captured(self, requirements: Requirements) -> Iterator[dict[int, Tensor]]:
        """Capture the required hidden states of a stock forward."""
        if not requirements.layers:
            yield {}
            return
        with FeatureTap(self, requirements.layers, requirements.final) as tap:
            yield tap.hidden

    # -- layout, masks and positions -----------------------------------------------------------------------

    def _plan(self, cache: RowCache, blocks: Sequence[TokenBlock]) -> tuple[Layout, Tensor, Tensor | None]:
        """Layout, positions ``[3 or 1, T]``, and indices of the tokens whose logits are computed (None: all)."""
        positions = [self.place(cache, block).flatten(1) for block in blocks]
        parts = []
        for block in blocks:
            lengths, pending = [cache.lengths[row] for row in block.rows], cache.pending[block.rows[0]]
            masks = self.traits.masks.build(
                block.attention_mask,
                lengths,
                block.count,
                pending,
                block.depth,
                self.dtype,
                self.device,
                block.slot_shifts,
            )
            parts.append((block.rows, block.count, masks))
        layout = cache.plan_layout(parts)
        if len({p.shape[0] for p in positions}) > 1:  # text beside a prompt with M-RoPE positions
            positions = [p.expand(3, -1) for p in positions]
        joint = positions[0] if len(positions) == 1 else torch.cat(positions, 1)
        if not any(block.logits_from for block in blocks):
            return layout, joint, None
        indices, start = [], 0
        for block in blocks:
            stop = start + block.tokens.numel()
            each = torch.arange(start, stop, device=self.device).view(-1, block.count)
            indices.append(each[:, block.logits_from :].flatten())
            start = stop
        return layout, joint, indices[0] if len(indices) == 1 else torch.cat(indices)

    def place(self, cache: RowCache, block: TokenBlock) -> Tensor:
        """Position ids ``[3 or 1, A, n]`` of a block's tokens."""
        if block.positions is not None:
            return block.positions
        count, rows, depth = block.count, block.rows, block.depth
        if depth is None:
            pending = cache.pending[rows[0]]
            depth = torch.arange(pending, pending + count, device=self.device)[None]
        deltas = block.rope_deltas or [0] * len(rows)
        lengths = [cache.lengths[row] for row in rows]
        first = [n + d for n, d in zip(lengths, deltas, strict=True)]
        depth = depth[:, depth.shape[1] - count :]
        if min(first) == max(first):
            positions = (depth + first[0]).expand(len(rows), -1)
        else:
            positions = depth + cache.numbers.get(first).to(self.device)[:, None]
        ahead = cache.numbers.get(deltas).to(self.device)[:, None] if max(deltas) > 0 else None
        return self.traits.limits.clamp_positions(positions, lengths, ahead)[None]

    # -- the stock modules, a row at a time ----------------------------------------------------------------

    def _run_stock(self, cache: RowCache, block: TokenBlock, requirements: Requirements) -> ForwardOutput:
        """Run a block of one row."""
        layout, positions, _ = self._plan(cache, [block])
        (span,) = layout.spans
        unmasked = torch.zeros(1, 1, span.count, span.visible, dtype=self.dtype, device=self.device)
        masks = {kind: unmasked if (own := span.mask(kind)) is None else own for kind in span.masks}
        mask: Any = masks if self.traits.masks.kinds else masks[ALL]
        inputs = self._stock_inputs(block.tokens, mask, positions, cache)
        if block.logits_from:
            inputs["logits_to_keep"] = max(block.count - block.logits_from, 1)
        replacing = replaced_embeddings(self.decoder, block.embeddings, mask, block.deepstack)
        with self._captured(requirements) as hidden, replacing:
            logits: Tensor = self.model(**inputs).logits
        logits = logits[:, logits.shape[1] - (block.count - block.logits_from) :].to(self.device)
        return ForwardOutput(logits, hidden)

    def _stock_inputs(self, tokens: Tensor, mask: Any, positions: Tensor, cache: RowCache) -> dict[str, Any]:
        """Keyword arguments of a stock forward over positions ``[3 or 1, n]``."""
        position_ids = positions if self._rope_index is None else positions[:, None].expand(3, -1, -1)
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": position_ids,
            "past_key_values": cache,
            "use_cache": True,
        }


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or not hasattr(decoder, "layers"):
        raise ModelError(
            f"{type(model).__name__} has no decoder layers; expected a causal language model or an "
            "image-text-to-text model of transformers."
        )
    return decoder


TYPES = ("mm_token_type_ids", "token_type_ids")
"""Forward arguments that distinguish image tokens from text."""


def check_types(model: Any) -> None:
    """Refuse media for a family outside the registry whose model needs token types.

    The meaning of its types (positions, bidirectional attention) is unknown, and without them outputs would be wrong.
    """
    family = family_of(model.config)
    if family.is_known:
        return
    base = getattr(model, "base_model", model)
    calls = [model.forward, base.forward, getattr(base, "get_rope_index", None)]
    wanted = {name for call in calls if call is not None for name in inspect.signature(call).parameters}
    types = next((name for name in TYPES if name in wanted), None)
    if types is not None:
        raise ModelError(
            f"Images cannot be given to the family {family.name!r}, whose model needs {types} of unknown meaning for "
            "them; leave images out, or use a model of a tested family."
        )
