"""Runs that can be resumed: answers of the target first, then one head after the other; and what they have finished."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saccade import VLM
from saccade.distill import distill
from saccade.draft.heads.store import kind_in
from saccade.environment import fingerprint
from saccade.errors import SaccadeError, TrainingError
from saccade.files import write_file
from saccade.train.data import Answers
from saccade.train.trainer import Trainer
from saccade.wording import differences, duration, shortened
from tools.heads.catalogue import AnswerSet, Catalogue, HeadPlan

MARK = "finished.json"
"""Written into a folder of answers or of a head when all is there; a folder without it is in the making."""


class Workshop:
    """Answers and heads of one target in one folder."""

    def __init__(self, vlm: VLM, catalogue: Catalogue, out: Path, say: Callable[[str], None] = print) -> None:
        self._vlm, self._catalogue, self._out, self._say = vlm, catalogue, out, say
        self._target = fingerprint(vlm.target.model)

    def left(self) -> list[AnswerSet | HeadPlan]:
        """Answers and heads that are not finished, in order."""
        parts: list[AnswerSet | HeadPlan] = [*self._catalogue.answers.values(), *self._catalogue.heads.values()]
        return [part for part in parts if not self._is_finished(part)]

    def plan(self) -> str:
        """What is left, one line each; the time that it takes is shown while it runs."""
        return "\n".join(map(str, self.left())) or "Nothing is left to do."

    def run(self) -> None:
        """Make what is missing; heads take about as long as the one before."""
        left = self.left()
        seconds = 0.0
        for number, part in enumerate(left, 1):
            ahead = f"; about {duration(seconds * (len(left) - number + 1))} left" if seconds else ""
            self._say(f"[{number}/{len(left)}] {part}{ahead}")
            if isinstance(part, AnswerSet):
                distill(self._vlm, out=self._out / part.place, **part.made_of)
                self._finish(part)
                continue
            begun = time.monotonic()
            self._train(part)
            seconds = time.monotonic() - begun
            still_read = {p.features(self._vlm.target) for p in left[number:] if isinstance(p, HeadPlan)}
            for folder in (self._out / "features").glob("*"):
                if folder.name not in still_read:
                    shutil.rmtree(folder, ignore_errors=True)

    def _train(self, plan: HeadPlan) -> None:
        folder, recipe, processor = self._out / plan.place, plan.recipe, self._vlm.processor
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
        best = (outcome.best or outcome.head).relative_to(folder).as_posix()  # the last one where none was compared
        self._finish(plan, best=best, block_efficiency=outcome.efficiency)

    def _finish(self, part: AnswerSet | HeadPlan, **outcome: Any) -> None:
        """Record that answers or a head are there, then remove what only training needs."""
        folder, content = self._out / part.place, {**part.made_of, "target": self._target, **outcome}
        write_file(folder / MARK, json.dumps(content, indent=1) + "\n", error=TrainingError)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _is_finished(self, part: AnswerSet | HeadPlan) -> bool:
        """Whether answers or a head are there as planned; those of another plan are refused."""
        folder = self._out / part.place
        record = _record(folder)
        if record is None:
            return False
        planned = json.loads(json.dumps({**part.made_of, "target": self._target}))
        for key, old, new in differences({name: record.get(name) for name in planned}, planned):
            what = "a head that was trained" if isinstance(part, HeadPlan) else "answers that were made"
            raise SaccadeError(
                f"{folder} holds {what} otherwise ({key}: {shortened(old)} there, {shortened(new)} now); choose "
                "another folder with --out, or remove that one."
            )
        return True


def _record(folder: Path) -> Mapping[str, Any] | None:
    """The record of answers or a head; None while there is none."""
    path = folder / MARK
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict):
        raise SaccadeError(f"{path} is damaged; remove the folder {folder}, and run the same command again.")
    return record


def usable_head(out: Path, name: str, target: str) -> Path | None:
    """Folder of a trained head to draft with; None if there is none, or its training has not ended.

    A folder that is itself a head, made elsewhere, is taken as it is.
    """
    folder = out / "heads" / name
    if folder.is_dir() and kind_in(str(folder)) is not None:
        return folder
    record = _record(folder)
    if record is None:
        return None
    if record.get("target") != target:
        raise SaccadeError(
            f"The head in {folder} was trained for another target; choose another folder, or the target of that head."
        )
    return folder / str(record.get("best", ""))


def steps_of(out: Path, name: str) -> int | None:
    """Steps that a head of the folder was trained, all stages together; None where its folder does not record them."""
    stages = ((_record(out / "heads" / name) or {}).get("recipe") or {}).get("stages", [])
    return sum(stage["steps"] for stage in stages) if stages else None
