"""Prompt lookup: draft the continuation of an earlier occurrence of the last n-gram (Saxena 2023); no model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile

import torch

from saccade.draft.drafter import Drafter, DraftSession
from saccade.draft.trees.policy import Chain, Proposer
from saccade.inputs.families.family import Prompt
from saccade.target_model.cache import on_device
from saccade.target_model.context import Context, PrefillResult
from saccade.tree import DraftTree, Emitted, Rows

CPU = torch.device("cpu")


class PromptLookup(Drafter):
    """Copies the tokens that followed the latest earlier occurrence of the last tokens.

    Where the text ends before the draft does, the copy repeats itself.
    """

    early = True

    def __init__(
        self, gamma: int = 10, max_ngram: int = 3, device: torch.device = CPU, vocab_size: int | None = None
    ) -> None:
        super().__init__(Chain(gamma))
        self.draws = False
        self.gamma = gamma  # draft tokens
        self.max_ngram = max_ngram  # longest n-gram that is matched; shorter ones are tried in turn
        self.device = device  # of the trees; the target's device
        self.vocab_size = vocab_size or sys.maxsize  # ids from here on are never drafted

    def open(self, rows: int, target: Context) -> LookupSession:
        return LookupSession(self, rows)


class LookupSession(DraftSession):
    """Every row's ids, and the place where each n-gram last ended."""

    def __init__(self, drafter: PromptLookup, rows: int) -> None:
        self._drafter = drafter
        self._ids: list[list[int]] = [[] for _ in range(rows)]
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        self.forget(row)
        self._append(row, prompt.ids)

    def forget(self, row: int) -> None:
        self._ids[row], self._ends[row] = [], {}

    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        drafts: list[list[int]] = []
        for row, tokens in zip(rows, new, strict=True):
            self._append(row, tokens)
            drafts.append([tokens[-1], *self._draft(row)[:limit]])
        count, device = max(map(len, drafts)), self._drafter.device
        padded = [[len(draft), *draft, *[0] * (count - len(draft))] for draft in drafts]
        numbers = on_device(padded, device)
        lengths, nodes = numbers[:, :1], numbers[:, 1:]
        return DraftTree.chains(nodes, torch.arange(count, device=device) < lengths)

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens; n-grams are indexed one token late, so that the last one never matches itself."""
        ids, ends = self._ids[row], self._ends[row]
        for token in tokens:
            for n in range(1, min(self._drafter.max_ngram, len(ids)) + 1):
                ends[tuple(ids[-n:])] = len(ids)
            ids.append(token)

    def _draft(self, row: int) -> list[int]:
        ids, ends = self._ids[row], self._ends[row]
        for n in range(min(self._drafter.max_ngram, len(ids)), 0, -1):
            end = ends.get(tuple(ids[-n:]))
            if end is not None:
                period = len(ids) - end
                draft = [ids[end + i % period] for i in range(self._drafter.gamma)]
                return list(takewhile(lambda token: token < self._drafter.vocab_size, draft))
        return []
