"""How well a pocket model reads: its answers marked, beside chance and beside what it says of another picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from saccade.pocket.answering import answer
from saccade.pocket.sample import Sample, draw, score
from saccade.vlm import VLM

FIRST_SEED = 100_000
"""Evaluation draws from here on; training draws from a million on (`train.batches`)."""


@dataclass(frozen=True)
class Accuracy:
    """Mean score of one kind of fact.

    `chance` marks the same answers against another picture's facts; `shuffled` marks answers that were given
    while looking at another picture. An answer that reads its picture is well above both.
    """

    task: str
    fact: str
    accuracy: float
    chance: float
    shuffled: float


def _mean(task: str, fact: str, answers: Sequence[str], samples: Sequence[Sample]) -> float:
    scores = [score(task, text, sample.facts)[fact] for text, sample in zip(answers, samples, strict=True)]
    return sum(scores) / len(scores)


def measure(
    vlm: VLM,
    tasks: Sequence[str],
    per_task: int,
    grammar: str = "dense",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Accuracy]:
    """Greedy answers to `per_task` fresh samples of every task, marked.

    Args:
        progress: told how many answers are done, and of how many.
    """
    samples = [draw(FIRST_SEED + i, task, grammar) for task in tasks for i in range(per_task)]
    others = [draw(FIRST_SEED + (i + 1) % per_task, task, grammar) for task in tasks for i in range(per_task)]
    switched = [
        replace(sample, images=other.images, video=other.video)
        for sample, other in zip(samples, others, strict=True)
    ]
    ids = answer(vlm, [*samples, *switched], progress=lambda done: progress(done, 2 * len(samples)))
    texts = vlm.processor.tokenizer.batch_decode(ids)
    rows: list[Accuracy] = []
    for number, task in enumerate(tasks):
        here = slice(number * per_task, (number + 1) * per_task)
        true, false = samples[here], others[here]
        seeing, blind = texts[here], texts[len(samples) :][here]
        for fact in score(task, "", true[0].facts):
            rows.append(
                Accuracy(
                    task,
                    fact,
                    accuracy=_mean(task, fact, seeing, true),
                    chance=_mean(task, fact, seeing, false),
                    shuffled=_mean(task, fact, blind, true),
                )
            )
    return rows


def table(rows: Sequence[Accuracy]) -> str:
    """The rows as a Markdown table."""
    lines = ["| task | fact | accuracy | chance | shuffled image |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.task} | {row.fact} | {row.accuracy:.2f} | {row.chance:.2f} | {row.shuffled:.2f} |"
        )
    return "\n".join(lines)
