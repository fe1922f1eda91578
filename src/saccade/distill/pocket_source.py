"""The built-in prompt set: pocket samples drawn into the output folder, so that it stands alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.distill.options import Options
from saccade.errors import InputError, SaccadeError
from saccade.pocket import WORLD, Sample, draw
from saccade.pocket.sample import UNSEEN_BY_DRAFTS

PREFIX = "pocket:"
FILE = "prompts.jsonl"
MEDIA = "media"


def tasks_of(source: str, grammar: str) -> list[str]:
    """The tasks that ``pocket:TASK,TASK`` names; ``pocket:all`` are all that the built-in drafters have learnt.

    Raises:
        InputError: a task or its grammar does not exist.
    """
    named = [name.strip() for name in source.removeprefix(PREFIX).split(",") if name.strip()]
    tasks = (
        [task for task in WORLD if WORLD[task].share and task not in UNSEEN_BY_DRAFTS]
        if named == ["all"]
        else list(dict.fromkeys(named))
    )
    if not tasks:
        raise InputError(
            f"{source!r} names no task; give pocket:all, or pocket: and some of {', '.join(WORLD)}."
        )
    for task in tasks:
        if task not in WORLD:
            raise InputError(f"There is no pocket task {task!r}; choose all, or some of {', '.join(WORLD)}.")
        if grammar not in WORLD[task].grammars:
            known = " or ".join(WORLD[task].grammars)
            raise InputError(f"The pocket task {task!r} has no grammar {grammar!r}; choose {known}.")
    return tasks


def write_prompts(folder: Path, tasks: Sequence[str], options: Options) -> Path:
    """Draw the samples into ``prompts.jsonl`` and ``media/``, unless an earlier attempt has.

    The pictures of a video are kept as single frames: files that need no decoder and hold exactly what was drawn.

    Raises:
        SaccadeError: the folder cannot be written.
    """
    path = folder / FILE
    if path.is_file():
        return path
    part = folder / f"{FILE}.part"
    try:
        with part.open("w", encoding="utf-8") as file:
            for seed in range(options.first_seed, options.first_seed + options.count):
                for task in tasks:
                    line = _line(draw(seed, task, options.grammar), seed, folder)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as problem:
        raise SaccadeError(
            f"Cannot write the samples into {folder}: {problem.strerror}; free some space or choose another folder."
        ) from problem
    return path


def _line(sample: Sample, seed: int, folder: Path) -> dict[str, Any]:
    """A sample as a conversation with its true answers, media saved."""
    count = 0

    def saved(picture: Image.Image) -> str:
        nonlocal count
        path = f"{MEDIA}/{sample.task}/{seed}-{count}.png"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        picture.save(folder / path, format="PNG")
        count += 1
        return path

    messages = sample.messages()
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = saved(part["image"])
            elif part["type"] == "video":
                part["video"] = [saved(frame) for frame in part["video"]]
    answer = {"role": "assistant", "content": [{"type": "text", "text": sample.answer}]}
    return {"id": f"{sample.task}-{seed}", "messages": [*messages, answer]}
