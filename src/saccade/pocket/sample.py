"""Samples of the pocket world, their tasks, and the registry from which they are drawn and scored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from PIL import Image

from saccade.errors import InputError
from saccade.pocket.labels import Labels, no_labels
from saccade.wording import meant

IMAGE_MARK = "<image>"  # place of a picture within a question; without marks all pictures come first
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A picture with its ground truth and patch labels."""

    image: Image.Image
    facts: Facts
    labels: Labels


@dataclass(frozen=True)
class Media:
    """Several pictures, or a video, with their ground truth."""

    facts: Facts
    images: tuple[Image.Image, ...] = ()
    video: tuple[Image.Image, ...] | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Sample:
    """One question about 96 x 96 pictures or a video, with the true answer and its facts."""

    task: str
    images: tuple[Image.Image, ...] = field(compare=False)  # pictures in order
    question: str
    answer: str
    facts: Facts
    # patch labels for pre-training of the vision tower (`[8, 8, 8]`, see `saccade.pocket.labels`); `IGNORED_LABEL`
    # everywhere if the sample has no single picture with labels
    labels: Labels = field(compare=False, repr=False)
    video: tuple[Image.Image, ...] | None = field(default=None, compare=False, repr=False)  # frames in order
    fps: float | None = None  # frames per second of the video
    turns: tuple[tuple[str, str], ...] = ()  # earlier questions with their true answers

    @property
    def image(self) -> Image.Image:
        """The only picture."""
        if len(self.images) != 1:
            raise ValueError(f"A sample of task {self.task!r} has {len(self.images)} pictures, not one; read `images`.")
        return self.images[0]

    def messages(self, media: bool = True) -> list[dict[str, Any]]:
        """Chat messages up to the question, with lists of parts as contents."""
        waiting = iter(self.images)
        messages: list[dict[str, Any]] = []
        for question, answer in (*self.turns, (self.question, None)):
            texts = question.split(IMAGE_MARK)
            parts: list[dict[str, Any]] = []
            if not messages and self.video is not None:
                parts.append({"type": "video", **({"video": list(self.video)} if media else {})})
            in_front = len(self.images) if not messages and not self._marked() else 0
            for text in (*[""] * in_front, *texts[:-1]):
                parts += [{"type": "text", "text": text}] if text else []
                image = next(waiting)
                parts.append({"type": "image", **({"image": image} if media else {})})
            parts.append({"type": "text", "text": texts[-1]})
            messages.append({"role": "user", "content": parts})
            if answer is not None:
                messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        return messages

    def _marked(self) -> bool:
        return any(IMAGE_MARK in text for text in (*(turn[0] for turn in self.turns), self.question))


@dataclass(frozen=True)
class Grammar:
    """Questions and answers of a task in one style."""

    questions: tuple[str, ...] | Callable[[Random, Facts], str]  # fixed questions
    answer: Callable[[Random, Facts], str]  # the true answer
    earlier: Callable[[Facts], tuple[tuple[str, str], ...]] | None = None  # turns before the question


@dataclass(frozen=True)
class Task:
    """A kind of question: its media, grammars and score."""

    paint: Callable[[Random], Picture | Media]  # draws the media with their ground truth
    grammars: Mapping[str, Grammar]  # by name
    score: Callable[[str, Facts], dict[str, float]]  # scores of an answer by kind of fact, from 0 to 1, given the facts
    share: float  # share of the first training mixture, relative to the other tasks
    # pattern of the few words that decide an answer (yes, no, a letter, a total), which weigh more in training
    decisive: str | None = None
    longest: int = 192  # limit of answers in tokens


def grammars(
    questions: tuple[str, ...] | Callable[[Random, Facts], str],
    dense: Callable[[Random, Facts], str],
    verbose: Callable[[Random, Facts], str],
    earlier: Callable[[str, Facts], tuple[tuple[str, str], ...]] | None = None,
) -> dict[str, Grammar]:
    """Dense and verbose grammar of a task whose questions differ only in a request for full sentences."""

    def full(question: str) -> str:
        return f"{question} Use full sentences."

    in_full = (
        tuple(map(full, questions)) if isinstance(questions, tuple) else lambda rng, facts: full(questions(rng, facts))
    )
    turns = {name: earlier and partial(earlier, name) for name in ("dense", "verbose")}
    return {
        "dense": Grammar(questions, dense, turns["dense"]),
        "verbose": Grammar(in_full, verbose, turns["verbose"]),
    }


WORLD: dict[str, Task] = {}  # every task by name, in order
UNSEEN_BY_DRAFTS = ("story", "album")  # tasks that drafters are not trained on: their out-of-distribution case
UNSEEN_BY_HEADS = (*UNSEEN_BY_DRAFTS, "long-video")
"""Tasks that heads are not trained on, which, as published ones, have seen no prompts of thousands of tokens."""


def lacks(task: str, grammar: str = "dense") -> str:
    """Return why a task cannot be drawn in a grammar, as a sentence; empty when it can."""
    if task not in WORLD:
        return (
            f"There is no pocket task {task!r}{meant(task, WORLD)}; the tasks are {', '.join(WORLD)}. In a checkout of "
            "the repository, `python -m tools.pocket.world` runs every command of saccade with more of them."
        )
    if grammar not in WORLD[task].grammars:
        return f"The pocket task {task!r} has no grammar {grammar!r}; it has {', '.join(WORLD[task].grammars)}."
    return ""


def draw(seed: int, task: str, grammar: str = "dense") -> Sample:
    """Draw sample number `seed` of a task: the same pixels and text on every machine.

    Media depend on seed and task only, so both grammars describe the same picture.
    """
    if reason := lacks(task, grammar):
        raise InputError(reason)
    kind = WORLD[task]
    media = kind.paint(Random(f"pocket/{task}/{seed}"))
    rng = Random(f"pocket/{task}/{seed}/{grammar}")
    style = kind.grammars[grammar]
    questions = style.questions
    question = rng.choice(questions) if isinstance(questions, tuple) else questions(rng, media.facts)
    answer = style.answer(rng, media.facts)
    turns = style.earlier(media.facts) if style.earlier else ()
    if isinstance(media, Picture):
        return Sample(task, (media.image,), question, answer, media.facts, media.labels, turns=turns)
    return Sample(task, media.images, question, answer, media.facts, no_labels(), media.video, media.fps, turns)


def score(task: str, answer: str, facts: Facts) -> dict[str, float]:
    """Score an answer against the facts of a sample: the share that is correct, from 0 to 1, by kind of fact.

    The score of an answer against the facts of *another* sample of the task is chance level.
    """
    if task not in WORLD:
        raise InputError(lacks(task))
    return WORLD[task].score(answer, facts)
