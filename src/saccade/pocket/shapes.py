"""What tasks share that draw, place, name and find coloured shapes."""

import re
from collections.abc import Iterable, Sequence
from random import Random

from PIL import Image, ImageDraw

# A scene's own brush, labels and sense of direction: one look for the whole world.
from saccade.pocket.scene import RADIUS, Thing
from saccade.pocket.scene import _draw_shape as draw_shape
from saccade.pocket.scene import _label as label
from saccade.pocket.scene import _relation as relation
from saccade.pocket.words import BACKGROUNDS, COLOURS, COLUMNS, ROWS, SHAPES, SIZES

__all__ = [
    "RADIUS",
    "Thing",
    "at",
    "draw_shape",
    "key",
    "label",
    "locate",
    "name",
    "named",
    "places",
    "relation",
    "render",
    "room",
    "scatter",
    "unplaced",
]

CELL = 32
_BORDER = 3  # as in scenes: no centre where its cell is a matter of taste
_SIDE = 96
_HUES, _KINDS = "|".join(COLOURS), "|".join(SHAPES)
_NAMED = re.compile(rf"\b({_HUES}) (?:(?:{'|'.join(SIZES)}) )?({_KINDS})\b")
_PLACE = re.compile(rf"\b({'|'.join(ROWS)}) ({'|'.join(COLUMNS)})\b")
_BESIDE = re.compile(rf"(?:above|below|to the (?:left|right) of|than|as) the (?:{_HUES}) (?:{_KINDS})")


def locate(thing: Thing, x: int, y: int) -> Thing:
    """The thing with its centre at `(x, y)`, and the words for that place."""
    return {**thing, "x": x, "y": y, "row": ROWS[y // CELL], "column": COLUMNS[x // CELL]}


def room(rng: Random, size: str, others: Iterable[Thing]) -> tuple[int, int] | None:
    """A centre for a shape of that size, clear of all others and of the lines between cells; None for bad luck."""
    radius = RADIUS[size]
    x, y = (rng.randint(radius + 1, _SIDE - radius - 2) for _ in "xy")
    if any(min(v % CELL, -v % CELL) < _BORDER for v in (x, y)):
        return None
    for other in others:
        gap = radius + RADIUS[other["size"]] + 2
        if abs(x - other["x"]) <= gap and abs(y - other["y"]) <= gap:
            return None
    return x, y


def scatter(
    rng: Random,
    count: int,
    *,
    colours: Sequence[str] = tuple(COLOURS),
    shapes: Sequence[str] = SHAPES,
    sizes: Sequence[str] = SIZES,
    twins: bool = False,
) -> list[Thing]:
    """Shapes that do not touch, in reading order: `count` of them, or fewer where no room is left.

    Args:
        twins: two may be alike in colour and shape.
    """
    things: list[Thing] = []
    for _ in range(300):
        if len(things) == count:
            break
        new = {"size": rng.choice(sizes), "colour": rng.choice(colours), "shape": rng.choice(shapes)}
        place = room(rng, new["size"], things)
        alike = any(key(new) == key(other) for other in things)
        if place is not None and (twins or not alike):
            things.append(locate(new, *place))
    return sorted(things, key=lambda thing: (ROWS.index(thing["row"]), thing["x"]))


def render(background: str, things: Iterable[Thing]) -> Image.Image:
    """The picture of the things."""
    image = Image.new("RGB", (_SIDE, _SIDE), BACKGROUNDS[background])
    canvas = ImageDraw.Draw(image)
    for thing in things:
        draw_shape(canvas, thing)
    return image


def key(thing: Thing) -> tuple[str, str]:
    """Colour and shape: what tells the things of a picture apart."""
    return thing["colour"], thing["shape"]


def name(thing: Thing) -> str:
    """`"red circle"`."""
    return f"{thing['colour']} {thing['shape']}"


def at(thing: Thing) -> str:
    """`"top left"`."""
    return f"{thing['row']} {thing['column']}"


def named(text: str) -> list[tuple[str, str]]:
    """Colour and shape of everything that the text calls by both, in order."""
    return _NAMED.findall(text)


def places(text: str) -> list[tuple[str, str]]:
    """Row and column of every place in the text, in order."""
    return _PLACE.findall(text)


def unplaced(text: str) -> str:
    """The text without what it says a thing is beside of, or compared with."""
    return _BESIDE.sub("", text)
