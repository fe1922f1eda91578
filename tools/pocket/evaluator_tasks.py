"""Tasks of the pocket world for lmms-eval's ``--include_path``, so that the plug-in can be tried without a download.

The functions that the task files name are in this module.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from saccade.errors import InputError
from saccade.files import write_file
from saccade.pocket import WORLD, Sample, draw, lacks, score
from saccade.pocket.sample import IMAGE_MARK
from tools.pocket.files import write_video

FIRST = 600_000  # number of the first sample; neither training nor the suites draw from there on
CHOICES = 4  # answers to choose from: the right one, and those to other samples of the task

_TEMPLATES = {"": "lmms_generate.yaml", "_choice": "lmms_choice.yaml"}
"""Template of lmms-eval's task file by the end of the task's name."""


def write_lmms_tasks(folder: Path, tasks: Sequence[str], count: int, seed: int = 0) -> list[Path]:
    """Write two tasks for lmms-eval per task of the pocket world, and their data.

    ``saccade_NAME`` generates answers, scored by the share of right facts; ``saccade_NAME_choice`` selects the right
    one of four answers by its log-probability (simple models only).
    """
    if count < CHOICES:
        raise InputError(f"--count must be at least {CHOICES} for lmms-eval, whose wrong choices are other answers.")
    written = []
    for name in tasks:
        samples = _samples(name, count, seed)
        docs = [_doc(sample, number, folder / name) for number, sample in enumerate(samples)]
        data = folder / name / "samples.jsonl"
        for number, doc in enumerate(docs):
            others = [other["answer"] for other in (*docs[number + 1 :], *docs[:number])][: CHOICES - 1]
            doc["choices"] = Random(number).sample([doc["answer"], *others], CHOICES)
            doc["label"] = doc["choices"].index(doc["answer"])
        write_file(data, "".join(json.dumps(doc) + "\n" for doc in docs))
        values = {"name": name, "data": json.dumps(str(data.resolve())), "longest": WORLD[name].longest}
        for suffix, template in _TEMPLATES.items():
            written.append(folder / f"saccade_{name}{suffix}.yaml")
            text = Path(__file__).with_name(template).read_text(encoding="utf-8")
            write_file(written[-1], text.format(**values))
    return written


def _samples(name: str, count: int, seed: int) -> list[Sample]:
    if reason := lacks(name):
        raise InputError(reason)
    samples = [draw(FIRST + seed + number, name) for number in range(count)]
    if any(sample.turns for sample in samples):
        raise InputError(f"The pocket task {name} has earlier turns, which these tasks lack; choose another.")
    return samples


def _doc(sample: Sample, number: int, folder: Path) -> dict[str, Any]:
    """One line of data; pictures and videos are files."""
    folder = folder.resolve()
    media = []
    for index, image in enumerate(sample.images):
        media.append(folder / f"{number}-{index}.png")
        write_file(media[-1], partial(image.save, format="PNG"))
    if sample.video is not None:
        media.append(folder / f"{number}.mp4")
        write_file(media[-1], partial(write_video, frames=sample.video, fps=sample.fps or 1.0))
    return {
        "id": number,
        "pocket_task": sample.task,
        "media": [str(path) for path in media],
        "question": sample.question,
        "answer": sample.answer,
        "facts": json.dumps(sample.facts),
    }


def doc_to_visual(doc: Mapping[str, Any]) -> list[Any]:
    """Pictures of a line of data, and paths of its videos, as lmms-eval's tasks give them."""
    return [path if path.endswith(".mp4") else Image.open(path).convert("RGB") for path in doc["media"]]


def doc_to_messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a line of data in lmms-eval's form, with pictures in place of their marks."""
    waiting = doc_to_visual(doc)
    content: list[dict[str, Any]] = []
    texts = doc["question"].split(IMAGE_MARK)
    for text in texts[:-1]:
        content += [{"type": "text", "text": text}] if text else []
        content.append({"type": "image", "url": waiting.pop(0)})
    front = [{"type": "video" if isinstance(v, str) else "image", "url": v} for v in waiting]
    return [{"role": "user", "content": [*front, *content, {"type": "text", "text": texts[-1]}]}]


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score of an answer: the mean over the kinds of facts that `saccade.pocket.score` counts."""
    marks = score(doc["pocket_task"], results[0], json.loads(doc["facts"]))
    return {"facts": sum(marks.values()) / max(1, len(marks))}


def process_choices(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Whether the right choice has the lowest loss.

    lmms-eval 0.7.0 to 0.7.3 turns the pairs of every model's `loglikelihood` into text before a task gets them, which
    its own scoring of multiple choice does not expect; this reads both forms.
    """
    losses = [(ast.literal_eval(pair) if isinstance(pair, str) else pair)[0] for pair in results]
    return {"acc": float(losses.index(min(losses)) == doc["label"])}
