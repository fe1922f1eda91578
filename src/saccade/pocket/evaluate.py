"""Evaluation of pocket models on held-out samples of every task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.pocket.sample import WORLD, Sample, draw, score
from saccade.vlm import VLM


def answer(
    vlm: VLM,
    samples: Sequence[Sample],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 32,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The model's answers as token ids, without the end token, in the order of the samples.

    Args:
        temperature: 0 for greedy answers.
        seed: of the draws, when it is not.
        progress: told how many samples are done, after every batch.
    """
    # Rows of one batch stop together when their true answers are of one length.
    order = sorted(range(len(samples)), key=lambda i: (samples[i].task, len(samples[i].answer)))
    answers: list[list[int]] = [[] for _ in samples]
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
    )
    end = vlm.processor.tokenizer.eos_token_id
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        outputs = vlm.generate(
            [samples[i].messages() for i in chosen],
            seed=[seed + i for i in chosen],
            max_new_tokens=max(WORLD[samples[i].task].longest for i in chosen),
            **sampling,
        )
        for i, output in zip(chosen, outputs, strict=True):
            answers[i] = [token for token in output.tokens if token != end]
        progress(start + len(chosen))
    return answers


_SHUFFLED = 4  # every how many-th sample is asked with another picture, too
FIRST_SEED = 100_000
"""Evaluation draws from here on; training draws from a million on (`train.batches`)."""


@dataclass(frozen=True)
class Accuracy:
    """Mean score of one kind of fact.

    `chance` marks the same answers against another picture's facts; `shuffled` marks answers that were given
    while looking at another picture, of a quarter of the samples. An answer that reads its picture is well above both.
    """

    task: str
    fact: str
    accuracy: float
    chance: float
    shuffled: float


def _mean(task: str, fact: str, answers: Sequence[str], samples: Sequence[Sample]) -> float:
    scores = [score(task, text, sample.facts)[fact] for text, sample in zip(answers, samples, strict=True)]
    return sum(scores) / len(scores)


def _others(drawn: Sequence[Sample]) -> list[Sample]:
    """For every sample another one of its task."""
    return [*drawn[1:], drawn[0]]


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
    samples = {task: [draw(FIRST_SEED + i, task, grammar) for i in range(per_task)] for task in tasks}
    switched = [
        replace(mine, images=other.images, video=other.video)
        for drawn in samples.values()
        for mine, other in list(zip(drawn, _others(drawn), strict=True))[::_SHUFFLED]
    ]
    asked = [*(sample for drawn in samples.values() for sample in drawn), *switched]
    ids = answer(vlm, asked, progress=lambda done: progress(done, len(asked)))
    texts = iter(vlm.processor.tokenizer.batch_decode(ids))
    seeing = {task: [next(texts) for _ in drawn] for task, drawn in samples.items()}
    rows: list[Accuracy] = []
    for task, true in samples.items():
        asked_anew = true[::_SHUFFLED]
        blind = [next(texts) for _ in asked_anew]
        for fact in score(task, "", true[0].facts):
            rows.append(
                Accuracy(
                    task,
                    fact,
                    accuracy=_mean(task, fact, seeing[task], true),
                    chance=_mean(task, fact, seeing[task], _others(true)),
                    shuffled=_mean(task, fact, blind, asked_anew),
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
