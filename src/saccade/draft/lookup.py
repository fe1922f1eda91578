"""Prompt lookup: draft the continuation of an earlier occurrence of the last n-gram (Saxena 2023); no model."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from saccade.draft.drafter import WHOLE, Drafter, DrafterFacts, DraftSession, Loaded
from saccade.draft.trees.policy import Chain, Proposer
from saccade.inputs.families.family import Prompt
from saccade.target_model.cache import on_device
from saccade.target_model.context import Context, PrefillResult
from saccade.tree import DraftTree, Emitted, Rows

CPU = torch.device("cpu")
END = -1  # stands after a finished text; no n-gram reaches across it
Draft = Sequence[tuple[int, int]]  # nodes of a row's tree, root first: token, and index of the parent


class IndexedText:
    """Tokens in order, and the places where every n-gram among them ended: chains from the latest place to the first.

    Places count from the first token ever added; those before ``start`` have been dropped.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram, self.start = max_ngram, 0
        self._ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before = [array("q") for _ in range(max_ngram)]  # by n and place: where the n-gram ended before
        self._run = 0  # tokens since the last `END`

    def __len__(self) -> int:
        return self.start + len(self._ids)

    @property
    def held(self) -> int:
        """Tokens that have not been dropped."""
        return len(self._ids)

    def __getitem__(self, place: int) -> int:
        return self._ids[place - self.start]

    def last(self, count: int) -> list[int]:
        """Return the last tokens, at most ``count``."""
        return self._ids[-count:] if count else []

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens; n-grams are indexed one token late, so that the last one never matches itself."""
        for token in tokens:
            place = len(self)
            for n, before in enumerate(self._before, 1):
                key = tuple(self._ids[-n:]) if n <= self._run else ()
                before.append(self._last.get(key, END))
                if key:
                    self._last[key] = place
            self._ids.append(token)
            self._run = 0 if token == END else self._run + 1

    def drop(self, count: int) -> None:
        """Forget the first tokens, a number of finished texts."""
        for place in range(self.start, self.start + count):
            for n in range(1, self.max_ngram + 1):
                key = tuple(self._ids[max(0, place - self.start - n) : place - self.start])
                if self._last.get(key) == place:
                    del self._last[key]
        for numbers in (self._ids, *self._before):
            del numbers[:count]
        self.start += count

    def ends(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the latest places, at most ``most``, where the longest last n-gram of ``tokens`` that occurs ended."""
        for n in range(min(self.max_ngram, len(tokens)), 0, -1):
            place = self._last.get(tuple(tokens[-n:]), END)
            found: list[int] = []
            while place >= self.start and place != END and len(found) < most:
                found.append(place)
                place = self._before[n - 1][place - self.start]
            if found:
                return found
        return []


class PromptLookup(Drafter):
    """Copies the tokens that followed the latest earlier occurrence of the last tokens.

    Where the text ends before the draft does, the copy repeats itself.
    """

    def __init__(
        self, gamma: int = 10, max_ngram: int = 3, device: torch.device = CPU, vocab_size: int | None = None
    ) -> None:
        self.facts = replace(DrafterFacts.of(Chain(gamma)), draws=False)
        self.gamma = gamma  # most draft tokens in a row
        self.max_ngram = max_ngram  # longest n-gram that is matched; shorter ones are tried in turn
        self.device = device  # of the trees; the target's device
        self.vocab_size = vocab_size or sys.maxsize  # ids from here on are never drafted

    def open(self, rows: int, target: Context) -> LookupSession:
        return LookupSession(self, rows)


class LookupSession(DraftSession):
    """Every row's text."""

    def __init__(self, drafter: PromptLookup, rows: int) -> None:
        self._drafter = drafter
        self._texts = [IndexedText(drafter.max_ngram) for _ in range(rows)]

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        self.forget(row)
        self._texts[row].append(prompt.ids)
        return WHOLE

    def forget(self, row: int) -> None:
        self._texts[row] = IndexedText(self._drafter.max_ngram)

    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        drafts: list[Draft] = []
        for row, tokens in zip(rows, new, strict=True):
            self._texts[row].append(tokens)
            drafts.append([(tokens[-1], 0), *self._draft(row, limit)])
        return tree_of(drafts, self._drafter.device)

    def _draft(self, row: int, limit: int) -> Draft:
        """Nodes below the root."""
        text = self._texts[row]
        for end in text.ends(text.last(self._drafter.max_ngram), 1):
            return [(token, parent) for parent, token in enumerate(self._following(text, end, limit))]
        return []

    def _following(self, text: IndexedText, end: int, limit: int) -> Iterable[int]:
        """The tokens after a place of a row's text, the copy's own ones included."""
        period = len(text) - end
        for distance in range(min(limit, self._drafter.gamma)):
            token = text[end + distance % period]
            if not 0 <= token < self._drafter.vocab_size:
                return
            yield token


def tree_of(drafts: Sequence[Draft], device: torch.device) -> DraftTree:
    """The rows' drafts as trees on a device, in one transfer."""
    count = max(map(len, drafts))
    columns = [zip(*draft, *[(0, 0)] * (count - len(draft)), strict=True) for draft in drafts]
    rows = [[len(draft), *tokens, *parents] for draft, (tokens, parents) in zip(drafts, columns, strict=True)]
    numbers = on_device(rows, device)
    tokens, parents = numbers[:, 1 : count + 1], numbers[:, count + 1 :]
    valid = torch.arange(count, device=device) < numbers[:, :1]
    depths = [depths_of(draft) for draft in drafts]
    if all(depth == list(range(len(depth))) for depth in depths):
        tree = DraftTree.chains(tokens, valid)
    else:
        children = [max(Counter(parent for _, parent in draft[1:]).values(), default=0) for draft in drafts]
        order = torch.arange(count, device=device).expand_as(tokens)
        tree = DraftTree.of_nodes(tokens, parents, order, valid, max(map(max, depths)), max(children))
    tree.nodes = drafts
    return tree


def depths_of(draft: Draft) -> list[int]:
    """Depth of every node, the root's 0."""
    depths = [0]
    for _, parent in draft[1:]:
        depths.append(depths[parent] + 1)
    return depths
