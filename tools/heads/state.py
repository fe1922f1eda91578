"""Folder of answers and heads: what is finished, and for which target and recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.draft.heads.store import kind_in
from saccade.errors import SaccadeError, TrainingError
from saccade.files import write_file
from saccade.formats import differences, shortened
from tools.heads.catalogue import AnswerSet, HeadPlan

MARK = "finished.json"
"""Written into a head's folder when its training has ended; a folder without it is in training."""
_TRANSIENT = ("features", "checkpoints")  # features are the head's own where an earlier version began the training


@dataclass(frozen=True, slots=True)
class Finished:
    """What is recorded of a trained head."""

    settings: Mapping[str, Any]  # of its recipe
    target: str  # fingerprint of the target
    best: str  # folder of the head, relative to its run's; the last one where too few answers were held out to tell
    efficiency: float | None  # block efficiency on held-out samples; None if it was not measured


def answers_folder(out: Path, name: str) -> Path:
    """Folder of a set of answers."""
    return out / "answers" / name


def head_folder(out: Path, name: str) -> Path:
    """Folder of a head's training run."""
    return out / "heads" / name


def features_folder(out: Path, name: str) -> Path:
    """Folder of cached features, which heads share that read the same."""
    return out / "features" / name


def clear_features(out: Path, wanted: Collection[str]) -> None:
    """Remove all cached features but those of these names."""
    for folder in (out / "features").glob("*"):
        if folder.name not in wanted:
            shutil.rmtree(folder, ignore_errors=True)


def finish_answers(folder: Path, answers: AnswerSet, target: str) -> None:
    """Record that all answers of a set are there."""
    write_file(folder / MARK, json.dumps(_about(answers, target), indent=1) + "\n")


def are_answered(out: Path, answers: AnswerSet, target: str) -> bool:
    """Whether all answers of a set are there."""
    folder = answers_folder(out, answers.name)
    if not (folder / MARK).is_file():
        return False
    for key, old, new in differences(_read(folder / MARK, "answer again"), _about(answers, target)):
        raise SaccadeError(_otherwise(folder, "answers that were made", key, old, new))
    return True


def _about(answers: AnswerSet, target: str) -> dict[str, Any]:
    return {
        "source": answers.source,
        "count": answers.count,
        "max_new_tokens": answers.max_new_tokens,
        "target": target,
    }


def _otherwise(folder: Path, what: str, key: str, old: Any, new: Any) -> str:
    return (
        f"{folder} holds {what} otherwise ({key}: {shortened(old)} there, {shortened(new)} now); choose another folder "
        "with --out, or remove that one."
    )


def _read(path: Path, again: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    raise SaccadeError(f"{path} is damaged; remove the folder {path.parent} and {again}.")


def finish(folder: Path, plan: HeadPlan, target: str, best: Path, efficiency: float | None) -> None:
    """Record that a head is trained, then remove what only training needs."""
    mark = {
        "recipe": plan.recipe.as_dict(),
        "target": target,
        "best": best.relative_to(folder).as_posix(),
        "block_efficiency": efficiency,
    }
    write_file(folder / MARK, json.dumps(mark, indent=1) + "\n", error=TrainingError)
    for name in _TRANSIENT:
        shutil.rmtree(folder / name, ignore_errors=True)


def read_finished(folder: Path) -> Finished | None:
    """The record of a trained head; None while there is none."""
    path = folder / MARK
    if not path.is_file():
        return None
    mark = _read(path, "train the head again")
    return Finished(mark.get("recipe", {}), mark.get("target", ""), mark.get("best", ""), mark.get("block_efficiency"))


def is_finished(out: Path, plan: HeadPlan, target: str) -> bool:
    """Whether the head is trained as planned."""
    folder = head_folder(out, plan.name)
    found = read_finished(folder)
    if found is None:
        return False
    recipe = json.loads(json.dumps(plan.recipe.as_dict()))
    odd = next(differences(found.settings, recipe), None)
    if odd is None and found.target == target:
        return True
    key, old, new = odd or ("target", found.target, target)
    raise SaccadeError(_otherwise(folder, "a head that was trained", key, old, new))


def usable_head(out: Path, name: str, target: str) -> Path | None:
    """Folder of a trained head to draft with; None if there is none, or its training has not ended.

    A folder that is itself a head, made elsewhere, is taken as it is.
    """
    folder = head_folder(out, name)
    if folder.is_dir() and kind_in(str(folder)) is not None:
        return folder
    found = read_finished(folder)
    if found is None:
        return None
    if found.target != target:
        raise SaccadeError(
            f"The head in {folder} was trained for another target; choose another folder, or the target of that head."
        )
    return folder / found.best


def steps_of(out: Path, name: str) -> int | None:
    """Steps that a head of the folder was trained, all stages together; None where its folder does not record them."""
    found = read_finished(head_folder(out, name))
    stages = found.settings.get("stages", []) if found is not None else []
    return sum(stage["steps"] for stage in stages) if stages else None
