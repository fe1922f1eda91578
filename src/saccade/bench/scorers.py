"""Scores of answers against right answers, by name; and those of the user, by ``module:function``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import Any

from saccade.errors import InputError
from saccade.wording import unknown_name

Score = Callable[[str], dict[str, float]]  # score of an answer from 0 to 1, by kind of fact
UserScorer = Callable[[str, Any, Mapping[str, Any]], Any]
"""Scorer of the user: called with the answer, the reference (None without one) and the row's fields; returns a number
from 0 to 1, a truth, or several by name."""


def is_users(name: str | None) -> bool:
    return name is not None and ":" in name


def check(name: str) -> None:
    """Raise `InputError` for a scorer that does not exist; the user's own is imported."""
    if is_users(name):
        users(name)
    elif name and name not in _SCORERS:
        raise InputError(f"There is no scorer {unknown_name(name, _SCORERS)}, or your own as module:function.")


def users(name: str) -> UserScorer:
    """Import a scorer of the user; its module is also looked for in the current folder."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), function)
    except ImportError as problem:
        raise InputError(f"The scorer {name} cannot be imported: {problem}.") from problem
    except AttributeError:
        raise InputError(f"The module {module} has no function {function!r}; a scorer is module:function.") from None
    except Exception as problem:  # the user's own code runs
        raise InputError(f"The scorer {name} cannot be imported: {type(problem).__name__}: {problem}.") from problem
    if not callable(found):
        raise InputError(f"{name} is no function; a scorer takes the answer, the reference and the row.")
    scorer: UserScorer = found
    return scorer


def apply(name: str, scorer: UserScorer, answer: str, reference: Any, row: Mapping[str, Any]) -> dict[str, float]:
    """Score an answer by a scorer of the user."""
    try:
        found = scorer(answer, reference, row)
    except Exception as problem:  # the user's own code runs
        raise InputError(f"the scorer {name} failed with {type(problem).__name__}: {problem}") from problem
    scores = found if isinstance(found, Mapping) else {name.rpartition(":")[2]: found}
    if not scores or not all(isinstance(v, (int, float)) and 0 <= v <= 1 for v in scores.values()):
        raise InputError(f"the scorer {name} must return numbers from 0 to 1, not {found!r}")
    return {str(fact): float(value) for fact, value in scores.items()}


def against(name: str, reference: Any, choices: Sequence[str] = ()) -> Score | None:
    """Return a built-in scorer of answers to one question; None without a reference."""
    right = [str(r) for r in listed(reference) if r is not None]
    if not name or not right:
        return None
    if name == "choice" and not choices and not _is_letter(right[0]):
        name = "match"  # a question without choices among those that have them
    return partial(_SCORERS[name], right, list(choices))


def listed(reference: Any) -> Sequence[Any]:
    """A reference as a list of right answers."""
    return reference if isinstance(reference, (list, tuple)) else [reference]


def plain(text: str) -> str:
    """Text without case and punctuation."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def _match(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """Equality, and whether a right answer is in the answer, both without case and punctuation."""
    given, wanted = plain(answer), [plain(r) for r in right]
    contains = any(f" {r} " in f" {given} " for r in wanted)
    return {"exact": float(given in wanted), "contains": float(contains)}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _vqa_words(text: str) -> str:
    """Text as the VQA evaluation compares it: lower case, digits for numbers, no articles and punctuation."""
    kept = re.sub(r"(?<=\d),(?=\d)", "", text.lower())
    words = []
    for word in plain(_ARTICLES.sub(" ", kept)).split():
        if word in _NUMBERS:
            word = str(_NUMBERS.index(word))
        words.append(word)
    return " ".join(words)


def _vqa(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """VQA accuracy (Antol et al. 2015, section 5): a third for every other annotator who agrees, at most 1, averaged
    over the annotators, each of whom is left out in turn."""
    given, wanted = _vqa_words(answer), [_vqa_words(r) for r in right]
    if len(wanted) == 1:
        return {"vqa": float(given == wanted[0])}
    agreed = sum(each == given for each in wanted)
    scores = []
    for each in wanted:
        others = agreed - (each == given)
        scores.append(min(1.0, others / 3))
    return {"vqa": fmean(scores)}


def _rouge_l(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """ROUGE-L (Lin 2004, section 3): F-measure of the longest common subsequence of words, best over the references."""
    given = plain(answer).split()
    return {"rouge-l": max(_common(given, plain(r).split()) for r in right)}


def _common(given: Sequence[str], wanted: Sequence[str]) -> float:
    row = [0] * (len(wanted) + 1)
    for word in given:
        before = row
        row = [0]
        for place, other in enumerate(wanted, 1):
            row.append(before[place - 1] + 1 if word == other else max(before[place], row[-1]))
    return 2 * row[-1] / (len(given) + len(wanted)) if row[-1] else 0.0


_LETTER = re.compile(
    r"^\W*([A-Z])(?!\s*\w)|(?i:\b(?:answer|option|choice)\b)[\s:*]*(?:is\b)?[\s:(*]*([A-Z])(?:\W|$)|\(([A-Z])\)"
    r"|^\W*([B-HJ-Z])\b"  # A and I in front of a word may be words themselves
)


def _is_letter(text: str) -> bool:
    return len(text.strip("() .")) == 1 and text.strip("() .").isalpha()


def _choice(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """Whether the answer names the right letter, or else the text of the right choice and of no other."""
    wanted = right[0].strip("() .").upper()
    answer = answer.strip()
    letters = [chr(ord("A") + n) for n in range(len(choices) or 26)]
    letter = ""
    for match in _LETTER.finditer(answer):
        named = next(filter(None, match.groups()))
        if named in letters:
            letter = named
            break
    if not letter and choices:
        texts = [n for n, text in enumerate(choices) if f" {plain(text)} " in f" {plain(answer)} "]
        if len(texts) == 1:
            letter = letters[texts[0]]
        elif re.match(r"A\b", answer):
            letter = answer[:1]
    return {"choice": float(letter == wanted)}


def _yes_no(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """Whether the answer's first yes or no is the right one."""
    found = next((word for word in plain(answer).split() if word in ("yes", "no")), "")
    return {"yes-no": float(found == plain(right[0]))}


def _anls(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """ANLS (Biten et al. 2019, section 4): 1 - edit distance over length, 0 from one half on; the best reference."""
    best = 0.0
    given = " ".join(answer.lower().split())
    for reference in right:
        wanted = " ".join(reference.lower().split())
        distance = _edits(given, wanted) / max(len(given), len(wanted), 1)
        best = max(best, 1 - distance if distance < 0.5 else 0.0)
    return {"anls": best}


def _edits(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for number, letter in enumerate(a, 1):
        before, row = row, [number]
        for place, other in enumerate(b, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (letter != other)))
    return row[-1]


def _relaxed(right: Sequence[str], choices: Sequence[str], answer: str) -> dict[str, float]:
    """Relaxed accuracy of charts (Masry et al. 2022, section 5): numbers within 5 %, other answers equal."""
    return {"relaxed": float(any(_is_close(answer, r) for r in right))}


def _is_close(answer: str, wanted: str) -> bool:
    given = _number(answer)
    right = _number(wanted)
    if given is None or right is None:
        return plain(answer) == plain(wanted)
    return abs(given - right) <= 0.05 * abs(right)


def _number(text: str) -> float | None:
    try:
        return float(text.strip().rstrip(".").replace(",", "").removesuffix("%").removeprefix("$"))
    except ValueError:
        return None


_SCORERS: dict[str, Callable[[Sequence[str], Sequence[str], str], dict[str, float]]] = {
    "match": _match,
    "vqa": _vqa,
    "rouge-l": _rouge_l,
    "choice": _choice,
    "yes-no": _yes_no,
    "anls": _anls,
    "relaxed": _relaxed,
}
