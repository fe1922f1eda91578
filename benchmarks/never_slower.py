"""Method `auto` beside plain decoding where drafting cannot pay: its time over any 500 tokens of a row.

Plain decoding, `auto` and plain decoding again answer every prompt (or group of prompts) step by step in turn, in an
order that rotates. The answers of a setting are joined into one course per method: the clock by the number of tokens.
The ratio of a window is the time between two numbers of tokens, `auto` over the mean of both courses of plain decoding,
prefill included. Every repeat begins with a cost model that knows nothing. A window's ratio is the median over repeats,
the worst window the largest of these, its interval a bootstrap over repeats. The same figures of the second course of
plain decoding over the first show how much of that is noise.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from benchmarks import pocket_pair
from benchmarks.pocket_pair import CLOCKS, Clock, load
from saccade import methods
from saccade.bench.metrics import Array, Estimate, bootstrap
from saccade.draft.drafter import Drafter
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import InputProcessor
from saccade.methods.compositions import Models
from saccade.target_model.adapter import Target
from tools.pocket.world import FIRST_TASKS

BOUND = 1.02
"""Times of plain decoding that `auto` may take over any window."""
WINDOW = 500
"""Tokens of a window, of every row."""
_STRIDE = 10
_NOISE = 0.01
"""Spread of the noise on the weights of the drafter that is as large as the target, over theirs."""


@dataclass(frozen=True)
class Setting:
    """One kind of work."""

    drafters: tuple[str, str] = ("pair", "pair")  # of the first and the second half of the answers
    answers: int = 12  # number of prompts
    new_tokens: int = 96  # longest answer
    rows: int = 1  # prompts at once
    tasks: tuple[str, ...] = FIRST_TASKS  # of the prompts, in turn


SETTINGS = {
    "the pair as it is": Setting(),
    "random drafter": Setting(("random", "random")),
    "drafter as large as the target": Setting(("large", "large")),
    "answers of 5 tokens": Setting(answers=64, new_tokens=5),
    "8 rows": Setting(answers=64, rows=8),
    "8 rows, random drafter": Setting(("random", "random"), answers=64, rows=8),
    "good drafter, then random": Setting(("pair", "random")),
    "long prompts, answers of 10": Setting(answers=28, new_tokens=10, tasks=("story",)),
}


@dataclass
class Course:
    """The clock at the end of every step, and the tokens so far, of all answers in a row."""

    seconds: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[int] = field(default_factory=lambda: [0])

    def windows(self, size: int) -> Array:
        """Seconds of every window of ``size`` tokens, between steps by interpolation."""
        starts = np.arange(0, self.tokens[-1] - size + 1, _STRIDE)
        at = np.interp(np.concatenate([starts, starts + size]), self.tokens, self.seconds)
        return np.asarray(at[len(starts) :] - at[: len(starts)])


@dataclass
class Measured:
    """Courses of plain decoding, `auto`, and plain decoding ``again``, one of each per repeat."""

    courses: list[dict[str, Course]] = field(default_factory=list)
    unequal: int = 0  # answers of `auto` whose tokens are not plain decoding's
    drafted: int = 0
    accepted: int = 0


def generate(
    engines: dict[str, Engine], prompts: Sequence[Prompt], new_tokens: int, clock: Clock, courses: dict[str, Course]
) -> dict[str, list[Any]]:
    """Let every engine answer some prompts at once, step by step in turn, and add the steps to its course.

    The next step is that of the engine which emitted fewest tokens, so that all of them meet the same machine.
    """
    runs, tokens, spent = {}, dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    for name, engine in engines.items():
        started = clock()
        decoding = plan(engine.target, prompts, max_new_tokens=new_tokens)
        runs[name] = engine.start([Request(prompt) for prompt in prompts], decoding)
        spent[name] = clock() - started
    waiting = list(engines)
    while waiting:
        name = min(waiting, key=lambda each: tokens[each])
        started = clock()
        step = next(runs[name].steps, None)
        spent[name] += clock() - started
        if step is None:
            waiting.remove(name)
            continue
        emitted = sum(map(len, step.tokens))
        course = courses[name]
        course.seconds.append(course.seconds[-1] + spent[name])
        course.tokens.append(course.tokens[-1] + emitted)
        tokens[name] += emitted
        spent[name] = 0.0
    return {name: run.outputs for name, run in runs.items()}


def measure(
    setting: Setting,
    make: Callable[[str], tuple[Engine, Drafter]],
    groups: Sequence[Sequence[Prompt]],
    clock: Clock,
    repeats: int,
) -> Measured:
    """Run a setting; one group of prompts warms up and is not counted."""
    measured = Measured()
    for number in range(repeats + 1):
        engine, first = make(setting.drafters[0])
        _, second = make(setting.drafters[1])
        plain = Engine(engine.target)
        engines = [("plain", plain), ("auto", engine), ("again", plain)]
        courses = {name: Course() for name, _ in engines}
        for index, prompts in enumerate(groups if number else groups[:1]):
            engine.drafter = first if 2 * index < len(groups) else second
            turn = (index + number) % len(engines)
            gc.collect()
            outputs = generate(dict(engines[turn:] + engines[:turn]), prompts, setting.new_tokens, clock, courses)
            if number:
                for ours, expected in zip(outputs["auto"], outputs["plain"], strict=True):
                    measured.unequal += ours.tokens != expected.tokens
                    measured.drafted += ours.stats.drafted_tokens
                    measured.accepted += ours.stats.accepted_tokens
        if number:
            measured.courses.append(courses)
    return measured


def line(name: str, measured: Measured, rows: int) -> list[str]:
    """Cells of one setting."""
    plain, auto, again = (
        np.stack([courses[method].windows(WINDOW * rows) for courses in measured.courses])
        for method in ("plain", "auto", "again")
    )
    ends = [{method: course.seconds[-1] for method, course in courses.items()} for courses in measured.courses]
    totals = np.array([2 * end["auto"] / (end["plain"] + end["again"]) for end in ends])
    tokens = [courses["auto"].tokens[-1] for courses in measured.courses]

    def worst(ratios: Array) -> Estimate:
        return bootstrap(lambda drawn: np.median(ratios[drawn], axis=1).max(1), len(ratios))

    def interval(ratio: Estimate) -> str:
        return f"{ratio.value:.3f}" + ("" if ratio.low is None else f" ({ratio.low:.3f}-{ratio.high:.3f})")

    top = worst(2 * auto / (plain + again))
    return [
        *(name, str(tokens[0])),
        interval(bootstrap(lambda drawn: np.median(totals[drawn], axis=1), len(totals))),
        f"{interval(top)}{'' if top.value <= BOUND else ' OVER'}",
        interval(worst(again / plain)),
        f"{measured.drafted / max(1, sum(tokens)):.2f}",
        f"{measured.accepted / max(1, measured.drafted):.2f}",
        str(measured.unequal),
    ]


def drafters(options: argparse.Namespace) -> Callable[[str], Target]:
    """Draft models by name, each made once."""

    @cache
    def make(name: str) -> Target:
        torch.manual_seed(0)
        if name == "large":
            model = load(options.target, options.target_dtype, options.device)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight) * weight.std() * _NOISE)
        else:
            model = load(options.draft, options.draft_dtype, options.device)
        if name == "random":
            model = AutoModelForImageTextToText.from_config(model.config, dtype=model.dtype)
        return Target(model.to(options.device).eval())

    return make


def main() -> None:
    """Measure and print the table."""
    parser = pocket_pair.parser(__doc__)
    parser.set_defaults(target_dtype="float32", threads=1)
    parser.add_argument("--repeats", type=int, default=5, help="courses of each method (default: 5)")
    parser.add_argument("--clock", default="cpu", choices=CLOCKS, help="(default: cpu)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="NAME")
    options = pocket_pair.options_of(parser)
    target = Target(load(options.target, options.target_dtype, options.device))
    draft_model, processor = drafters(options), InputProcessor.load(str(options.target))
    clock = pocket_pair.clocks(options)()

    def make(name: str) -> tuple[Engine, Drafter]:
        engine = methods.build("auto", Models(target, draft_model(name)))
        assert engine.drafter is not None
        return engine, engine.drafter

    ratios = ["all, auto / plain", f"worst {WINDOW} tokens of a row, auto / plain", "plain / plain"]
    head = ["setting", "tokens", *ratios, "drafted per token", "of these accepted", "unequal answers"]
    print("\n".join(pocket_pair.table(head)), flush=True)
    content: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
    for name in options.settings:
        setting = SETTINGS[name]
        samples = pocket_pair.samples(range(setting.answers), tasks=setting.tasks)
        prompts = [processor.prompt(sample.messages()) for sample in samples]
        groups = [prompts[at : at + setting.rows] for at in range(0, len(prompts), setting.rows)]
        content[name] = measured = measure(setting, make, groups, clock, options.repeats)
        print(f"| {' | '.join(line(name, measured, setting.rows))} |", flush=True)
    pocket_pair.write_json(options.json, content)


if __name__ == "__main__":
    main()
