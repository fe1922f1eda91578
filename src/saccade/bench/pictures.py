"""Pictures of the questions, saved beside the records so that a report can show them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from saccade.bench.questions import Question
from saccade.errors import SaccadeError
from saccade.inputs.media import load_image

FOLDER = "media"


def save(question: Question, run: Path) -> list[list[str]]:
    """Save the pictures of every turn, unless they are there already.

    Returns:
        Per turn the file names below ``media/``.

    Raises:
        SaccadeError: the disk is full or the folder cannot be written.
    """
    return [_save(question.turn_id(i), turn.images, run / FOLDER) for i, turn in enumerate(question.turns)]


def _save(prompt_id: str, sources: Iterable[Any], folder: Path) -> list[str]:
    names = []
    for index, source in enumerate(sources):
        name = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', prompt_id)}-{index}.png"
        names.append(name)
        if (folder / name).exists():
            continue
        part = folder / f"{name}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            load_image(source).save(part, format="PNG")
            os.replace(part, folder / name)
        except OSError as problem:
            raise SaccadeError(
                f"Cannot save the picture {folder / name}: {problem.strerror or problem}; the records so far are "
                "intact, free some space and run the same command again to go on."
            ) from problem
    return names
