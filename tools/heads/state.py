"""Folder of answers and heads: what is finished, and for which target and recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.draft.heads.store import kind_in
from saccade.errors import SaccadeError, TrainingError
from saccade.files import write_file
from saccade.wording import differences, shortened
from tools.heads.catalogue import AnswerSet, HeadPlan

MARK = "finished.json"
"""Written into a folder of answers or of a head when all is there; a folder without it is in the making."""


def folder_of(out: Path, part: AnswerSet | HeadPlan) -> Path:
    """Folder of answers or of a head's training run."""
    return out / ("heads" if isinstance(part, HeadPlan) else "answers") / part.name


def _about(part: AnswerSet | HeadPlan, target: str) -> dict[str, Any]:
    """What answers or a head depend on."""
    if isinstance(part, HeadPlan):
        return {"recipe": part.recipe.as_dict(), "target": target}
    return {"source": part.source, "count": part.count, "max_new_tokens": part.max_new_tokens, "target": target}


def finish(folder: Path, part: AnswerSet | HeadPlan, target: str, **outcome: Any) -> None:
    """Record that answers or a head are there, then remove what only training needs.

    Of a head the outcome is ``best``, its folder relative to its run's (the last one where too few answers were held
    out to tell), and ``block_efficiency`` on held-out samples, None if it was not measured.
    """
    write_file(folder / MARK, json.dumps({**_about(part, target), **outcome}, indent=1) + "\n", error=TrainingError)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


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


def is_finished(out: Path, part: AnswerSet | HeadPlan, target: str) -> bool:
    """Whether answers or a head are there as planned; those of another plan are refused."""
    folder = folder_of(out, part)
    record = _record(folder)
    if record is None:
        return False
    planned = json.loads(json.dumps(_about(part, target)))
    for key, old, new in differences({name: record.get(name) for name in planned}, planned):
        what = "a head that was trained" if isinstance(part, HeadPlan) else "answers that were made"
        raise SaccadeError(
            f"{folder} holds {what} otherwise ({key}: {shortened(old)} there, {shortened(new)} now); choose another "
            "folder with --out, or remove that one."
        )
    return True


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
