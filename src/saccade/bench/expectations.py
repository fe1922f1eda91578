"""Predictions of a suite's answers: texts that are expected, with a share of their words wrong."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from saccade.errors import SaccadeError
from saccade.options import make

PLAIN, REFERENCE = "plain", "reference"
"""Origins of a prediction: plain decoding's own answer, of which the wrong words are then the only difference, so that
drafting is measured alone; or the right answer, as another reader of the page would hand it over."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a task's answers are predicted; one of ``of`` and ``text`` is set."""

    of: str | None = None  # `plain` or `reference`
    text: str | None = None  # the same for every answer
    wrong: float = 0.0  # share of the words that are replaced, misspelt, dropped, or are followed by another one

    def __post_init__(self) -> None:
        if (self.of is None) == (self.text is None) or self.of not in (None, PLAIN, REFERENCE):
            raise SaccadeError(f"a prediction is of {PLAIN}, of {REFERENCE}, or a text, such as {{of = {PLAIN!r}}}.")
        if not 0 <= self.wrong <= 1:
            raise SaccadeError(f"wrong must be a share from 0 to 1, not {self.wrong!r}.")

    def predict(self, right: str, seed: str) -> str:
        """Return the prediction of an answer from its text by ``of``; equal seeds have equal faults."""
        text = right if self.text is None else self.text
        pieces = re.split(r"(\s+)", text)  # words at even places
        rng, places = Random(seed), [place for place in range(0, len(pieces), 2) if pieces[place]]
        words = [pieces[place] for place in places]
        for place in rng.sample(places, round(self.wrong * len(places))):
            others = [word for word in words if word != pieces[place]]
            pieces[place] = rng.choice(_KINDS)(rng, pieces[place], rng.choice(others or ["else"]))
        return "".join(pieces)


def parse(table: Mapping[str, Any], where: str) -> Expectation:
    return make(Expectation, table, f"{where}, prediction")


def _misspelt(rng: Random, word: str, other: str) -> str:
    place = rng.randrange(len(word))
    return word[:place] + rng.choice(string.ascii_lowercase.replace(word[place], "")) + word[place + 1 :]


_KINDS = (
    _misspelt,
    lambda rng, word, other: other,
    lambda rng, word, other: "",
    lambda rng, word, other: f"{word} {other}",
)
