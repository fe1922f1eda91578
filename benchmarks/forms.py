"""Tokens per second of processor time, and per pass, on a suite's tasks: every method in turn on every prompt.

By default the suite `forms`, whose answers obey schemas and grammars; `documents` has answers with predictions. Rows of
the table are medians over prompts of medians over rounds, of whole answers and of what follows the prompt's pass.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

import saccade
import tools.pocket.world  # noqa: F401 -- reports
from benchmarks.pocket_pair import rotated, table
from saccade.bench.answering import constraint
from saccade.bench.expectations import PLAIN
from saccade.bench.questions import Question, gather
from saccade.bench.suites import BASELINE, load
from saccade.output import Output


@dataclass
class Timed:
    """One answer and its processor time in seconds: to the first token, and all of it."""

    output: Output
    first: float
    total: float

    @property
    def speed(self) -> float:
        return len(self.output.tokens) / self.total

    @property
    def decoding(self) -> float:
        """Tokens per second after the prompt's pass; that pass's own where it gave them all."""
        return max(self.output.stats.decoded_tokens, 1) / max(self.total - self.first, 1e-4)


def answer(vlm: Any, question: Question, longest: int, right: str) -> Timed:
    """Answer a question, of which plain decoding's answer is known after the first round."""
    options: dict[str, Any] = question.options({"max_new_tokens": longest, "do_sample": False})
    grammar = constraint(vlm, question)
    if grammar is not None:
        options["logits_processor"] = [grammar]
    prediction = question.prediction and question.prediction.predict(right, question.id)
    begun, first = time.process_time(), 0.0
    stream = vlm.stream(question.turns[0].messages, prediction=prediction, **options)
    for _ in stream:
        first = first or time.process_time() - begun
    return Timed(stream.output, first, time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="forms", help="built-in suite, or a .toml file")
    parser.add_argument("--tasks", nargs="*", help="of the suite (default: all)")
    parser.add_argument("--methods", nargs="*", default=["chain", "auto", "prompt-lookup"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafter", help="folder (default: the pocket's)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    suite = load(options.suite)
    base = saccade.load(options.target, options.drafter, dtype="float32")
    ways = {name: base.using(name) for name in dict.fromkeys((BASELINE, *options.methods))}
    tasks = {name: group for name, group in gather(suite)[0].items() if not options.tasks or name in options.tasks}
    head = ["task", "method", "tokens", "tokens/s", "x plain (lowest)", "decoding, x plain (lowest)", "tokens/pass"]
    print("\n".join(table([*head, "drafted/pass"])), flush=True)
    for vlm in ways.values():
        answer(vlm, next(iter(tasks.values()))[0], 16, "")  # warms up
    faults = []
    for task, group in tasks.items():
        times = defaultdict[str, list[list[Timed]]](list)
        for number, question in enumerate(group):
            right = question.turns[0].answer or ""
            if question.prediction is not None and question.prediction.of == PLAIN:
                right = answer(ways[BASELINE], replace(question, prediction=None), suite.max_new_tokens, "").output.text
            runs = defaultdict[str, list[Timed]](list)
            for turn in range(options.rounds):
                for name in rotated(ways, number + turn):
                    runs[name].append(answer(ways[name], question, suite.max_new_tokens, right))
            for name, each in runs.items():
                times[name].append(each)
                if each[0].output.tokens != runs[BASELINE][0].output.tokens:
                    faults.append(f"{question.id}: {name} has other tokens than {BASELINE}")
        for name, each in times.items():
            print(f"| {' | '.join([task, name, *cells(each, times[BASELINE])])} |", flush=True)
    print("\n".join(faults) or f"All answers of all methods are {BASELINE}'s, token for token.")


def cells(ours: list[list[Timed]], plain: list[list[Timed]]) -> list[str]:
    """A method's row: of every prompt its runs, beside plain decoding's."""
    speeds, ratios, decoding = [], [], []
    for mine, theirs in zip(ours, plain, strict=True):
        speeds.append(median(each.speed for each in mine))
        ratios.append(median(a.speed / b.speed for a, b in zip(mine, theirs, strict=True)))
        decoding.append(median(a.decoding / b.decoding for a, b in zip(mine, theirs, strict=True)))
    stats = [each[0].output.stats for each in ours]
    passes = max(sum(each.target_passes for each in stats), 1)
    return [
        f"{median(each.new_tokens for each in stats):.0f}",
        f"{median(speeds):.1f}",
        f"{median(ratios):.2f} ({min(ratios):.2f})",
        f"{median(decoding):.2f} ({min(decoding):.2f})",
        f"{sum(each.decoded_tokens for each in stats) / passes:.2f}",
        f"{sum(each.drafted_tokens for each in stats) / passes:.1f}",
    ]


if __name__ == "__main__":
    main()
