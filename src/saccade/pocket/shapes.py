"""Coloured shapes: draw, place, label and name them, and find them in text."""

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from saccade.pocket.words import (
    BACKGROUNDS,
    COLOURS,
    COLUMNS,
    GRID,
    IMAGE_SIZE,
    PATCH_SIZE,
    ROWS,
    SHAPES,
    SIZES,
    Labels,
    blank_labels,
    label_patch,
)

Thing = dict[str, Any]
"""A shape: `x`, `y` (its centre), `size`, `colour`, `shape`, and the words for its cell, `row` and `column`."""

RADIUS = {"small": 7, "large": 13}
CELL = IMAGE_SIZE // 3
BORDER = 3  # no centre is nearer to the line between two cells, so that its place is never a matter of taste
_HUES, _KINDS = "|".join(COLOURS), "|".join(SHAPES)
_NAMED = re.compile(rf"\b({_HUES}) (?:(?:{'|'.join(SIZES)}) )?({_KINDS})\b")
_PLACE = re.compile(rf"\b({'|'.join(ROWS)}) ({'|'.join(COLUMNS)})\b")
_BESIDE = re.compile(rf"(?:above|below|to the (?:left|right) of|than|as) the (?:{_HUES}) (?:{_KINDS})")


def draw_shape(draw: ImageDraw.ImageDraw, thing: Thing) -> None:
    """Draw a shape around its centre."""
    x, y, r, ink = thing["x"], thing["y"], RADIUS[thing["size"]], COLOURS[thing["colour"]]
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
            draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink)
        case "diamond":
            draw.polygon([(x, y - r), (x - r, y), (x, y + r), (x + r, y)], fill=ink)
        case "cross":
            draw.rectangle((x - arm, y - r, x + arm, y + r), fill=ink)
            draw.rectangle((x - r, y - arm, x + r, y + arm), fill=ink)


def label(things: list[Thing]) -> Labels:
    """Patch labels of all patches whose middle lies within a thing, `[GRID, GRID, 8]`."""
    labels = blank_labels()
    for thing in things:
        reach = RADIUS[thing["size"]]
        for i in range(GRID):
            for j in range(GRID):
                middle_x, middle_y = (j + 0.5) * PATCH_SIZE, (i + 0.5) * PATCH_SIZE
                if max(abs(middle_x - thing["x"]), abs(middle_y - thing["y"])) <= reach:
                    words = {kind: thing[kind] for kind in ("colour", "shape", "size", "row", "column")}
                    label_patch(labels, int(middle_x), int(middle_y), **words)
    return labels


def relation(this: Thing, other: Thing) -> str:
    """Position of `this` relative to `other`: "above", "below", "to the left of" or "to the right of"."""
    dx, dy = this["x"] - other["x"], this["y"] - other["y"]
    if abs(dx) > abs(dy):
        return "to the right of" if dx > 0 else "to the left of"
    return "below" if dy > 0 else "above"


def locate(thing: Thing, x: int, y: int) -> Thing:
    """The thing with its centre at `(x, y)`, and the words for that place."""
    return {**thing, "x": x, "y": y, "row": ROWS[y // CELL], "column": COLUMNS[x // CELL]}


def room(rng: Random, size: str, others: Iterable[Thing]) -> tuple[int, int] | None:
    """Draw a centre for a shape of that size; None if it is too close to others or to the lines between cells."""
    radius = RADIUS[size]
    x, y = (rng.randint(radius + 1, IMAGE_SIZE - radius - 2) for _ in "xy")
    if any(min(v % CELL, -v % CELL) < BORDER for v in (x, y)):
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


def unplaced(text: str) -> str:
    """The text without the things that others are placed or compared relative to."""
    return _BESIDE.sub("", text)
