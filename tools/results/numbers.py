"""Numbers of pages by the names that `reasons.toml` cites them by, so that no cause has one that no record has."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from saccade.errors import SaccadeError
from tools.results.claims import Verdict

_CITED = re.compile(r"\{([\w-]+): ([^{}]+)\}")
ALL = "all tasks"


class Unmeasured(SaccadeError):
    """A number is cited of a page that is not measured."""


class Numbers:
    """What ``{PAGE: NAME}`` stands for.

    NAME is a claim (what its verdict is of), ``claim | A / B`` (another comparison of it), or, of the page's file,
    ``section | task | method | quantity``; without a task it is of all tasks, without a section of the comparison.
    """

    def __init__(self) -> None:
        self._texts: dict[str, dict[str, str]] = {}

    def add(self, page: str, verdicts: Sequence[Verdict], file: str) -> None:
        """Learn a page's verdicts, and all numbers of its CSV file."""
        known: dict[str, str] = {}
        for section, task, method, quantity, value, low, high in csv.reader(io.StringIO(file)):
            if section.startswith("claim: "):
                known[f"{section.removeprefix('claim: ')} | {method}"] = f"{value} [{low}, {high}]"
                continue
            names = [section, task, method, quantity]
            known[" | ".join(names)] = value
            if task == ALL:
                known[" | ".join([section, method, quantity])] = value
                if section == "comparison":
                    known[f"{method} | {quantity}"] = value
        for verdict in verdicts:
            if verdict.worst is not None:
                says, worst = verdict.claim.says, verdict.worst
                known[says] = known[f"{says} | {worst.above} / {worst.below}"]
        self._texts[page] = known

    def cite(self, text: str) -> str:
        """Put the numbers into a text that cites them."""
        return _CITED.sub(lambda cited: self._number(*cited.groups()), text)

    def _number(self, page: str, name: str) -> str:
        if page not in self._texts:
            raise Unmeasured(f"{page} is not measured")
        if name not in self._texts[page]:
            raise SaccadeError(f"There is no number {{{page}: {name}}}; cite one of docs/results/{page}.csv.")
        return self._texts[page][name]


def by_hand(text: str) -> list[str]:
    """Decimals, percentages and multiples that a text has of its own, which nothing would renew."""
    return _HAND.findall(_CITED.sub("", text))


_HAND = re.compile(r"\d*\.\d+|\d+ %|\d+ times")
