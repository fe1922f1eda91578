"""Drafting with a DREAM head: fewer entries than features, which therefore have a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.errors import ModelError
from saccade.inputs.prompt import Prompt
from saccade.target.attention import PromptAttention
from saccade.target.cache import SlotCache
from saccade.target.context import Context
from saccade.target.masks import visible


class DreamDraftSession(HeadDraftSession):
    """A DREAM head at work on B rows.

    Every entry brings the feature of the token before its own into the memory, and entries of the prompt those of the
    dropped tokens in between, too. An entry then sees what its row has committed there, and of this step's entries
    the features that its ancestors and itself have brought: never that of a sibling, whose children alone bring it.

    Attributes:
        memory: keys and values of the features that entries attend to; slot j holds token j.
    """

    def __init__(self, drafter: HeadDrafter, batch: int, target: Context) -> None:
        super().__init__(drafter, batch, target)
        assert isinstance(drafter.head, Dream)
        self._dream = drafter.head
        self._pruning = drafter.head.pruning
        self._dropped: list[list[int]] = [[] for _ in range(batch)]
        self.memory: SlotCache = drafter.head.new_memory(batch, 0)
        if self._pruning.needs_attention:
            wanted = PromptAttention(self._pruning.layers, "all")
            target.attention = target.attention or wanted
            if (target.attention.layers, target.attention.queries) != (wanted.layers, wanted.queries):
                raise ModelError(
                    f"The target's attention is read in layers {target.attention.layers} of "
                    f"{target.attention.queries} already, but a dream head needs that of all tokens in the last layer."
                )

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt) -> None:
        self.memory.grow(self._room + self._slack)
        super().load(row, prompt)

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        tree = super().propose(new, proposer)
        self.memory.drop_pending()
        return tree

    def _entries(self, row: int, prompt: Prompt, start: int) -> tuple[Tensor, Tensor]:
        self._dropped[row] = self._choose(row, prompt, start)
        seen = torch.ones(len(prompt), dtype=torch.bool)
        seen[self._dropped[row]] = False
        tokens = seen.nonzero()[:, 0]
        tokens = tokens[tokens > 0]
        held = min(self.cache.lengths[row], int((tokens < start).sum()))
        self.memory.crop(row, int(tokens[held - 1]) if held else 0)
        return tokens, tokens - 1

    def _choose(self, row: int, prompt: Prompt, start: int) -> list[int]:
        """Visual tokens without entries; before ``start`` they stay what they were."""
        attention, config = self._context.attention, self._drafter.target.config
        before = [place for place in self._dropped[row] if place < start]
        if not self._pruning.needs_attention or attention is None or attention.columns is None:
            return before
        dropped = self._pruning.dropped(config, prompt, attention.prompt, attention.columns, config)
        # The last token always has an entry: it brings the features of all dropped ones before it.
        return before + [place for place in dropped if start <= place < len(prompt) - 1]

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        tokens = tokens.to(self._device)
        at, first, last = self.cache.lengths[row], self.memory.lengths[row], int(tokens[-1])
        allow = torch.ones(1, len(tokens), at + len(tokens), dtype=torch.bool, device=self._device).tril(at)
        reach = torch.arange(last, device=self._device) < tokens[:, None]
        self.cache.writing_prompt(row, len(tokens))
        self.memory.writing_prompt(row, last - first)
        self._dream(
            self._features[row, first:last][None],
            embedded,
            (tokens - 1)[None],
            allow,
            self.cache,
            reach=reach[None],
            memory=self.memory,
            places=torch.arange(first, last, device=self._device)[None],
        )
        self.cache.keep_first(row, len(tokens))
        self.memory.keep_first(row, last - first)

    def _catch_up(self, new: Sequence[Sequence[int]], width: int) -> Tensor:
        hidden = super()._catch_up(new, width)
        self.memory.keep([range(len(tokens)) for tokens in new])
        return hidden

    def _forward(
        self, features: Tensor, tokens: Tensor, allow: Tensor, offset: int | Tensor, step: int
    ) -> Tensor:
        lengths = torch.tensor(self.memory.lengths, device=self._device)
        positions = (lengths[:, None] + offset).expand(tokens.shape)
        slots, places = (c.writing_nodes(tokens.shape[1]) for c in (self.cache, self.memory))
        out: Tensor = self._dream(
            features,
            self._embed(tokens),
            positions,
            visible(allow, self.cache.lengths, slots),
            self.cache,
            step,
            reach=visible(allow, self.memory.lengths, places),
            memory=self.memory,
        )
        return out
