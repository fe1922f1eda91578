"""Prompt lookup: draft the continuation of an earlier occurrence of the last n-gram (Saxena 2023); no model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from saccade.draft.drafter import DraftSession
from saccade.draft.trees.policy import Proposer
from saccade.inputs.families.family import Prompt
from saccade.target_model.cache import on_device
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict


@dataclass(frozen=True)
class PromptLookup:
    """Copies the tokens that followed the latest earlier occurrence of the last tokens.

    Where the text ends before the draft does, the copy repeats itself.
    """

    model: ClassVar[None] = None
    num_views: ClassVar[int] = 1
    gamma: int = 10  # draft tokens
    max_ngram: int = 3  # longest n-gram that is matched; shorter ones are tried in turn
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the trees; the target's device
    vocab_size: int | None = None  # ids from here on are never drafted

    max_children = 1
    draws = False
    early = True

    def __post_init__(self) -> None:
        if self.gamma < 1 or self.max_ngram < 1:
            raise ValueError("Prompt lookup needs gamma and max_ngram of at least 1.")

    @property
    def max_nodes(self) -> int:
        return self.gamma + 1

    @property
    def max_depth(self) -> int:
        return self.gamma

    def open(self, rows: int, target: Context) -> LookupSession:
        return LookupSession(self, rows)


class LookupSession(DraftSession):
    """Every row's ids, and the place where each n-gram last ended."""

    def __init__(self, drafter: PromptLookup, rows: int) -> None:
        self._drafter = drafter
        self._ids: list[list[int]] = [[] for _ in range(rows)]
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]

    def reserve(self, row: int, capacity: int) -> None:
        """Lists need no reservation."""

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        self.forget(row)
        self._append(row, prompt.ids)

    def forget(self, row: int) -> None:
        self._ids[row], self._ends[row] = [], {}

    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int) -> DraftTree:
        drafts = []
        for row, tokens in zip(rows, new, strict=True):
            self._append(row, tokens)
            drafts.append(self._draft(row)[:limit])
        return chains([tokens[-1] for tokens in new], drafts, self._drafter.device)

    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        """Emitted tokens come with the next proposal."""

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens; n-grams are indexed one token late, so that the last one never matches itself."""
        ids, ends = self._ids[row], self._ends[row]
        for token in tokens:
            for n in range(1, min(self._drafter.max_ngram, len(ids)) + 1):
                ends[tuple(ids[-n:])] = len(ids)
            ids.append(token)

    def _draft(self, row: int) -> list[int]:
        ids, ends, known = self._ids[row], self._ends[row], self._drafter.vocab_size or sys.maxsize
        for n in range(min(self._drafter.max_ngram, len(ids)), 0, -1):
            end = ends.get(tuple(ids[-n:]))
            if end is not None:
                period = len(ids) - end
                draft = [ids[end + i % period] for i in range(self._drafter.gamma)]
                unknown = (place for place, token in enumerate(draft) if token >= known)
                return draft[: next(unknown, None)]
        return []


def chains(roots: Sequence[int], drafts: Sequence[Sequence[int]], device: torch.device) -> DraftTree:
    """One chain per row from host lists of different lengths; shorter ones are padded with invalid nodes."""
    longest = max(map(len, drafts))
    rows = [
        [len(draft) + 1, root, *draft, *[0] * (longest - len(draft))] for root, draft in zip(roots, drafts, strict=True)
    ]
    numbers = on_device(rows, device)
    lengths, tokens = numbers[:, :1], numbers[:, 1:]
    return DraftTree.chains(tokens, torch.arange(longest + 1, device=device) < lengths)
