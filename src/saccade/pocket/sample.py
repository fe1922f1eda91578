"""What a pocket sample is, and the registry of tasks that draw one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from PIL import Image

from saccade.pocket.labels import Labels, no_labels

IMAGE_MARK = "<image>"
"""Where a picture stands in a question, when they do not all stand in front of it."""
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A drawing with the ground truth behind it."""

    image: Image.Image
    facts: Facts
    labels: Labels


@dataclass(frozen=True)
class Media:
    """Any number of pictures, or a video, with the ground truth behind them."""

    facts: Facts
    images: tuple[Image.Image, ...] = ()
    video: tuple[Image.Image, ...] | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Sample:
    """One question about 96 x 96 pictures or a video, with the answer and the facts that it was drawn from.

    Attributes:
        images: the pictures, in order. They stand in front of the conversation's first question, unless a
            question has an `IMAGE_MARK` for every one of them.
        labels: what the vision tower is pre-trained on (`[8, 8, 4]`, see `saccade.pocket.labels`); `IGNORED_LABEL`
            everywhere when there is no single picture with names for its patches.
        video: its frames, in order; it stands where the pictures would.
        fps: the video's frames per second.
        turns: earlier questions with their true answers; `question` comes after them.
    """

    task: str
    images: tuple[Image.Image, ...] = field(compare=False)
    question: str
    answer: str
    facts: Facts
    labels: Labels = field(compare=False, repr=False)
    video: tuple[Image.Image, ...] | None = field(default=None, compare=False, repr=False)
    fps: float | None = None
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def image(self) -> Image.Image:
        """The picture of a sample that has one.

        Raises:
            ValueError: it has none or several.
        """
        if len(self.images) != 1:
            raise ValueError(
                f"A sample of task {self.task!r} has {len(self.images)} pictures, not one; read `images`."
            )
        return self.images[0]

    def messages(self, media: bool = True) -> list[dict[str, Any]]:
        """The conversation up to the question, as chat messages whose contents are lists of parts.

        Args:
            media: put pictures and video frames into their parts, as `saccade.VLM.generate` takes them; else
                the parts are bare places (`{"type": "image"}`), as Hugging Face templates take them.
        """
        waiting = iter(self.images)
        told: list[dict[str, Any]] = []
        for question, answer in (*self.turns, (self.question, None)):
            texts = question.split(IMAGE_MARK)
            parts: list[dict[str, Any]] = []
            if not told and self.video is not None:
                parts.append({"type": "video", **({"video": list(self.video)} if media else {})})
            in_front = len(self.images) if not told and not self._marked() else 0
            for text in (*[""] * in_front, *texts[:-1]):
                parts += [{"type": "text", "text": text}] if text else []
                image = next(waiting)
                parts.append({"type": "image", **({"image": image} if media else {})})
            parts.append({"type": "text", "text": texts[-1]})
            told.append({"role": "user", "content": parts})
            if answer is not None:
                told.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        return told

    def _marked(self) -> bool:
        return any(IMAGE_MARK in text for text in (*(turn[0] for turn in self.turns), self.question))


@dataclass(frozen=True)
class Grammar:
    """A way to talk about a picture: the questions that ask for it, and the answer it gives.

    `questions` may be a function for tasks that ask for something in particular; what is asked for is then one
    of the facts. `earlier` tells the turns before the question, in the same grammar.
    """

    questions: tuple[str, ...] | Callable[[Random, Facts], str]
    answer: Callable[[Random, Facts], str]
    earlier: Callable[[Facts], tuple[tuple[str, str], ...]] | None = None


@dataclass(frozen=True)
class Task:
    """A kind of picture: how to draw it, how to talk about it and how to mark an answer.

    `share` is its part of the mixture that training begins with, relative to the other tasks; 0 for what only the last
    stages have (`tools.pocket.recipe`). `decisive` finds the words of an
    answer that its few words of verdict are (yes, no, a letter, a total): training weighs them more. `longest` is the
    number of tokens after which an answer is cut off.
    """

    paint: Callable[[Random], Picture | Media]
    grammars: Mapping[str, Grammar]
    score: Callable[[str, Facts], dict[str, float]]
    share: float
    decisive: str | None = None
    longest: int = 192


def grammars(
    questions: tuple[str, ...] | Callable[[Random, Facts], str],
    dense: Callable[[Random, Facts], str],
    verbose: Callable[[Random, Facts], str],
    earlier: Callable[[str, Facts], tuple[tuple[str, str], ...]] | None = None,
) -> dict[str, Grammar]:
    """Dense and verbose grammar of a task whose questions differ only in a request for full sentences.

    Args:
        earlier: earlier turns, by the name of the grammar.
    """

    def full(question: str) -> str:
        return f"{question} Use full sentences."

    in_full = (
        tuple(map(full, questions))
        if isinstance(questions, tuple)
        else lambda rng, facts: full(questions(rng, facts))
    )
    turns = {name: earlier and partial(earlier, name) for name in ("dense", "verbose")}
    return {
        "dense": Grammar(questions, dense, turns["dense"]),
        "verbose": Grammar(in_full, verbose, turns["verbose"]),
    }


WORLD: dict[str, Task] = {}
"""Every task by name, in the order of `saccade.pocket.tasks`."""
UNSEEN_BY_DRAFTS = ("story", "album")
"""Tasks that drafters are not trained on: their out-of-distribution case."""


def register(name: str, task: Task) -> None:
    """Add a task to the world.

    Raises:
        ValueError: the name is taken.
    """
    if name in WORLD:
        raise ValueError(f"The pocket task {name!r} is registered twice; give the second one another name.")
    WORLD[name] = task


def _task(name: str) -> Task:
    if name not in WORLD:
        raise ValueError(f"There is no pocket task {name!r}; the tasks are {', '.join(WORLD)}.")
    return WORLD[name]


def draw(seed: int, task: str, grammar: str = "dense") -> Sample:
    """The sample number `seed` of a task: the same pixels and text on every machine.

    The picture depends on seed and task only, so both grammars talk about the same picture.

    Args:
        seed: any integer.
        task: a name in `WORLD`.
        grammar: `dense` (facts in random order, many paraphrases, comparisons) or `verbose` (easy
            template sentences).

    Raises:
        ValueError: the task or the grammar does not exist.
    """
    kind = _task(task)
    if grammar not in kind.grammars:
        raise ValueError(f"Task {task!r} has no grammar {grammar!r}; it has {', '.join(kind.grammars)}.")
    seen = kind.paint(Random(f"pocket/{task}/{seed}"))
    rng = Random(f"pocket/{task}/{seed}/{grammar}")
    voice = kind.grammars[grammar]
    asked = voice.questions
    question = rng.choice(asked) if isinstance(asked, tuple) else asked(rng, seen.facts)
    answer = voice.answer(rng, seen.facts)
    turns = voice.earlier(seen.facts) if voice.earlier else ()
    if isinstance(seen, Picture):
        return Sample(task, (seen.image,), question, answer, seen.facts, seen.labels, turns=turns)
    return Sample(task, seen.images, question, answer, seen.facts, no_labels(), seen.video, seen.fps, turns)


def score(task: str, answer: str, facts: Facts) -> dict[str, float]:
    """Mark an answer against the facts of a picture: for every kind of fact the share told correctly.

    Scoring an answer against the facts of *another* picture of the task gives chance level.

    Raises:
        ValueError: the task does not exist.
    """
    return _task(task).score(answer, facts)
