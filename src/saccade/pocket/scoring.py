"""Facts pairs in answers, their overlap with ground truth, and chance level."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from saccade.pocket.sample import Sample, score
from saccade.pocket.words import NUMBERS


def chance(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean score of true answers against the facts of the next sample, by kind of fact."""
    ring = [*samples, samples[0]]
    marks = [score(one.task, one.answer, other.facts) for one, other in pairwise(ring)]
    return {fact: sum(mark[fact] for mark in marks) / len(marks) for fact in marks[0]}


CONCLUSION = r"(?i)[^.]*\banswer\b[^.]*"
"""Pattern of the sentence with the answer, among reasons."""


def sentences(answer: str) -> list[str]:
    """Sentences of an answer, in lower case."""
    return [part.strip() for part in answer.lower().split(".") if part.strip()]


def mentioned(text: str, words: Iterable[str]) -> list[str]:
    """Words of a closed list in a text, in order of occurrence."""
    return re.findall(rf"\b({'|'.join(words)})\b", text)


def numbers(text: str) -> list[int]:
    """Number words in a text, as integers."""
    return [NUMBERS.index(word) for word in mentioned(text, NUMBERS)]


def valued(answer: str, words: Iterable[str], aside: re.Pattern[str]) -> list[tuple[str, int]]:
    """Word and number of every sentence on one item of a closed list, without asides."""
    pairs: list[tuple[str, int]] = []
    for part in sentences(answer):
        part = aside.sub("", part)
        items, values = mentioned(part, words), numbers(part)
        if len(items) == len(values) == 1:
            pairs.append((items[0], values[0]))
    return pairs


def overlap(stated: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """Share of facts in common, with repeats: 1 if equal, less for every missing or wrong fact."""
    common = sum((Counter(stated) & Counter(true)).values())
    return common / max(len(stated), len(true), 1)


def only(text: str, words: Iterable[str]) -> str | None:
    """The only word of a closed list in a text, else None."""
    matches = mentioned(text, words)
    return matches[0] if len(matches) == 1 else None


def in_order(stated: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """Share of `true` that is stated in order (longest common subsequence): 1 if equal."""
    lengths = [0] * (len(true) + 1)
    for item in stated:
        before = 0
        for i, wanted in enumerate(true, 1):
            before, lengths[i] = lengths[i], before + 1 if item == wanted else max(lengths[i], lengths[i - 1])
    return lengths[-1] / max(len(stated), len(true), 1)
