"""Drills: seven short questions on one picture or video, each answered by its verdict alone.

An answer of the world takes forty tokens for one yes, no, total or letter; a drill has seven of them in little more, so
that nearly every token depends on what was asked. Its questions end in "In short.", so the world's own answers keep
their length.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from saccade.pocket.film import film
from saccade.pocket.labels import no_labels
from saccade.pocket.sample import WORLD, Sample
from saccade.pocket.shapes import Thing, key, render, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, SHAPES, SIZES
from tools.pocket.world import scenes, videos

_TURNS = 7
_SHORT = "In short."
_FRAMES = 12  # at most, so that rows of a batch have similar lengths
Turn = tuple[str, str]
Found = tuple[Turn, list[Thing]]
"""A turn, and the things that it asks for."""


def _ask(task: str, rng: Random, facts: dict[str, Any]) -> str:
    questions = WORLD[task].grammars["dense"].questions
    assert callable(questions)
    return f"{questions(rng, facts)} {_SHORT}"


def _is_there(rng: Random, things: list[Thing]) -> Found:
    present, (colour, shape) = scenes.suspected(rng, things)
    facts = {"colour": colour, "shape": shape, "present": present}
    turn = _ask("existence", rng, facts), scenes.verdict(rng, facts)
    return turn, [thing for thing in things if key(thing) == (colour, shape)]


def _how_many(rng: Random, things: list[Thing]) -> Found:
    thing = rng.choice(things)
    asked = {k: thing[k] for k in rng.choice((("colour",), ("shape",), ("size",), ("colour", "shape")))}
    if rng.random() < 0.15:  # perhaps there are none
        asked = {k: rng.choice(list({"colour": COLOURS, "shape": SHAPES, "size": SIZES}[k])) for k in asked}
    counted = [other for other in things if all(other[k] == v for k, v in asked.items())]
    facts = {"asked": asked, "counted": counted}
    return (_ask("count", rng, facts), scenes.total(rng, facts)), counted


def _what_happens(rng: Random, facts: dict[str, Any]) -> Turn:
    asked = videos.ask(rng, facts)
    letters = videos.lettered(rng, asked) if rng.random() < 0.5 else {}
    known = {**facts, **asked, **letters}
    return _ask("video-question", rng, known), videos.conclusion(rng, known)


def _conversation(task: str, facts: Any, turns: list[Turn], **media: Any) -> Sample:
    *before, (question, answer) = turns
    shown = {"images": (), **media}
    return Sample(task, question=question, answer=answer, facts=facts, labels=no_labels(), turns=tuple(before), **shown)


def _film_drill(rng: Random) -> Sample:
    seen = film(rng)
    while len(seen.video or ()) > _FRAMES:
        seen = film(rng)
    turns = [_what_happens(rng, dict(seen.facts)) for _ in range(_TURNS)]
    return _conversation("video-question", seen.facts, turns, video=seen.video, fps=seen.fps)


def _picture_drill(rng: Random) -> Sample:
    few = rng.random() < 0.6
    colours = rng.sample(list(COLOURS), 3) if few else list(COLOURS)
    shapes = rng.sample(SHAPES, 3) if few else list(SHAPES)
    things = scatter(rng, rng.randint(2, 7), colours=colours, shapes=shapes, sizes=SIZES, twins=True)
    kinds: tuple[Callable[[Random, list[Thing]], Found], ...] = (_is_there, _how_many)
    background = rng.choice(list(BACKGROUNDS))
    asked = [rng.choice(kinds)(rng, things) for _ in range(_TURNS)]
    facts = {"things": things, "found": [found for _, found in asked]}
    return _conversation("existence", facts, [turn for turn, _ in asked], images=(render(background, things),))


def drills(rng: Random, count: int) -> list[Sample]:
    """A batch of `count` drills on shapes, or of half as many on short videos."""
    if rng.random() < 0.3:
        return [_film_drill(rng) for _ in range(max(1, count // 2))]
    return [_picture_drill(rng) for _ in range(count)]
