"""Drafts from a prediction: a text that the caller expects as the answer, which may have wrong words in it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from saccade.draft.best_first import Node, best_first
from saccade.draft.lookup import END, IndexedText

MOST_NODES, LEAST = 32, 0.05  # most tokens of a draft, and the smallest probability of one that is drafted
FEWEST_NODES, STARTING = 8, 8.0
"""Most tokens of a draft where none has been right lately, and how many seem to have been at the start."""
START, START_LENGTH = 0.5, 2
"""Probability that the answer begins as predicted, and how long a match the start counts for."""
RATES, TRIALS = (0.6, 0.75, 0.9, 0.96), 20.0
"""Probability of a place's token, by the bits of the match's length, and how many trials it counts for."""
SKIPS = (0.07, 0.5, 0.25, 0.12, 0.02, 0.02, 0.01, 0.01)
"""Probability that a first wrong token stands for none, one, two... of the prediction's."""
MORE_SKIPS = (0.6, 0.25, 0.1, 0.05)  # the same of a wrong token after a wrong one
MISSING, SHORTER, MISSED = 0.05, 0.4, 6
"""Probability that a mismatch leaves out a token of the prediction, of every further one, and most of them."""
LOST, JUMP = 0.1, 1e-4
"""Probability that a mismatch leaves the prediction, and that a token returns to it, at any place."""
NGRAM, RETURNS, LONGEST = 3, 4, 32
"""Longest n-gram of the places to return to, how many places are tried, and the most tokens of a match."""
KEPT, FAINT = 10, 1e-4  # most places that are followed, and the smallest probability of one
MOST = 2**15  # tokens of a prediction that are read
OTHER = 100.0  # how many tokens that are not in the prediction count as seen


class _Place(NamedTuple):
    at: int  # in the prediction, of the next token
    weight: float  # probability that the answer goes on here, if it does not go wrong
    length: int  # tokens before it that are equal to the answer's last ones


class Prediction:
    """An expected answer of one row and the places where its answer may be in it.

    The answer is followed as a copy with errors, by the forward algorithm of a hidden Markov model (Rabiner 1989) whose
    states are places of the prediction. At a place the next token is the prediction's, at a rate that the row's tokens
    have shown so far, or a wrong one, after which the copy goes on nearby; or the answer has left the prediction, to
    which it returns where its last tokens occur. A seed repeats its drafts: they depend on the answer's tokens alone.

    Args:
        ids: the expected answer, of which the first `MOST` are read.
        vocab_size: ids from here on are never drafted.
        ends: ids that may end the answer, which are expected after the prediction.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int, ends: Collection[int] = ()) -> None:
        self._ids, self._vocab_size = ids[:MOST], vocab_size
        self._ends = tuple(sorted(ends)) if len(ids) <= MOST else ()
        self._text = IndexedText(NGRAM)
        self._text.append([*self._ids, END])
        self._counts = Counter(self._ids)
        self._places = [_Place(0, START, START_LENGTH)]
        self._copied = STARTING  # tokens, of which a wrong one halves the number
        self._lost = 1 - START  # probability that the answer is elsewhere
        self._accepted = [rate * TRIALS for rate in RATES]
        self._trials = [TRIALS for _ in RATES]
        self._last: deque[int] = deque(maxlen=LONGEST)  # tokens of the answer
        self._chances: deque[float] = deque(maxlen=LONGEST)  # of each of them

    def observe(self, tokens: Iterable[int]) -> None:
        """Follow the answer by its next tokens."""
        for token in tokens:
            self._take(token)

    def draft(self, limit: int) -> list[Node]:
        """The likeliest nodes below the root, none deeper than ``limit``; none where nothing would be gained."""
        places = [place for place in self._places if place.weight >= LEAST]
        most = min(int(FEWEST_NODES + self._copied), MOST_NODES)
        return best_first(places, self._following, most, limit, LEAST) if places else []

    def _following(self, places: list[_Place], depth: int) -> Iterator[tuple[int, float, list[_Place]]]:
        """Tokens after some places with their probabilities, and the places after them."""
        groups: defaultdict[int, list[_Place]] = defaultdict(list)
        for index, weight, length in places:
            weight *= self._rate(length)
            if index < len(self._ids):
                groups[self._ids[index]].append(_Place(index + 1, weight, length + 1))
            elif index == len(self._ids):
                for end in self._ends:
                    groups[end].append(_Place(index + 1, weight / len(self._ends), length + 1))
        for token, after in groups.items():
            probability = sum(place.weight for place in after)
            if probability and token < self._vocab_size:
                yield token, probability, [_Place(index, w / probability, length) for index, w, length in after]

    def _rate(self, length: int) -> float:
        bits = _bits(length)
        return self._accepted[bits] / self._trials[bits]

    def _take(self, token: int) -> None:
        ids, count = self._ids, len(self._ids)
        found: dict[int, tuple[float, int]] = {}  # weight and length by place

        def add(index: int, weight: float, length: int) -> None:
            known, longer = found.get(index, (0.0, length))
            found[index] = known + weight, length if weight > known else longer

        chance = (self._counts[token] + 1) / (count + OTHER)  # of a wrong token
        outcomes = []  # of every place: its index and length, and the weights of a copy and of a wrong token
        for index, weight, length in self._places:
            rate = self._rate(length)
            copy = weight * rate * (ids[index] == token if index < count else token in self._ends)
            if copy:
                add(index + 1, copy, length + 1)
            outcomes.append((index, length, copy, weight * (1 - rate) * chance))
        copied = sum(weight for weight, _ in found.values())
        self._copied = self._copied + 1 if copied else self._copied / 2
        lost = self._lost * chance
        for index, length, _, weight in outcomes:
            for missing, other in enumerate(ids[index + 1 : index + 1 + MISSED] if length else ()):
                if other == token:
                    add(index + missing + 2, weight / chance * MISSING * SHORTER**missing, 1)
            if weight < 10 * FAINT * copied:
                continue
            lost += weight * LOST
            for further, share in enumerate(SKIPS if length else MORE_SKIPS):
                add(index + further, weight * (1 - LOST) * share, 0)
        self._last.append(token)
        if copied < (lost + sum(weight for weight, _ in found.values())) / 2:
            for index, weight, length in self._returns():
                if weight > found.get(index, (0.0, 0))[0]:
                    found[index] = weight, length
        total = lost + sum(weight for weight, _ in found.values())
        for _, length, copy, weight in outcomes:
            bits = _bits(length)
            self._accepted[bits] += copy / total
            self._trials[bits] += (copy + weight) / total
        self._chances.append(total)
        likely = sorted(found.items(), key=lambda place: -place[1][0])[:KEPT]
        self._places = [
            _Place(index, weight / total, length)
            for index, (weight, length) in likely
            if weight > FAINT * total and index <= count
        ]
        self._lost = max(lost / total, FAINT)

    def _returns(self) -> Iterator[tuple[int, float, int]]:
        """Places where the answer's last tokens occur, as if it had returned to the prediction with the first one."""
        last, chances = list(self._last), list(self._chances)
        for index in self._text.ends(last, RETURNS):
            length, longest = 1, min(len(last), index)
            while length < longest and self._ids[index - length - 1] == last[-length - 1]:
                length += 1
            copied = prod(map(self._rate, range(length)))
            yield index, JUMP / len(self._text) * copied / prod(chances[len(chances) - length + 1 :]), length


def _bits(length: int) -> int:
    return min(length.bit_length(), len(RATES) - 1)
