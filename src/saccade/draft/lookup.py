"""Prompt lookup: guess that an n-gram continues as it did before (Saxena 2023; no model at all)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.draft.trees.policy import Proposer
from saccade.inputs.prompt import Prompt
from saccade.target.cache import on_device
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict


@dataclass(frozen=True)
class PromptLookup:
    """Copies what followed the latest earlier occurrence of the last tokens.

    Where the text ends before the guess does, the copy goes on with what it has itself copied: text that repeats is
    guessed to repeat on.

    Attributes:
        gamma: length of a guess.
        max_ngram: longest n-gram that is matched; shorter ones are tried in turn.
        device: where the trees are made; the target's device.
        vocab_size: ids from here on are never guessed; for prompts of a drafter with a larger vocabulary.
    """

    gamma: int = 10
    max_ngram: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.gamma < 1 or self.max_ngram < 1:
            raise ValueError("Prompt lookup needs gamma and max_ngram of at least 1.")

    @property
    def max_nodes(self) -> int:
        return self.gamma + 1

    @property
    def max_depth(self) -> int:
        return self.gamma

    @property
    def max_children(self) -> int:
        return 1

    @property
    def draws(self) -> bool:
        return False

    @property
    def early(self) -> bool:
        return True

    def open(self, rows: int, target: Context) -> LookupSession:
        return LookupSession(self, rows)


class LookupSession:
    """Every row's ids, and where each n-gram last ended."""

    reading_seconds = 0.0

    def __init__(self, drafter: PromptLookup, rows: int) -> None:
        self._drafter = drafter
        self._ids: list[list[int]] = [[] for _ in range(rows)]
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]

    def reserve(self, row: int, capacity: int) -> None:
        """Lists grow by themselves."""

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        self.forget(row)
        self._append(row, prompt.ids)

    def forget(self, row: int) -> None:
        self._ids[row], self._ends[row] = [], {}

    def propose(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int
    ) -> DraftTree:
        guesses = []
        for row, tokens in zip(rows, new, strict=True):
            self._append(row, tokens)
            guesses.append(self._guess(row)[:limit])
        return chains([tokens[-1] for tokens in new], guesses, self._drafter.device)

    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        """What was emitted comes with the next call."""

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens; n-grams are indexed one token late, so that the last one never matches itself."""
        ids, ends = self._ids[row], self._ends[row]
        for token in tokens:
            for n in range(1, min(self._drafter.max_ngram, len(ids)) + 1):
                ends[tuple(ids[-n:])] = len(ids)
            ids.append(token)

    def _guess(self, row: int) -> list[int]:
        ids, ends = self._ids[row], self._ends[row]
        for n in range(min(self._drafter.max_ngram, len(ids)), 0, -1):
            end = ends.get(tuple(ids[-n:]))
            if end is not None:
                period = len(ids) - end
                return self._guessable([ids[end + i % period] for i in range(self._drafter.gamma)])
        return []

    def _guessable(self, ids: list[int]) -> list[int]:
        """The ids before the first one that the target does not have."""
        known = self._drafter.vocab_size
        return ids if known is None else ids[: next((i for i, t in enumerate(ids) if t >= known), None)]


def chains(roots: Sequence[int], guesses: Sequence[Sequence[int]], device: torch.device) -> DraftTree:
    """One chain per row from host lists of different lengths; shorter ones are padded with invalid nodes."""
    longest = max(map(len, guesses))
    count = longest + 1
    rows = [
        [len(guess) + 1, root, *guess, *[0] * (longest - len(guess))]
        for root, guess in zip(roots, guesses, strict=True)
    ]
    numbers = on_device(rows, device)
    lengths, tokens = numbers[:, 0], numbers[:, 1:]
    place = torch.arange(count, device=device)
    valid = place < lengths[:, None]  # [B, N]
    causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    itself = torch.eye(count, dtype=torch.bool, device=device)
    return DraftTree(
        tokens=tokens,
        parents=(place - 1).clamp(min=0)[None],
        depth=torch.where(valid, place, 0),
        ancestors=torch.where(valid[..., None], causal, itself),
        valid=valid,
        max_depth=longest,
        max_children=1,
    )
