"""DREAM's head, whose entries cross-attend to the target's features, and its draft session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.head import Attention, Block, GatedMLP, Head, HeadConfig, Placement, RMSNorm, Step
from saccade.draft.heads.session import HeadDrafter, HeadEntries
from saccade.draft.pruning import Pruning
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ALL, Layout, Span, additive


class Dream(Head):
    """Decoder block, cross-attention block, decoder block (DREAM, Section 3.1).

    The decoder blocks get the embeddings of entries alone. In between every entry attends to the features of all
    earlier tokens: the target's, and below the last emitted token the head's own outputs. Visual tokens with little
    attention have no entry (Section 3.3), but their features are attended to. Compression does not change positions.
    """

    kind: ClassVar[str] = "dream"
    defaults: ClassVar[Mapping[str, Any]] = {
        "keep": 0.75,  # share of a medium's tokens with entries: those with the most attention in the last layer
        "gate": ("open", "tanh", "replace"),  # of the cross-attention's residual, see `CrossBlock`
        "rotary": (True, False),  # rotary positions of the features' tokens in the cross-attention
        # Add a projection of the previous token's feature to an entry's stream ahead of the cross-attention, if any.
        "direct": (True, False),
        "initial": (True, False),  # a block before the cross-attention (Table 2)
        "cross": (1, 0, 2),  # cross-attention blocks (Table 2)
        "final": (True, False),  # a block after them (Table 2)
        # Released: no norms ahead of the first attention and of the features, a norm after the last block, and an
        # entry of the first token, which attends to all features of the prompt alike.
        "form": ("own", "released"),
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("form",)
    default_steps: ClassVar[int] = 2
    positions = "tokens"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        options = config.options
        keep = options["keep"]
        if not 0 < keep <= 1:
            raise ModelError(f"keep must be a share above 0 and up to 1, not {keep!r}.")
        if not (options["initial"] or options["final"]):
            raise ModelError("A dream head needs its initial or its final block; leave out at most one.")
        self.is_released = options["form"] == "released"
        self.first = Block(config, 0, not self.is_released) if options["initial"] else None
        width, direct = config.hidden_size, options["direct"]
        self.direct_norm = RMSNorm(width, config.norm_eps) if direct else None
        self.direct = nn.Linear(width, width, bias=False) if direct else None
        self.cross = nn.ModuleList(
            CrossBlock(config, options["gate"], i, options["rotary"], not self.is_released)
            for i in range(options["cross"])
        )
        self.memories = len(self.cross)
        self.last = Block(config, int(options["initial"])) if options["final"] else None
        if self.is_released:
            self.norm = RMSNorm(width, config.norm_eps)
        self.blocks = sum(block is not None for block in (self.first, self.last))
        self.pruning = Pruning(keep, keep, "attention", layers=(-1,))  # choice of the visual tokens with entries

    def new_caches(self, rows: int) -> list[RowCache]:
        return [*super().new_caches(rows), RowCache([next(self.parameters()).device] * self.memories, rows)]

    def forward(
        self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0, over: Placement | None = None
    ) -> Tensor:
        """As in `Head.forward`, with features ``[B, M, d]`` at the places ``over``; one per entry by default."""
        return self.finish(self.begin(embeddings, at), features, at, over or replace(at, cache=at.memory))

    def begin(self, embeddings: Tensor, at: Placement) -> Tensor:
        """Return the stream ``[B, N, d]`` after the first block, before any feature."""
        if self.first is None:
            return embeddings
        return self.first(embeddings, at)

    def finish(self, stream: Tensor, features: Tensor, at: Placement, over: Placement) -> Tensor:
        """Return the output ``[B, N, d]`` of `forward` from the stream of `begin`."""
        out = stream
        if self.direct is not None and self.direct_norm is not None:
            latest = features  # of the token before each entry's
            if over.positions is not at.positions:
                index = (at.positions - over.positions[:, :1]).expand(len(features), -1)
                latest = features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
            out = out + self.direct(self.direct_norm(latest))
        for block in self.cross:
            out = block(out, features, at, over)
        if self.last is not None:
            out = self.last(out, at)
        return self.norm(out) if self.is_released else out


class MemoryEntries(HeadEntries):
    """Entries of the tokens that stay, which bring features into a memory.

    Every entry brings the feature of the token before its own into the memory; entries of the prompt also bring those
    of the dropped tokens in between. An entry attends to its row's committed features and to those that its ancestors
    and itself brought in this step, never to a sibling's, which only the sibling's children bring.
    """

    memory: RowCache  # slot j holds token j

    def __init__(self, drafter: HeadDrafter, rows: int, context: Context) -> None:
        super().__init__(drafter, rows, context)
        self._dream = cast("Dream", drafter.head)
        self._pruning = self._dream.pruning
        self._dropped: list[list[int]] = [[] for _ in range(rows)]
        self.memory.share_numbers(self.cache)
        if self._pruning.needs_attention:
            context.requirements.add_attention(self._pruning.layers, "all")

    def choose(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        self._dropped[row] = self._unseen(row, prompt, prefill)
        seen = torch.ones(len(prompt), dtype=torch.bool)
        seen[self._dropped[row]] = False
        tokens = seen.nonzero()[:, 0]
        if not self._dream.is_released or len(prompt) == 1:
            tokens = tokens[tokens > 0]
        held = min(self.cache.lengths[row], int((tokens < prefill.start).sum()))
        self.memory.crop(row, int(tokens[held - 1]) if held else 0)
        return tokens, tokens - 1

    def _unseen(self, row: int, prompt: Prompt, prefill: PrefillResult) -> list[int]:
        """Return visual tokens without entries; those of a cached prefix do not change."""
        family = self.target.family
        before = [place for place in self._dropped[row] if place < prefill.start]
        if not self._pruning.needs_attention or prefill.columns is None:
            return before
        dropped = self._pruning.dropped(family, prompt, prefill.prompt, prefill.columns, family)
        # The last token always has an entry, which brings the features of all dropped tokens before it.
        return before + [place for place in dropped if prefill.start <= place < len(prompt) - 1]

    def read(self, row: int, tokens: Tensor, sources: Tensor, inputs: Tensor | None, positions: Tensor) -> None:
        first, last = self.memory.lengths[row], int(tokens[-1])
        tokens = tokens.to(self.device)
        # The released form's entry of the first token sees no feature before it, and so all alike, the last one too.
        stop = last + int(self._dream.is_released and first == 0)
        places = torch.arange(first, stop, device=self.device)
        self.lay(self.cache, [row], len(tokens), None)
        mask = pad(additive((places < tokens[:, None])[None], self.like.dtype), (first, 0))
        start = self.memory.start(row)
        span = Span(row, 0, len(tokens), start, stop, {ALL: mask})
        self.memory.layout = Layout([span], slice(start + first, start + stop), self.memory.slots)
        self.memory.pending[row] += len(places)
        at, over = Placement(positions, cache=self.cache), Placement(places[None], cache=self.memory)
        self._dream(self.features.at[row][first:stop][None], inputs, at, over=over)
        self.cache.commit([row], [range(len(tokens))])
        self.memory.commit([row], [range(last - first)])


class CrossBlock(nn.Module):
    """Norm and cross-attention (Eq. 1), norm and gated MLP.

    As released, features have no positions in the attention. With rotary positions, keys rotate by the positions of the
    features' tokens, and queries by that of the latest feature visible to their entry.

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
        self.cross_attn = Attention(config, crosses=True, rotary=rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)
        opening = 1.0 if gate == "open" else 0.0
        self.gates = None if gate == "replace" else nn.Parameter(torch.full((2,), opening))

    def forward(self, x: Tensor, features: Tensor, at: Placement, over: Placement) -> Tensor:
        """The residual stream after the block.

        Shapes: x ``[B, N, d]``, placed ``at``; features ``[B, M, d]``, placed and seen as in ``over``.
        """
        attended = self.cross_attn(self.input_layernorm(x), at, self._place, self.feature_norm(features), over)
        gates = None if self.gates is None else self.gates.tanh()
        x = attended if gates is None else x + gates[0] * attended
        mixed = self.mlp(self.post_attention_layernorm(x), over.cache)
        return x + (mixed if gates is None else gates[1] * mixed)
