"""DREAM's head, whose entries cross-attend to the target's features, and its draft session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.block import (
    Block,
    Fusable,
    GatedMLP,
    Placement,
    RMSNorm,
    cached_attention,
    rotary_of,
    turn,
    turn_packed,
)
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, Step
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.pruning import Pruning
from saccade.draft.trees.policy import Proposer
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.forward import ALL, Layout, Span, additive
from saccade.tree import DraftTree
from saccade.verify.rule import Rows


class Dream(Head):
    """Decoder block, cross-attention block, decoder block (DREAM, Section 3.1).

    The decoder blocks get the embeddings of entries alone. In between every entry attends to the features of ALL
    earlier
    tokens: the target's, and below the last emitted token the head's own outputs. Visual tokens with little attention
    have no entry (Section 3.3), but their features are attended to. Compression does not change positions.

    Options:
        keep: share of every medium's tokens with entries, those with the most attention in the target's last layer.
        gate: of the cross-attention's residual: ``tanh``, ``open`` or ``replace``, see `CrossBlock`.
        rotary: rotary positions of the features' tokens in the cross-attention.
        direct: add a projection of the previous token's feature to every entry's stream ahead of the cross-attention;
            no effect without cross-attention.
        initial: a block before the cross-attention (Table 2).
        cross: cross-attention blocks (Table 2).
        final: a block after it (Table 2).
        form: ``own``, or ``released``: no norms ahead of the first attention and of the features, a norm behind the
            last block, and an entry of the first token, which attends to all features of the prompt alike.
    """

    kind: ClassVar[str] = "dream"
    defaults: ClassVar[Mapping[str, Any]] = {
        "keep": 0.75,
        "gate": "open",
        "rotary": True,
        "direct": True,
        "initial": True,
        "cross": 1,
        "final": True,
        "form": "own",
    }
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "gate": ("tanh", "open", "replace"),
        "cross": (0, 1, 2),
        "form": ("own", "released"),
        **dict.fromkeys(("initial", "final", "rotary", "direct"), (True, False)),
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("form",)
    default_steps: ClassVar[int] = 2

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        options = config.options
        keep = options["keep"]
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            raise ModelError(f"keep must be a share above 0 and up to 1, not {keep!r}.")
        if not (options["initial"] or options["final"]):
            raise ModelError("A dream head needs its initial or its final block; leave out at most one.")
        self.is_released = options["form"] == "released"
        self.first = Block(config, 0, not self.is_released) if options["initial"] else None
        width, direct = config.hidden_size, options["direct"] and options["cross"]
        self.direct_norm = RMSNorm(width, config.norm_eps) if direct else None
        self.direct = nn.Linear(width, width, bias=False) if direct else None
        self.cross = nn.ModuleList(
            CrossBlock(config, options["gate"], i, options["rotary"], not self.is_released)
            for i in range(options["cross"])
        )
        self.last = Block(config, int(options["initial"])) if options["final"] else None
        self.norm = RMSNorm(width, config.norm_eps) if self.is_released else nn.Identity()

    @property
    def blocks(self) -> int:
        return sum(block is not None for block in (self.first, self.last))

    @property
    def pruning(self) -> Pruning:
        """Choice of the visual tokens with entries."""
        keep = self.config.options["keep"]
        return Pruning("attention", keep_images=keep, keep_videos=keep, layers=(-1,))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        at: Placement,
        step: Step = 0,
        *,
        reach: Tensor | None = None,
        memory: RowCache | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """As in `Head.forward`, with a separate number of features.

        Shapes: features ``[B, M, d]``; reach ``[B or 1, N, F]``; places ``[B or 1, M]``.
        """
        reach = at.attention_mask if reach is None else reach
        return self.finish(self.begin(embeddings, at), features, at, reach, memory, places)

    def begin(self, embeddings: Tensor, at: Placement) -> Tensor:
        """Return the stream ``[B, N, d]`` after the first block, before any feature."""
        if self.first is None:
            return embeddings
        out: Tensor = self.first(embeddings, at)
        return out

    def finish(
        self,
        stream: Tensor,
        features: Tensor,
        at: Placement,
        reach: Tensor | None,
        memory: RowCache | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return the output ``[B, N, d]`` of `forward` from the stream of `begin`."""
        out, where = stream, (at, at if places is None else Placement(places))
        if self.direct is not None and self.direct_norm is not None:
            out = out + self.direct(self.direct_norm(_latest(features, at.positions, places)))
        for block in self.cross:
            out = block(out, features, reach, memory, where)
        if self.last is not None:
            out = self.last(out, at)
        normed: Tensor = self.norm(out)
        return normed

    def new_memory(self, rows: int) -> RowCache:
        """Return an empty cache for keys and values of features in up to ``rows`` rows."""
        return RowCache([next(self.parameters()).device] * len(self.cross), rows)


def _latest(features: Tensor, positions: Tensor, places: Tensor | None) -> Tensor:
    """Return the feature ``[B, N, d]`` of the token before each entry's, of features ``[B, M, d]`` at ``places``."""
    if places is None:
        return features
    index = (positions - places[:, :1]).expand(len(features), -1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))


class DreamDraftSession(HeadDraftSession):
    """Draft session of a DREAM head.

    Every entry brings the feature of the token before its own into the memory; entries of the prompt also bring those
    of the dropped tokens in between. An entry attends to its row's committed features and to those that its ancestors
    and itself brought in this step, never to a sibling's, which only the sibling's children bring.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        assert isinstance(drafter.head, Dream)
        self._dream = drafter.head
        self._pruning = drafter.head.pruning
        self._dropped: list[list[int]] = [[] for _ in range(rows)]
        self.memory: RowCache = drafter.head.new_memory(rows)  # keys and values of features; slot j holds token j
        self.memory.share_numbers(self.cache)
        if self._pruning.needs_attention:
            target.requirements.add_attention(self._pruning.layers, "all")

    def forget(self, row: int) -> None:
        super().forget(row)
        self.memory.release(row)
        self._dropped[row] = []

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        self.memory.reserve(row, self._room[row] + self._slack)
        super().load(row, prompt, prefill)

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int) -> DraftTree:
        tree = super().propose(rows, new, proposer, limit)
        self.memory.drop(rows)
        return tree

    def _entries(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        self._dropped[row] = self._choose(row, prompt, prefill)
        seen = torch.ones(len(prompt), dtype=torch.bool)
        seen[self._dropped[row]] = False
        tokens = seen.nonzero()[:, 0]
        if not self._dream.is_released or len(prompt) == 1:
            tokens = tokens[tokens > 0]
        held = min(self.cache.lengths[row], int((tokens < prefill.start).sum()))
        self.memory.crop(row, int(tokens[held - 1]) if held else 0)
        return tokens, tokens - 1

    def _choose(self, row: int, prompt: Prompt, prefill: PrefillResult) -> list[int]:
        """Return visual tokens without entries; those of a cached prefix do not change."""
        config = self._drafter.target.config
        before = [place for place in self._dropped[row] if place < prefill.start]
        if not self._pruning.needs_attention or prefill.columns is None:
            return before
        dropped = self._pruning.dropped(config, prompt, prefill.prompt, prefill.columns, config)
        # The last token always has an entry, which brings the features of all dropped tokens before it.
        return before + [place for place in dropped if prefill.start <= place < len(prompt) - 1]

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        tokens = tokens.to(self._device)
        first, last = self.memory.lengths[row], int(tokens[-1])
        # The released form's entry of the first token sees no feature before it, and so all alike, the last one too.
        stop = last + int(self._dream.is_released and first == 0)
        reach = torch.arange(first, stop, device=self._device) < tokens[:, None]
        self._lay(self.cache, [row], len(tokens), None)
        self._lay_memory(row, stop - first, reach[None])
        self._dream(
            self._features[row][first:stop][None],
            embedded,
            Placement((tokens - 1)[None], cache=self.cache),
            memory=self.memory,
            places=torch.arange(first, stop, device=self._device)[None],
        )
        self.cache.commit([row], [range(len(tokens))])
        self.memory.commit([row], [range(last - first)])

    def _lay_memory(self, row: int, count: int, reach: Tensor) -> None:
        """Lay out ``count`` new features of a prompt, with the mask of its entries.

        Shapes: reach ``[1, N, count]``.
        """
        held, start = self.memory.lengths[row], self.memory.start(row)
        mask = pad(additive(reach, self._features[0].dtype), (held, 0))
        span = Span(row, 0, reach.shape[1], start, held + count, {ALL: mask})
        self.memory.layout = Layout([span], slice(start + held, start + held + count), self.memory.slots)
        self.memory.pending[row] += count

    @property
    def _caches(self) -> list[RowCache]:
        return [self.cache, self.memory]

    def _catch_up(self, rows: Sequence[int], new: Sequence[Sequence[int]], width: int) -> Tensor:
        hidden = super()._catch_up(rows, new, width)
        self.memory.commit(rows, [range(len(tokens)) for tokens in new])
        return hidden

    def _forward(
        self, rows: Rows, features: Tensor, tokens: Tensor, mask: Tensor | None, gap: int | None, step: int
    ) -> Tensor:
        at = self._placed(self.memory, rows, tokens.shape[1], gap)
        self._lay(self.cache, rows, tokens.shape[1], mask)
        self._lay(self.memory, rows, tokens.shape[1], mask)
        out: Tensor = self._dream(features, self._embed(rows, tokens), at, step, memory=self.memory)
        return out


_OPEN = 1.0
"""Initial weight of an open gate; its tanh is .76."""


class CrossAttention(Fusable):
    """Grouped-query attention to another sequence (DREAM, Eq. 1), with QK-norm.

    As released, features have no positions. With rotary positions, keys rotate by the positions of the features'
    tokens, and queries by that of the latest feature visible to their entry.
    """

    def __init__(self, config: HeadConfig, rotary: bool = False) -> None:
        super().__init__()
        self._config = config
        self._rotary = rotary_of(config) if rotary else None
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, config.norm_eps)
        self.k_norm = RMSNorm(dim, config.norm_eps)

    def groups(self) -> dict[str, list[Any]]:
        return {"query": [self.q_proj], "kv": [self.k_proj, self.v_proj], "out": [self.o_proj]}

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        reach: Tensor,
        memory: RowCache | Any,
        place: int,
        where: tuple[Placement, Placement] | None = None,
    ) -> Tensor:
        if self.products and isinstance(memory, RowCache):
            return self._packed(x.flatten(0, 1), features.flatten(0, 1), memory, place, where).view(x.shape)
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        q = self.q_norm(self.q_proj(x).unflatten(-1, (heads, dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(features).unflatten(-1, (kv, dim))).transpose(1, 2)
        v = self.v_proj(features).unflatten(-1, (kv, dim)).transpose(1, 2)
        if self._rotary is not None:
            assert where is not None
            q, k = turn(q, where[0].angles(self._rotary)), turn(k, where[1].angles(self._rotary))
        q, k = q.to(v.dtype), k.to(v.dtype)
        mixed = cached_attention(q, k, v, reach, memory, place)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _packed(
        self,
        x: Tensor,
        features: Tensor,
        memory: RowCache,
        place: int,
        where: tuple[Placement, Placement] | None,
    ) -> Tensor:
        """As `forward` by the fused products, for all rows' entries and features ``[T, d]`` as one sequence each."""
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        q = self.q_norm(self.products["query"](x).view(-1, heads, dim))
        keys_values = self.products["kv"](features).view(-1, 2 * kv, dim)
        k = self.k_norm(keys_values[:, :kv])
        if self._rotary is not None:
            assert where is not None
            if where[0] is where[1]:
                q, k = turn_packed(torch.cat([q, k], 1), where[0].angles(self._rotary)).split([heads, kv], 1)
            else:
                q, k = (turn_packed(t, at.angles(self._rotary)) for t, at in zip((q, k), where, strict=True))
        keys, values = memory.layers[place].write(k.transpose(0, 1), keys_values[:, kv:].transpose(0, 1))
        return self.products["out"](memory.layout.attend(q.transpose(0, 1), keys, values, dim**-0.5))


class CrossBlock(nn.Module):
    """Norm and cross-attention, norm and gated MLP.

    With the gate ``tanh`` both residuals are scaled by the tanh of a weight initialised to zero, so that an untrained
    block is the identity (as DREAM was released); ``open`` initialises it to one. With ``replace`` the attention's
    output replaces the stream (DREAM, Section 3.1), and the MLP adds to it.
    """

    def __init__(
        self, config: HeadConfig, gate: str, place: int, rotary: bool = False, norms_features: bool = True
    ) -> None:
        super().__init__()
        self._place = place
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feature_norm = RMSNorm(config.hidden_size, config.norm_eps) if norms_features else nn.Identity()
        self.cross_attn = CrossAttention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)
        first = _OPEN if gate == "open" else 0.0
        self.gates = None if gate == "replace" else nn.Parameter(torch.full((2,), first))

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        reach: Tensor,
        memory: RowCache | Any = None,
        where: tuple[Placement, Placement] | None = None,
    ) -> Tensor:
        """The residual stream after the block.

        Shapes: x ``[B, N, d]``; features ``[B, M, d]``; reach ``[B or 1, N, F]``; where ``[B or 1, N]``.
        """
        attended = self.cross_attn(
            self.input_layernorm(x), self.feature_norm(features), reach, memory, self._place, where
        )
        if self.gates is None:
            x = attended
            return x + self.mlp(self.post_attention_layernorm(x), memory)  # type: ignore[no-any-return]
        gates = self.gates.tanh()
        x = x + gates[0] * attended
        return x + gates[1] * self.mlp(self.post_attention_layernorm(x), memory)  # type: ignore[no-any-return]
