"""What a pocket sample is, and the registry of tasks that draw one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

IMAGE_SIZE = 96
PATCH_SIZE = 12
GRID = IMAGE_SIZE // PATCH_SIZE

Facts = Mapping[str, Any]
Labels = NDArray[np.int64]

LABEL_CLASSES = {"colour": 9, "shape": 8, "word": 15, "digit": 10}
"""What the tower learns to name in every patch, with the number of classes (0 is "nothing here")."""


def blank_labels() -> Labels:
    """Labels of an empty picture, `[GRID, GRID, 4]` in the order of `LABEL_CLASSES`."""
    return np.zeros((GRID, GRID, len(LABEL_CLASSES)), np.int64)


@dataclass(frozen=True)
class Picture:
    """A drawing with the ground truth behind it."""

    image: Image.Image
    facts: Facts
    labels: Labels


@dataclass(frozen=True)
class Sample:
    """One question about one 96 x 96 picture, with the answer and the facts that it was drawn from.

    `labels` (`[8, 8, 4]`, see `LABEL_CLASSES`) is what the vision tower is pre-trained on.
    """

    task: str
    image: Image.Image = field(compare=False)
    question: str
    answer: str
    facts: Facts
    labels: Labels = field(compare=False, repr=False)


@dataclass(frozen=True)
class Grammar:
    """A way to talk about a picture: the questions that ask for it, and the answer it gives."""

    questions: tuple[str, ...]
    answer: Callable[[Random, Facts], str]


@dataclass(frozen=True)
class Task:
    """A kind of picture: how to draw it, how to talk about it and how to mark an answer.

    `share` is its part of the training mixture, relative to the other tasks.
    """

    paint: Callable[[Random], Picture]
    grammars: Mapping[str, Grammar]
    score: Callable[[str, Facts], dict[str, float]]
    share: float


TASKS: dict[str, Task] = {}
"""Every task by name. Modules add theirs with `register`."""


def register(name: str, task: Task) -> None:
    """Add a task to the world.

    Raises:
        ValueError: the name is taken.
    """
    if name in TASKS:
        raise ValueError(f"The pocket task {name!r} is registered twice; give the second one another name.")
    TASKS[name] = task


def _task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"There is no pocket task {name!r}; the tasks are {', '.join(TASKS)}.")
    return TASKS[name]


def draw(seed: int, task: str, grammar: str = "dense") -> Sample:
    """The sample number `seed` of a task: the same pixels and text on every machine.

    The picture depends on seed and task only, so both grammars talk about the same picture.

    Args:
        seed: any integer.
        task: a name in `TASKS`.
        grammar: `dense` (facts in random order, many paraphrases, comparisons) or `verbose` (easy
            template sentences).

    Raises:
        ValueError: the task or the grammar does not exist.
    """
    kind = _task(task)
    if grammar not in kind.grammars:
        raise ValueError(f"Task {task!r} has no grammar {grammar!r}; it has {', '.join(kind.grammars)}.")
    picture = kind.paint(Random(f"pocket/{task}/{seed}"))
    rng = Random(f"pocket/{task}/{seed}/{grammar}")
    voice = kind.grammars[grammar]
    question = rng.choice(voice.questions)
    answer = voice.answer(rng, picture.facts)
    return Sample(task, picture.image, question, answer, picture.facts, picture.labels)


def score(task: str, answer: str, facts: Facts) -> dict[str, float]:
    """Mark an answer against the facts of a picture: for every kind of fact the share told correctly.

    Scoring an answer against the facts of *another* picture of the task gives chance level.

    Raises:
        ValueError: the task does not exist.
    """
    return _task(task).score(answer, facts)
