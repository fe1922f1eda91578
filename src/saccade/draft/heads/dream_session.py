"""Drafting with a DREAM head: fewer entries than features, which therefore have a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.cache import RowCache
from saccade.target.context import Context, PromptRead
from saccade.target.layout import ALL, Layout, Span
from saccade.target.masks import additive


class DreamDraftSession(HeadDraftSession):
    """A DREAM head at work on B rows.

    Every entry brings the feature of the token before its own into the memory, and entries of the prompt those of the
    dropped tokens in between, too. An entry then sees what its row has committed there, and of this step's entries
    the features that its ancestors and itself have brought: never that of a sibling, whose children alone bring it.

    Attributes:
        memory: keys and values of the features that entries attend to; slot j holds token j.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        assert isinstance(drafter.head, Dream)
        self._dream = drafter.head
        self._pruning = drafter.head.pruning
        self._dropped: list[list[int]] = [[] for _ in range(rows)]
        self.memory: RowCache = drafter.head.new_memory(rows)
        if self._pruning.needs_attention:
            target.needs.add_attention(self._pruning.layers, "all")

    def forget(self, row: int) -> None:
        super().forget(row)
        self.memory.release(row)
        self._dropped[row] = []

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, read: PromptRead | None) -> None:
        self.memory.reserve(row, self._room[row] + self._slack)
        super().load(row, prompt, read)

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int
    ) -> DraftTree:
        tree = super().propose(rows, new, proposer, limit)
        self.memory.drop(rows)
        return tree

    def _entries(self, row: int, prompt: Prompt, read: PromptRead) -> tuple[Tensor, Tensor]:
        self._dropped[row] = self._choose(row, prompt, read)
        seen = torch.ones(len(prompt), dtype=torch.bool)
        seen[self._dropped[row]] = False
        tokens = seen.nonzero()[:, 0]
        tokens = tokens[tokens > 0]
        held = min(self.cache.lengths[row], int((tokens < read.start).sum()))
        self.memory.crop(row, int(tokens[held - 1]) if held else 0)
        return tokens, tokens - 1

    def _choose(self, row: int, prompt: Prompt, read: PromptRead) -> list[int]:
        """Visual tokens without entries; before where the target went on they stay what they were."""
        config = self._drafter.target.config
        before = [place for place in self._dropped[row] if place < read.start]
        if not self._pruning.needs_attention or read.columns is None:
            return before
        dropped = self._pruning.dropped(config, prompt, read.prompt, read.columns, config)
        # The last token always has an entry: it brings the features of all dropped ones before it.
        return before + [place for place in dropped if read.start <= place < len(prompt) - 1]

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        tokens = tokens.to(self._device)
        first, last = self.memory.lengths[row], int(tokens[-1])
        reach = torch.arange(first, last, device=self._device) < tokens[:, None]
        self._lay(self.cache, [row], len(tokens), None)
        self._lay_memory(row, last - first, reach[None])
        self._dream(
            self._features[row][first:last][None],
            embedded,
            (tokens - 1)[None],
            None,
            self.cache,
            memory=self.memory,
            places=torch.arange(first, last, device=self._device)[None],
        )
        self.cache.commit([row], [range(len(tokens))])
        self.memory.commit([row], [range(last - first)])

    def _lay_memory(self, row: int, count: int, reach: Tensor) -> None:
        """Say where ``count`` new features of a prompt go, and which of them its entries see.

        Args:
            reach: ``[1, N, count]`` bool.
        """
        held, start = self.memory.lengths[row], self.memory.start(row)
        mask = pad(additive(reach, self._features[0].dtype), (held, 0))
        span = Span(row, 0, reach.shape[1], start, held + count, {ALL: mask})
        self.memory.layout = Layout([span], slice(start + held, start + held + count), self.memory.slots)
        self.memory.pending[row] += count

    def _catch_up(self, rows: Sequence[int], new: Sequence[Sequence[int]], width: int) -> Tensor:
        hidden = super()._catch_up(rows, new, width)
        self.memory.commit(rows, [range(len(tokens)) for tokens in new])
        return hidden

    def _forward(
        self,
        rows: Sequence[int],
        features: Tensor,
        tokens: Tensor,
        allow: Tensor | None,
        offset: int | Tensor,
        step: int,
    ) -> Tensor:
        positions = self._placed(self.memory, rows, offset).expand(tokens.shape)
        self._lay(self.cache, rows, tokens.shape[1], allow)
        self._lay(self.memory, rows, tokens.shape[1], allow)
        out: Tensor = self._dream(
            features,
            self._embed(rows, tokens),
            positions,
            None,
            self.cache,
            step,
            memory=self.memory,
        )
        return out
