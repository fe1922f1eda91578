"""What an answer scores that has nothing to do with its question."""

from collections.abc import Sequence
from itertools import pairwise

from saccade.pocket.sample import Sample, score


def chance(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean marks of every true answer against the facts of the next sample, per kind of fact.

    Args:
        samples: two or more of one task.
    """
    ring = [*samples, samples[0]]
    marks = [score(one.task, one.answer, other.facts) for one, other in pairwise(ring)]
    return {fact: sum(mark[fact] for mark in marks) / len(marks) for fact in marks[0]}
