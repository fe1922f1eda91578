"""Runs that can be resumed: answers of the target first, then one head after the other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from saccade import VLM
from saccade.distill import distill
from saccade.environment import fingerprint
from saccade.train.data import Answers
from saccade.train.trainer import Trainer
from saccade.wording import duration
from tools.heads.catalogue import AnswerSet, Catalogue, HeadPlan
from tools.heads.state import finish, folder_of, is_finished


class Workshop:
    """Answers and heads of one target in one folder."""

    def __init__(self, vlm: VLM, catalogue: Catalogue, out: Path, say: Callable[[str], None] = print) -> None:
        self._vlm, self._catalogue, self._out, self._say = vlm, catalogue, out, say
        self._target = fingerprint(vlm.target.model)

    def left(self) -> list[AnswerSet | HeadPlan]:
        """Answers and heads that are not finished, in order."""
        parts: list[AnswerSet | HeadPlan] = [*self._catalogue.answers.values(), *self._catalogue.heads.values()]
        return [part for part in parts if not is_finished(self._out, part, self._target)]

    def plan(self) -> str:
        """What is left, one line each; the time that it takes is shown while it runs."""
        return "\n".join(f"{part.name}: {part.work}" for part in self.left()) or "Nothing is left to do."

    def run(self) -> None:
        """Make what is missing; heads take about as long as the one before."""
        left = self.left()
        seconds = 0.0
        for number, part in enumerate(left, 1):
            ahead = f"; about {duration(seconds * (len(left) - number + 1))} left" if seconds else ""
            self._say(f"[{number}/{len(left)}] {part.name}: {part.work}{ahead}")
            if isinstance(part, AnswerSet):
                folder = folder_of(self._out, part)
                distill(self._vlm, part.source, folder, count=part.count, max_new_tokens=part.max_new_tokens)
                finish(folder, part, self._target)
                continue
            begun = time.monotonic()
            self._train(part)
            seconds = time.monotonic() - begun
            still_read = {p.features(self._vlm.target) for p in left[number:] if isinstance(p, HeadPlan)}
            for folder in (self._out / "features").glob("*"):
                if folder.name not in still_read:
                    shutil.rmtree(folder, ignore_errors=True)

    def _train(self, plan: HeadPlan) -> None:
        folder, recipe, processor = folder_of(self._out, plan), plan.recipe, self._vlm.processor
        source = Answers(
            self._out / "answers" / plan.data, processor, min_words=recipe.min_words, max_tokens=recipe.max_tokens
        )
        states = self._out / "features" / plan.features(self._vlm.target) if recipe.feature_cache == "disk" else None

        def say(line: str) -> None:
            self._say(f"    {plan.name}: {line}")

        trainer = Trainer(
            self._vlm.target, recipe, source, folder, processor=processor, features=states, resume=True, say=say
        )
        outcome = trainer.run()
        best = (outcome.best or outcome.head).relative_to(folder).as_posix()
        finish(folder, plan, self._target, best=best, block_efficiency=outcome.efficiency)
