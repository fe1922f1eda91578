"""Time and disk space of training heads, from a few answers and steps measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade import VLM
from saccade.distill import distill
from saccade.formats import count, duration
from saccade.train.data import Answers
from saccade.train.trainer import Trainer
from tools.heads.catalogue import AnswerSet, Catalogue, HeadPlan

_COPIES = 2
"""Of a head's weights in its folder: the best and the last ones, in float32."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected cost of one set of answers or one head."""

    name: str  # of it
    what: str  # in words
    seconds: float  # of the whole
    kept: float  # bytes that remain
    passing: float = 0.0  # bytes of features that it is the first to read, removed when no later head reads them


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected cost of everything that is not finished."""

    parts: tuple[Expected, ...]  # answers, then heads, in their order
    there: tuple[str, ...]  # names of what is finished

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(part.seconds for part in self.parts)

    @property
    def most_bytes(self) -> float:
        """Upper limit of the disk space in use at a time: everything that remains, and all that is removed."""
        return sum(part.kept + part.passing for part in self.parts)

    def __str__(self) -> str:
        width = max((len(part.name) for part in self.parts), default=0)
        lines = [f"{p.name:{width}}  {p.what}; about {duration(p.seconds)}, {_size(p)}" for p in self.parts]
        if self.there:
            lines.append(f"Finished: {', '.join(self.there)}.")
        kept = sum(part.kept for part in self.parts)
        if not self.parts:
            return "\n".join([*lines, "Nothing is left to do."])
        total = f"Total: about {duration(self.seconds)}; at most {_bytes(self.most_bytes)} on disk at a time"
        return "\n".join([*lines, f"{total}, {_bytes(kept)} for good."])


def forecast(
    vlm: VLM,
    catalogue: Catalogue,
    finished: Callable[[AnswerSet | HeadPlan], bool],
    say: Callable[[str], None] = lambda _: None,
) -> Forecast:
    """Answer one prompt of every task, try a step of every kind of head, and estimate the rest."""
    answers = [a for a in catalogue.answers.values() if not finished(a)]
    heads = [h for h in catalogue.heads.values() if not finished(h)]
    left = {*(f"answers {a.name}" for a in answers), *(h.name for h in heads)}
    there = [name for name in (*(f"answers {a}" for a in catalogue.answers), *catalogue.heads) if name not in left]
    if not answers and not heads:
        return Forecast((), tuple(there))
    with TemporaryDirectory() as folder:
        probe = _Probe(vlm, catalogue, Path(folder), say)
        parts = [probe.answers(a) for a in answers] + [probe.head(h, catalogue.answers[h.data]) for h in heads]
    return Forecast(tuple(parts), tuple(there))


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one kind of head: seconds per sample of the target, per step of every stage; bytes per sample, of weights."""

    sample: float
    steps: tuple[float, ...]
    features: float
    weights: int


class _Probe:
    """Measurements on one prompt of every task."""

    def __init__(self, vlm: VLM, catalogue: Catalogue, folder: Path, say: Callable[[str], None]) -> None:
        self._vlm, self._folder, self._say = vlm, folder, say
        tasks = list(dict.fromkeys(task for a in catalogue.answers.values() for task in a.listed))
        say(f"Answering one prompt of {count(len(tasks), 'task')}")
        self._data = folder / "answers"
        begun = time.perf_counter()
        longest = max(a.max_new_tokens for a in catalogue.answers.values())
        report = distill(vlm, f"pocket:{','.join(tasks)}", self._data, count=1, max_new_tokens=longest)
        self._answer_seconds = (time.perf_counter() - begun) / max(report.answered, 1)
        self._questions = report.answered / len(tasks)  # of a prompt: earlier turns count
        size = sum(file.stat().st_size for file in self._data.rglob("*") if file.is_file())
        self._answer_bytes = size / max(report.answered, 1)
        self._costs: dict[Any, _Cost] = {}
        self._cached: set[str] = set()

    def answers(self, answers: AnswerSet) -> Expected:
        number = round(answers.prompts * self._questions)
        what = f"{number:,} answers to {answers.count:,} prompts of {count(len(answers.listed), 'task')}"
        return Expected(answers.name, what, number * self._answer_seconds, number * self._answer_bytes)

    def head(self, plan: HeadPlan, data: AnswerSet) -> Expected:
        recipe, cost = plan.recipe, self._cost(plan)
        samples = round(data.prompts * self._questions)
        limit = recipe.cache_gb * 1e9
        cached = recipe.feature_cache != "none"
        fits = min(1.0, limit / max(samples * cost.features, 1)) if cached else 0.0
        shown = recipe.steps * recipe.batch_size
        name = plan.features(self._vlm.target)
        is_first = name not in self._cached
        self._cached.add(name)
        read = (min(shown, samples) * fits if is_first else 0.0) + shown * (1 - fits)
        steps = sum(s * stage.steps for s, stage in zip(cost.steps, _stages(recipe.stages), strict=True))
        held = min(recipe.validation_samples, samples // 10)
        validations = 1 + (recipe.steps // recipe.validate_every if recipe.validate_every else 0)
        seconds = read * cost.sample + steps + validations * held * self._answer_seconds
        passing = min(samples * cost.features, limit) if recipe.feature_cache == "disk" and is_first else 0.0
        kept = _COPIES * 4 * cost.weights
        return Expected(plan.name, f"{plan.kind}, {recipe.steps:,} steps on {plan.data}", seconds, kept, passing)

    def _cost(self, plan: HeadPlan) -> _Cost:
        recipe = plan.recipe
        depths = tuple(stage.draft_steps for stage in _stages(recipe.stages))
        alike = (plan.kind, tuple(sorted(recipe.head.items())), recipe.batch_size, recipe.micro_batch, depths)
        if alike not in self._costs:
            self._say(f"Trying a step of {plan.name}")
            self._costs[alike] = self._measure(plan)
        return self._costs[alike]

    def _measure(self, plan: HeadPlan) -> _Cost:
        recipe = replace(plan.recipe, feature_cache="none")
        processor = self._vlm.processor
        source = Answers(self._data, processor, min_words=0, max_tokens=recipe.max_tokens)
        target, out, states = self._vlm.target, self._folder / "run", self._folder / "features"
        trainer = Trainer(target, recipe, source, out, processor=processor, features=states, say=self._say)
        stages = [number for number, stage in enumerate(recipe.stages, 1) if stage.steps]
        trainer.try_step(0, stages[0])  # warms up; calibrates a DREAM head's samples
        indices = trainer.order.at(0)
        parts = [indices[at : at + recipe.micro_batch] for at in range(0, len(indices), recipe.micro_batch)]
        reading = _seconds(lambda: [trainer.learner.prepare(part, 0) for part in parts])
        steps = [max(_seconds(partial(trainer.try_step, 0, number)) - reading, 0.0) for number in stages]
        weights = sum(w.numel() for w in trainer.learner.module.parameters())
        return _Cost(reading / len(indices), tuple(steps), trainer.learner.cache_bytes(indices), weights)


def _stages(stages: Iterable[Any]) -> Sequence[Any]:
    return [stage for stage in stages if stage.steps]


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _size(part: Expected) -> str:
    return _bytes(part.kept) + (f", and {_bytes(part.passing)} while it trains" if part.passing else "")


def _bytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
