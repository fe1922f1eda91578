"""Pairs of facts in answers, and their overlap with ground truth."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from saccade.pocket.words import NUMBERS

CONCLUSION = r"(?i)[^.]*\banswer\b[^.]*"  # pattern of the sentence with the answer, among reasons


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


def pairs_stated(
    stated: Sequence[tuple[str, int]], items: Sequence[str], values: Sequence[int]
) -> tuple[float, float, float]:
    """Whether each item has one value, the share of right items, and the share of items with the right value."""
    true = list(zip(items, values, strict=True))
    names = [item for item, _ in stated]
    is_complete = len(set(names)) == len(stated) == len(true)
    return float(is_complete), overlap(names, items), overlap(stated, true)


def only(text: str, words: Iterable[str]) -> str | None:
    """The only word of a closed list in a text, else None."""
    matches = mentioned(text, words)
    return matches[0] if len(matches) == 1 else None


def in_order(stated: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """Share of `true` that is stated in order (longest common subsequence): 1 if equal."""
    lengths = [0] * (len(true) + 1)
    for item in stated:
        before = 0
        for i, expected in enumerate(true, 1):
            longest = max(lengths[i], lengths[i - 1])
            if item == expected:
                longest = before + 1
            before = lengths[i]
            lengths[i] = longest
    return lengths[-1] / max(len(stated), len(true), 1)
