"""How long a suite will take, from one plain answer per task."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.bench.answering import ask
from saccade.bench.preparing import Prepared
from saccade.bench.suite import BASELINE


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds.

    Attributes:
        answers: records that a complete run has.
        traced: extra answers for the report's trees.
        seconds: of the whole run, if every method took as long as plain decoding.
    """

    answers: int
    traced: int
    seconds: float


def estimate(prepared: Prepared) -> Expected:
    """Time one plain answer to the first question of every task, after one to warm up."""
    suite, plain = prepared.suite, prepared.methods[BASELINE]
    seconds = 0.0
    answers = traced = 0
    for number, group in enumerate(prepared.questions.values()):
        rounds = 2 if number == 0 else 1
        for _ in range(rounds):
            spent = sum(
                a.seconds for a in ask(plain, BASELINE, group[0], 0, options=prepared.options, seed=0)
            )
        asked = len(group) * suite.repeats * len(prepared.methods)
        again = min(suite.trace, len(group)) * len(prepared.methods)
        warmup = suite.warmup * len(prepared.methods) if number == 0 else 0
        answers += asked * len(group[0].turns)
        traced += again * len(group[0].turns)
        seconds += spent * (asked + again + warmup)
    return Expected(answers, traced, seconds)
