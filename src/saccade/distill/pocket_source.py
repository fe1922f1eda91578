"""Built-in prompt set: pocket samples drawn into the output folder, which needs nothing outside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.distill.planning import Options
from saccade.errors import InputError
from saccade.files import write_file
from saccade.pocket import WORLD, Sample, draw, lacks
from saccade.pocket.sample import UNSEEN_BY_HEADS

PREFIX = "pocket:"
FILE = "prompts.jsonl"
MEDIA = "media"


def tasks_of(source: str, grammar: str) -> list[str]:
    """Tasks named by ``pocket:TASK,TASK``; ``pocket:all`` names all that the built-in heads were trained on."""
    named = [name.strip() for name in source.removeprefix(PREFIX).split(",") if name.strip()]
    tasks = [task for task in WORLD if task not in UNSEEN_BY_HEADS] if named == ["all"] else list(dict.fromkeys(named))
    if not tasks:
        raise InputError(f"{source!r} names no task; give pocket:all, or pocket: and some of {', '.join(WORLD)}.")
    for task in tasks:
        if reason := lacks(task, grammar):
            raise InputError(reason)
    return tasks


def write_prompts(folder: Path, tasks: Sequence[str], options: Options) -> Path:
    """Draw the samples into ``prompts.jsonl`` and ``media/``, unless an earlier attempt did.

    Videos are saved as single frames, which need no decoder and lose nothing.
    """
    path = folder / FILE
    if path.is_file():
        return path

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            for seed in range(options.first_seed, options.first_seed + options.count):
                for task in tasks:
                    line = _line(draw(seed, task, options.grammar), seed, folder)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    write_file(path, write, advice="free some space or choose another folder")
    return path


def _line(sample: Sample, seed: int, folder: Path) -> dict[str, Any]:
    """Sample as a conversation with its true answers, its media saved."""
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
