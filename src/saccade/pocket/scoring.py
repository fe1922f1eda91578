"""Scores of answers against ground truth, and what guessing would score."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from saccade.pocket.sample import Sample, score
from saccade.pocket.words import NUMBERS


def chance(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean marks of every true answer against the facts of the next sample, per kind of fact.

    Args:
        samples: two or more of one task.
    """
    ring = [*samples, samples[0]]
    marks = [score(one.task, one.answer, other.facts) for one, other in pairwise(ring)]
    return {fact: sum(mark[fact] for mark in marks) / len(marks) for fact in marks[0]}


CONCLUSION = r"(?i)[^.]*\banswer\b[^.]*"
"""The sentence that gives the answer, where reasons stand beside it."""


def sentences(answer: str) -> list[str]:
    """The sentences of an answer, in lower case."""
    return [part.strip() for part in answer.lower().split(".") if part.strip()]


def mentioned(text: str, words: Iterable[str]) -> list[str]:
    """The words of a closed list that occur in the text, in the order of occurrence."""
    return re.findall(rf"\b({'|'.join(words)})\b", text)


def numbers(text: str) -> list[int]:
    """The number words in the text, as integers."""
    return [NUMBERS.index(word) for word in mentioned(text, NUMBERS)]


def overlap(told: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """The share of facts in common, counting repeats: 1 when equal, less for every miss or invention."""
    common = sum((Counter(told) & Counter(true)).values())
    return common / max(len(told), len(true), 1)


def only(text: str, words: Iterable[str]) -> str | None:
    """The one word of a closed list that the text has, else None."""
    found = mentioned(text, words)
    return found[0] if len(found) == 1 else None


def in_order(told: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """The share of `true` that is told in its order (longest common subsequence): 1 when equal."""
    lengths = [0] * (len(true) + 1)
    for item in told:
        before = 0
        for i, wanted in enumerate(true, 1):
            before, lengths[i] = lengths[i], before + 1 if item == wanted else max(lengths[i], lengths[i - 1])
    return lengths[-1] / max(len(told), len(true), 1)
