"""Cost of several views of a prompt beside one: drafting per step, the search for their weights, and prefill.

All methods take their steps in turns on the same prompt. A step of several views is compared with the step of one
view that was taken beside it, so that both meet the same machine; ratios are medians over steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import mean, median, quantiles
from typing import Any

import torch

from benchmarks.clock import Clock
from benchmarks.pocket_pair import Inputs, add_options, add_step_options, load, prompts
from saccade.draft.drafter import Drafter
from saccade.draft.ensemble.ensemble import EnsembleDrafter, EnsembleSession
from saccade.draft.ensemble.views import make_views
from saccade.draft.ensemble.weights import make_weighting
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.generation import plan
from saccade.inputs.batching import split
from saccade.inputs.processor import InputProcessor
from saccade.target.adapter import Target

COST, SEARCH = 1.15, 0.02
"""Drafting with several views may take this many times one view's; the search for weights this share of a step."""
ONE = "M"


class Timed:
    """A method of one object, replaced by itself with its seconds added up."""

    def __init__(self, owner: Any, name: str, clock: Clock) -> None:
        self.seconds = 0.0
        self._function: Callable[..., Any] = getattr(owner, name)
        self._clock = clock
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        started = self._clock()
        result = self._function(*arguments)
        self.seconds += self._clock() - started
        return result


@dataclass
class Result:
    """Of every step seconds of its drafting, of the draft model's forwards and the search for weights therein, and of
    all of it; of every prompt the drafter's prefill.
    """

    drafting: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    search: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)  # of every step, whether one view had all the weight
    tokens: list[int] = field(default_factory=list)  # that every step emitted
    prefill: list[float] = field(default_factory=list)

    def end_answer(self, steps: int) -> None:
        """Forget the steps behind so many: other methods had none left."""
        for values in (self.drafting, self.forwards, self.search, self.step, self.alone, self.tokens):
            del values[steps:]


class Watched:
    """One answer of one method, timed step by step."""

    def __init__(self, engine: Engine, inputs: Inputs, new_tokens: int, clock: Clock, forwards: Timed) -> None:
        asked = split(engine.target.config, inputs)
        session = engine.open(1)
        self._drafting: Any = session.drafting
        self._clock = clock
        self._forwards = forwards
        load = Timed(self._drafting, "load", clock)
        self._calls = [Timed(self._drafting, name, clock) for name in ("propose", "observe")]
        is_one = not isinstance(self._drafting, EnsembleSession)
        self._search = (
            [] if is_one else [Timed(self._drafting, n, clock) for n in ("_observe_blocks", "_choose_weights")]
        )
        decoding = plan(engine.target, asked, max_new_tokens=new_tokens)
        self._steps: Iterator[Any] = engine.start([Request(p) for p in asked], decoding, session).steps
        next(self._steps)
        self.prefill = load.seconds

    def step(self, result: Result) -> bool:
        """Take one step and write it down; False where there is none left."""
        timers = [*self._calls, self._forwards, *self._search]
        for timer in timers:
            timer.seconds = 0.0
        started = self._clock()
        step = next(self._steps, None)
        if step is None:
            return False
        result.step.append(self._clock() - started)
        result.drafting.append(sum(call.seconds for call in self._calls))
        result.forwards.append(self._forwards.seconds)
        result.search.append(sum(part.seconds for part in self._search))
        result.alone.append(not self._search or float(self._drafting.weights.max()) == 1)
        result.tokens.append(len(step.tokens[0]))
        return True


def time_steps(
    engines: dict[str, Engine], asked: list[Inputs], new_tokens: int, clock: Clock, forwards: Timed
) -> dict[str, Result]:
    """Steps of all engines in turns, as many of each; the first prompt warms up."""
    results: dict[str, Result] = {}
    for number, inputs in enumerate(asked):
        if number < 2:
            results = {name: Result() for name in engines}
        answers = {name: Watched(e, inputs, new_tokens, clock, forwards) for name, e in engines.items()}
        for name, answer in answers.items():
            results[name].prefill.append(answer.prefill)
        order, going = list(engines), True
        while going:
            ended = [name for name in order if not answers[name].step(results[name])]
            order, going = [*order[1:], order[0]], not ended
        shortest = min(len(result.step) for result in results.values())
        for result in results.values():
            result.end_answer(shortest)
    return results


def report(results: dict[str, Result]) -> list[str]:
    """Lines to print."""
    one = results[ONE]
    lines = [
        f"steps of each: {len(one.step)}, of one view {median(one.step) * 1e3:.2f} ms",
        "",
        "| views | drafting, ms | x one: median (quartiles) | one view alone | mixed | forwards x one: alone | mixed | "
        "search | prefill x one | tokens/step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        ratios = [a / b for a, b in zip(result.drafting, one.drafting, strict=True)]
        low, mid, high = quantiles(ratios, n=4)
        run = [a / b for a, b in zip(result.forwards, one.forwards, strict=True)]
        kinds = [_of(values, result.alone, alone) for values in (ratios, run) for alone in (True, False)]
        search = median(a / b for a, b in zip(result.search, result.step, strict=True))
        prefill = median(a / b for a, b in zip(result.prefill, one.prefill, strict=True))
        lines.append(
            f"| {name} | {median(result.drafting) * 1e3:.2f} | {mid:.3f} ({low:.3f}-{high:.3f}) | "
            f"{' | '.join(kinds)} | {search:.2%} | {prefill:.2f} | {mean(result.tokens):.2f} |"
        )
    return [
        *lines,
        "",
        f"limits: {COST:.2f} times one view's drafting, {SEARCH:.0%} of a step for the search",
    ]


def _of(ratios: list[float], alone: list[bool], wanted: bool) -> str:
    chosen = [ratio for ratio, kind in zip(ratios, alone, strict=True) if kind == wanted]
    return f"{median(chosen):.3f} ({len(chosen)})" if chosen else "-"


def drafter(model: Target, processor: InputProcessor, name: str, gamma: int) -> Drafter:
    """From ``views:weights``."""
    views, _, weights = name.partition(":")
    seen = make_views(views, model, processor)
    return EnsembleDrafter(model, Chain(gamma), seen, make_weighting(weights or "auto", len(seen)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--ensembles",
        nargs="+",
        default=["MT:best", "MT:grid", "MTP:best", "MTP:inverse-error"],
        help="views and how they are weighed, beside the picture's view alone (default: %(default)s)",
    )
    add_step_options(parser, prompts=6)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Target(load(options.target, options.target_dtype, options.device))
    draft = Target(load(options.draft, options.draft_dtype, options.device))
    processor = InputProcessor.load(str(options.draft))
    engines = {ONE: Engine(target, ModelDrafter(draft, Chain(options.gamma)))}
    for name in options.ensembles:
        engines[name] = Engine(target, drafter(draft, processor, name, options.gamma))
    asked = prompts(options.target, options.prompts + 1, "dense", options.target_dtype, options.device)
    clock = Clock(options.clock, target.device)
    results = time_steps(engines, asked, options.new_tokens, clock, Timed(draft, "forward", clock))
    print("\n".join(report(results)))
    if options.json:
        content = {name: asdict(result) for name, result in results.items()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
