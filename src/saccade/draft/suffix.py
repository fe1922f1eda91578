"""Suffix decoding: draft what followed the longest match, in the text or in earlier answers (Oliaro et al. 2024)."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from saccade.draft.best_first import best_first
from saccade.draft.drafter import Loaded
from saccade.draft.earlier_answers import AnswerStore
from saccade.draft.lookup import CPU, END, Draft, IndexedText, LookupSession, PromptLookup
from saccade.inputs.families.family import Prompt
from saccade.options import SuffixOptions
from saccade.target_model.context import Context, PrefillResult

MATCHES, LONGEST = 12, 32  # most places of a text that are followed, and most tokens of a match that count
CONTEXT = 16  # last tokens of a prompt that are kept in front of its answer
RATES = (0.0, 0.35, 0.7, 0.85, 0.92, 0.96, 0.98)
"""Acceptance rate of a token that all matches agree on, by the bits of the longest one's length, before any trial."""
TRIALS, MEMORY = 20.0, 0.99  # how many trials these rates count for, and how much less a trial counts after the next
KEYS = 1000  # keys whose rates are kept: those of the last requests


class _Match(NamedTuple):
    text: IndexedText
    place: int  # of the next token
    length: int  # tokens before it that are equal to the row's last ones
    weight: float  # beside others


class _Guess(NamedTuple):
    token: int
    matches: list[_Match]  # that it follows
    bits: int  # of the longest one's length
    share: float  # of the matches' weight, smaller ones counted less


class SuffixDrafter(PromptLookup):
    """Copies what followed the longest matches of the last tokens, as a tree where it was not always the same.

    Matches are looked for in the row's own text and in earlier answers to requests of the same key, which all sessions
    share. A token's probability is the share of the matches, by length, that it followed, times how often such tokens
    were accepted for that key; the likeliest are drafted, longer matches further ahead, and none where that would not
    save time.
    Rows that sample use their own text and no experience, so that a seed repeats its answer.
    """

    def __init__(
        self,
        options: SuffixOptions,
        store: AnswerStore | None = None,
        device: torch.device = CPU,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(options.gamma, options.max_ngram, device, vocab_size)
        self.options, self.store = options, store or AnswerStore(2**25, options.max_ngram)
        widest = min(options.total, int(1 / options.min_token_prob))
        self.facts = replace(self.facts, max_nodes=options.total + 1, max_children=widest)
        self._rates: OrderedDict[str, list[tuple[float, float]]] = OrderedDict()

    def rates(self, key: str) -> list[tuple[float, float]]:
        """Accepted and expected tokens of a key, recent ones counted most, by bits of the match's length."""
        self._rates.setdefault(key, [(rate * TRIALS, TRIALS) for rate in RATES])
        self._rates.move_to_end(key)
        if len(self._rates) > KEYS:
            self._rates.popitem(last=False)
        return self._rates[key]

    def open(self, rows: int, target: Context) -> SuffixSession:
        return SuffixSession(self, rows)


class SuffixSession(LookupSession):
    """Every row's text, the key of its answers, and the guesses on its next token."""

    def __init__(self, drafter: SuffixDrafter, rows: int) -> None:
        super().__init__(drafter, rows)
        self._by = drafter
        self._keys: list[str | None] = [None] * rows
        self._prompts = [0] * rows  # tokens of the prompts
        self._guesses: list[tuple[int, list[_Guess]]] = [(0, []) for _ in range(rows)]  # place in the text, and tokens

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        self.forget(row)
        self._keys[row] = key

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        self._prompts[row] = len(prompt) + (prefill is None)
        return super().load(row, prompt, prefill)

    def forget(self, row: int) -> None:
        super().forget(row)
        self._guesses[row] = 0, []

    def end(self, row: int, output: Sequence[int]) -> None:
        key, text = self._keys[row], self._texts[row]
        new = len(text) - self._prompts[row]  # tokens of the answer that it has
        if key is not None and output and new >= 0:
            self._by.store.add(key, [*text.last(new + CONTEXT), *output[new:]])
        self._keys[row] = None

    def _draft(self, row: int, limit: int) -> Draft:
        options = self._by.options
        key = self._keys[row]
        rates = RATES if key is None else self._learned(row, self._by.rates(key))
        matches = self._matches(row)
        longest = max((match.length for match in matches), default=0)
        most = min(options.total, int(options.max_spec_factor * longest))
        guesses = _guesses(matches, 0)
        self._guesses[row] = len(self._texts[row]), guesses

        def follow(matches: list[_Match], depth: int) -> Iterator[tuple[int, float, list[_Match]]]:
            for guess in _guesses(matches, depth) if depth else guesses:
                if guess.token < self._by.vocab_size:
                    yield guess.token, guess.share * rates[guess.bits], guess.matches

        nodes = best_first(matches, follow, most, min(limit, options.gamma), options.min_token_prob)
        return [(token, parent) for token, parent, _ in nodes]

    def _learned(self, row: int, rates: list[tuple[float, float]]) -> list[float]:
        """Acceptance rates, after the outcome of the row's last guesses."""
        place, guesses = self._guesses[row]
        for guess in guesses:
            accepted, expected = rates[guess.bits]
            hit = guess.token == self._texts[row][place]
            rates[guess.bits] = accepted * MEMORY + hit, expected * MEMORY + guess.share
        return [min(accepted / expected, 1.0) for accepted, expected in rates]

    def _matches(self, row: int) -> list[_Match]:
        """Places where the last tokens occurred, in the row's text and in the answers of its key."""
        texts = [self._texts[row]]
        key = self._keys[row]
        if key in self._by.store.texts:
            texts.append(self._by.store.texts[key])
        last = texts[0].last(LONGEST)
        found = []
        for text in texts:
            for place in text.ends(last, MATCHES):
                length = 1
                most = min(len(last), place - text.start)
                while length < most and text[place - length - 1] == last[-length - 1]:
                    length += 1
                found.append(_Match(text, place, length, 2.0 ** min(length, 16)))
        return found


def _guesses(matches: Sequence[_Match], depth: int) -> list[_Guess]:
    """The tokens that follow matches at a depth of their copies, ends of answers left out."""
    groups: defaultdict[int, list[_Match]] = defaultdict(list)
    for match in matches:
        after = len(match.text) - match.place
        token = match.text[match.place + depth % after]  # a copy goes on with itself
        groups[token].append(match)
    groups.pop(END, None)
    weight = sum(match.weight for match in matches)
    guesses = []
    for token, group in groups.items():
        share = sum(match.weight for match in group) / weight
        length = depth + max(match.length for match in group)
        bits = min(length.bit_length(), len(RATES) - 1)
        guesses.append(_Guess(token, group, bits, share * (1 + share) / 2))
    return guesses
