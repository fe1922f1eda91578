"""Coloured shapes: draw, place, label and name them, and find them in text."""

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from saccade.pocket.labels import GRID, IMAGE_SIZE, PATCH_SIZE, Labels, blank_labels, label_patch
from saccade.pocket.words import BACKGROUNDS, COLOURS, COLUMNS, ROWS, SHAPES, SIZES

Thing = dict[str, Any]
"""A shape: `x`, `y` (its centre), `size`, `colour`, `shape`, and the words for its cell, `row` and `column`."""

RADIUS = {"small": 7, "large": 13}
CELL = IMAGE_SIZE // 3
BORDER = 3  # no centre is nearer to the line between two cells, so that its place is never a matter of taste
_HUES, _KINDS = "|".join(COLOURS), "|".join(SHAPES)
_NAMED = re.compile(rf"\b({_HUES}) (?:(?:{'|'.join(SIZES)}) )?({_KINDS})\b")
_PLACE = re.compile(rf"\b({'|'.join(ROWS)}) ({'|'.join(COLUMNS)})\b")


def draw_shape(draw: ImageDraw.ImageDraw, thing: Thing) -> None:
    """Draw a shape around its centre."""
    x, y = thing["x"], thing["y"]
    r = RADIUS[thing["size"]]
    ink = COLOURS[thing["colour"]]
    top, bottom = (x, y - r), (x, y + r)
    left, right = (x - r, y), (x + r, y)
    box = (x - r, y - r, x + r, y + r)
    arm = r // 3
    match thing["shape"]:
        case "circle":
            draw.ellipse(box, fill=ink)
        case "ring":
            draw.ellipse(box, outline=ink, width=arm + 1)
        case "square":
            draw.rectangle(box, fill=ink)
        case "triangle":
            draw.polygon([top, (x - r, y + r), (x + r, y + r)], fill=ink)
        case "diamond":
            draw.polygon([top, left, bottom, right], fill=ink)
        case "cross":
            draw.rectangle((x - arm, y - r, x + arm, y + r), fill=ink)
            draw.rectangle((x - r, y - arm, x + r, y + arm), fill=ink)


def label(things: list[Thing]) -> Labels:
    """Patch labels of all patches whose middle lies within a thing, `[GRID, GRID, 8]`."""
    labels = blank_labels()
    middles = [(number + 0.5) * PATCH_SIZE for number in range(GRID)]
    for thing in things:
        reach = RADIUS[thing["size"]]
        words = {kind: thing[kind] for kind in ("colour", "shape", "size", "row", "column")}
        for y in middles:
            for x in middles:
                if abs(x - thing["x"]) <= reach and abs(y - thing["y"]) <= reach:
                    label_patch(labels, int(x), int(y), **words)
    return labels


def relation(this: Thing, other: Thing) -> str:
    """Position of `this` relative to `other`: "above", "below", "to the left of" or "to the right of"."""
    dx, dy = this["x"] - other["x"], this["y"] - other["y"]
    if abs(dx) > abs(dy):
        return "to the right of" if dx > 0 else "to the left of"
    return "below" if dy > 0 else "above"


def locate(thing: Thing, x: int, y: int) -> Thing:
    """The thing with its centre at `(x, y)`, and the words for that place."""
    row, column = ROWS[y // CELL], COLUMNS[x // CELL]
    return {**thing, "x": x, "y": y, "row": row, "column": column}


def anywhere(rng: Random, size: str) -> tuple[int, int]:
    """Draw a centre for a shape of that size within the picture."""
    first, last = RADIUS[size] + 1, IMAGE_SIZE - RADIUS[size] - 2
    x = rng.randint(first, last)
    y = rng.randint(first, last)
    return x, y


def is_free(x: int, y: int, size: str, others: Iterable[Thing]) -> bool:
    """Whether a centre is far enough from other shapes and from the lines between cells."""
    for value in (x, y):
        if min(value % CELL, -value % CELL) < BORDER:
            return False
    for other in others:
        gap = RADIUS[size] + RADIUS[other["size"]] + 2
        is_near_x = abs(x - other["x"]) <= gap
        is_near_y = abs(y - other["y"]) <= gap
        if is_near_x and is_near_y:
            return False
    return True


def room(rng: Random, size: str, others: Iterable[Thing]) -> tuple[int, int] | None:
    """Draw a centre for a shape of that size; None if it is too close to others or to the lines between cells."""
    x, y = anywhere(rng, size)
    return (x, y) if is_free(x, y, size, others) else None


def scatter(
    rng: Random,
    count: int,
    *,
    colours: Sequence[str] = tuple(COLOURS),
    shapes: Sequence[str] = SHAPES,
    sizes: Sequence[str] = SIZES,
    twins: bool = False,
) -> list[Thing]:
    """Draw `count` shapes that do not touch, in reading order, or fewer if there is no room."""
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
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), BACKGROUNDS[background])
    canvas = ImageDraw.Draw(image)
    for thing in things:
        draw_shape(canvas, thing)
    return image


def key(thing: Thing) -> tuple[str, str]:
    """Colour and shape, which identify a thing in its picture."""
    return thing["colour"], thing["shape"]


def name(thing: Thing) -> str:
    """`"red circle"`."""
    return f"{thing['colour']} {thing['shape']}"


def at(thing: Thing) -> str:
    """`"top left"`."""
    return f"{thing['row']} {thing['column']}"


def named(text: str) -> list[tuple[str, str]]:
    """Colour and shape of all things that a text names by both, in order."""
    return _NAMED.findall(text)


def places(text: str) -> list[tuple[str, str]]:
    """Row and column of all places in a text, in order."""
    return _PLACE.findall(text)
