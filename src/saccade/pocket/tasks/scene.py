"""Task `scene`: two to five coloured shapes on a plain background."""

import re
from collections import Counter
from random import Random

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import mentioned, overlap, sentences
from saccade.pocket.shapes import Thing, anywhere, at, is_free, key, label, locate, name, relation, render
from saccade.pocket.words import (
    BACKGROUNDS,
    COLOURS,
    NUMBERS,
    QUESTIONS,
    ROWS,
    SHAPES,
    SIZES,
    a,
    joined,
    plural,
    sentence,
    shuffled,
    spoken,
)


def _place(rng: Random, things: list[Thing]) -> Thing | None:
    """Draw a shape that touches no other and differs from each in colour or form; None if it does not fit."""
    size = rng.choice(SIZES)
    x, y = anywhere(rng, size)
    new = {"x": x, "y": y, "size": size, "colour": rng.choice(list(COLOURS)), "shape": rng.choice(SHAPES)}
    is_new = all(key(new) != key(other) for other in things)
    return locate(new, x, y) if is_new and is_free(x, y, size, things) else None


def paint(rng: Random) -> Picture:
    """Draw a scene of up to five shapes; its facts list them in reading order."""
    background = rng.choice(list(BACKGROUNDS))
    wanted = rng.randint(2, 5)
    things: list[Thing] = []
    tries = 0
    while len(things) < wanted and (tries < 200 or len(things) < 2):
        tries += 1
        thing = _place(rng, things)
        if thing is not None:
            things.append(thing)
    things.sort(key=lambda thing: (ROWS.index(thing["row"]), thing["x"]))
    return Picture(render(background, things), {"background": background, "things": things}, label(things))


def _comparison(rng: Random, this: Thing, other: Thing) -> str:
    if rng.random() < 0.5:
        comparison = relation(this, other)
    elif this["size"] == other["size"]:
        comparison = "the same size as"
    else:
        comparison = "larger than" if this["size"] == "large" else "smaller than"
    return sentence(rng, f"the {name(this)} is {comparison} the {name(other)}.")


def _dense(rng: Random, facts: Facts) -> str:
    things = shuffled(rng, facts["things"])
    count = NUMBERS[len(things)]
    texts = [sentence(rng, f"{count} shapes.", f"there are {count} shapes.", f"I can see {count} shapes here.", "")]
    for thing in things:
        colour, shape, size = thing["colour"], thing["shape"], thing["size"]
        place = at(thing)
        texts.append(
            sentence(
                rng,
                f"a {size} {colour} {shape}, {place}.",
                f"{place}: {a(colour)} {shape}, {size}.",
                f"the {shape} near the {place} is {colour} and {size}.",
                f"{colour} is the colour of the {size} {shape} at the {place}.",
                f"in {colour}, a {shape} sits {place}; {size}.",
                f"there is a {shape} in the {place} area, {size} and {colour}.",
                f"you will find {a(colour)} {size} {shape} at the {place}.",
                f"next, {place}, one {size} {shape} in {colour}.",
            )
        )
        other = rng.choice(things)
        if other is not thing and rng.random() < 0.45:
            texts.append(_comparison(rng, thing, other))
    tally = Counter(thing["shape"] for thing in things)
    counted = shuffled(rng, [f"{NUMBERS[n]} {plural(shape, n)}" for shape, n in tally.items()])
    texts.append(sentence(rng, "total: ", "by shape: ", "in total ") + joined(counted) + ".")
    return spoken(texts)


def _whereabouts(rng: Random, thing: Thing) -> str:
    row, column = thing["row"], thing["column"]
    if (row, column) == ("middle", "centre"):
        return rng.choice(("in the very middle", "at the centre of the picture"))
    if row == "middle":
        return rng.choice((f"on the {column} side", f"at the {column} edge, halfway down"))
    if column == "centre":
        return rng.choice((f"at the {row} in the centre", f"near the {row} edge"))
    return rng.choice((f"in the {row} {column} corner", f"near the {row} {column}"))


def _verbose(rng: Random, facts: Facts) -> str:
    things, ground = facts["things"], facts["background"]
    count = NUMBERS[len(things)]
    texts = [
        sentence(
            rng,
            f"the image shows {count} shapes on a {ground} background.",
            f"there are {count} shapes drawn on a {ground} background.",
            f"on a {ground} background I can see {count} shapes.",
        )
    ]
    for number, thing in enumerate(things):
        place = _whereabouts(rng, thing)
        shape = f"{thing['size']} {name(thing)}"
        phrasings = [f"{place} there is a {shape}.", f"a {shape} sits {place}."]
        if number:
            before = things[number - 1]
            relative = f"{relation(thing, before)} the {name(before)}"
            phrasings += [f"a {shape} is placed {relative}, {place}.", f"next comes a {shape} {place}."]
        texts.append(sentence(rng, *phrasings))
    tally = Counter(thing["shape"] for thing in things)
    counted = joined([f"{NUMBERS[n]} {plural(shape, n)}" for shape, n in tally.items()])
    texts.append(sentence(rng, f"in total the picture contains {counted}.", f"altogether we have {counted}."))
    return " ".join(texts)


_BESIDE = re.compile(rf"(above|below|to the (left|right) of) the ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})")
_TALLY = re.compile(rf"\b({'|'.join(NUMBERS)}) ({'|'.join(SHAPES)})(?:e?s)?\b")


def _read_things(answer: str) -> list[tuple[str, ...]]:
    """Colour, form, size, row and column, of every sentence that describes one shape."""
    things: list[tuple[str, ...]] = []
    for part in sentences(answer):
        part = _BESIDE.sub("", part)
        colour, shape, size = (mentioned(part, words) for words in (COLOURS, SHAPES, SIZES))
        if len(colour) == len(shape) == len(size) == 1:
            row = (mentioned(part, ("top", "bottom")) or ["middle"])[0]
            column = (mentioned(part, ("left", "right")) or ["centre"])[0]
            things.append((colour[0], shape[0], size[0], row, column))
    return things


def _share_at_places(stated: list[tuple[str, ...]], true: list[tuple[str, ...]], part: int) -> float:
    """Share of the places (the last two parts) for which one part is right."""
    ours = [(thing[part], *thing[3:]) for thing in stated]
    theirs = [(thing[part], *thing[3:]) for thing in true]
    return overlap(ours, theirs)


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the count is right; shares of things with the right colour, form, size and all of them; the tally."""
    stated = _read_things(answer)
    keys = ("colour", "shape", "size", "row", "column")
    true = [tuple(thing[key] for key in keys) for thing in facts["things"]]
    tally = Counter(thing["shape"] for thing in facts["things"])
    return {
        "count": float(len(stated) == len(true)),
        "colour": _share_at_places(stated, true, 0),
        "shape": _share_at_places(stated, true, 1),
        "size": _share_at_places(stated, true, 2),
        "thing": overlap(stated, true),
        "tally": overlap(_TALLY.findall(answer.lower()), [(NUMBERS[n], shape) for shape, n in tally.items()]),
    }


TASK = Task(paint, grammars(QUESTIONS["scene"], _dense, _verbose), mark, share=0.45)
