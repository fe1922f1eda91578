"""How well a pocket model reads: `python -m saccade.pocket.evaluate`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.pocket import TASKS, Sample, draft_path, draw, score, target_path
from saccade.pocket.answering import answer

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


def measure(model: Any, processor: Any, per_task: int, grammar: str = "dense") -> list[Accuracy]:
    """Greedy answers to `per_task` fresh samples of every task, marked."""
    rows = []
    for task in TASKS:
        samples = [draw(FIRST_SEED + i, task, grammar) for i in range(per_task)]
        others = samples[1:] + samples[:1]
        decode = processor.tokenizer.batch_decode
        seeing = decode(answer(model, processor, samples))
        blind = decode(answer(model, processor, samples, images=[other.image for other in others]))
        for fact in score(task, "", samples[0].facts):
            rows.append(
                Accuracy(
                    task,
                    fact,
                    accuracy=_mean(task, fact, seeing, samples),
                    chance=_mean(task, fact, seeing, others),
                    shuffled=_mean(task, fact, blind, samples),
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


def main() -> None:
    """Print the accuracy table of the shipped target, the draft or any folder."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    parser = argparse.ArgumentParser(prog="python -m saccade.pocket.evaluate", description=__doc__)
    parser.add_argument("model", nargs="?", default="target", help="target, draft or a model folder")
    parser.add_argument("--samples", type=int, default=128, help="samples per task")
    parser.add_argument("--grammar", default="dense", choices=("dense", "verbose"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = {"target": target_path(), "draft": draft_path()}.get(options.model, Path(options.model))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    processor = AutoProcessor.from_pretrained(folder)
    print(table(measure(model, processor, options.samples, options.grammar)))


if __name__ == "__main__":
    main()
