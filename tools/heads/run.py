"""Runs that can be resumed: answers of the target first, then one head after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from saccade import VLM
from saccade.distill import distill
from saccade.environment import fingerprint
from saccade.formats import duration
from saccade.train.data import Answers
from saccade.train.trainer import Trainer
from tools.heads.catalogue import AnswerSet, Catalogue, HeadPlan
from tools.heads.plan import Forecast, forecast
from tools.heads.state import (
    answers_folder,
    are_answered,
    clear_features,
    features_folder,
    finish,
    finish_answers,
    head_folder,
    is_finished,
)


class Workshop:
    """Answers and heads of one target in one folder."""

    def __init__(self, vlm: VLM, catalogue: Catalogue, out: Path, say: Callable[[str], None] = print) -> None:
        self._vlm, self._catalogue, self._out, self._say = vlm, catalogue, out, say
        self._target = fingerprint(vlm.target.model)

    def finished(self, part: AnswerSet | HeadPlan) -> bool:
        """Whether answers or a head are there."""
        if isinstance(part, HeadPlan):
            return is_finished(self._out, part, self._target)
        return are_answered(self._out, part, self._target)

    def forecast(self) -> Forecast:
        """Estimate what is left."""
        return forecast(self._vlm, self._catalogue, self.finished, self._say)

    def run(self, expected: Forecast) -> None:
        """Make what is missing, in order."""
        costs = {part.name: part.seconds for part in expected.parts}
        parts: list[AnswerSet | HeadPlan] = [*self._catalogue.answers.values(), *self._catalogue.heads.values()]
        left = [part for part in parts if not self.finished(part)]
        spent = planned = 0.0
        for number, part in enumerate(left, 1):
            ahead = sum(costs.get(p.name, 0.0) for p in left[number - 1 :])
            ahead *= spent / planned if planned and spent else 1.0
            self._say(f"[{number}/{len(left)}] {part.name}; about {duration(ahead)} left")
            begun = time.monotonic()
            if isinstance(part, AnswerSet):
                self._answer(part)
            else:
                self._train(part)
                self._clear(left[number:])
            spent += time.monotonic() - begun
            planned += costs.get(part.name, 0.0)

    def _answer(self, answers: AnswerSet) -> None:
        folder = answers_folder(self._out, answers.name)
        distill(self._vlm, answers.source, folder, count=answers.count, max_new_tokens=answers.max_new_tokens)
        finish_answers(folder, answers, self._target)

    def _train(self, plan: HeadPlan) -> None:
        folder, recipe = head_folder(self._out, plan.name), plan.recipe
        source = Answers(
            answers_folder(self._out, plan.data),
            self._vlm.processor,
            min_words=recipe.min_words,
            max_tokens=recipe.max_tokens,
        )
        processor = self._vlm.processor
        states = features_folder(self._out, plan.features(self._vlm.target)) if recipe.feature_cache == "disk" else None
        say = self._progress(plan.name)
        trainer = Trainer(
            self._vlm.target, recipe, source, folder, processor=processor, features=states, resume=True, say=say
        )
        outcome = trainer.run()
        finish(folder, plan, self._target, outcome.best or outcome.head, outcome.efficiency)

    def _clear(self, left: Sequence[AnswerSet | HeadPlan]) -> None:
        """Remove cached features that no head reads that is left."""
        wanted = {plan.features(self._vlm.target) for plan in left if isinstance(plan, HeadPlan)}
        clear_features(self._out, wanted)

    def _progress(self, name: str) -> Callable[[str], None]:
        return lambda line: self._say(f"    {name}: {line}")
