"""Task `story`: two characters in five pictures; four captions are given and the fifth is the answer.

Pocket drafters are not trained on it, so it represents prompts out of a drafter's distribution.
"""

import re
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from saccade.pocket.sample import IMAGE_MARK, Facts, Grammar, Media, Task
from saccade.pocket.scoring import mentioned, only, overlap, sentences
from saccade.pocket.shapes import RADIUS, Thing, at, locate, name, named, places, relation, render, room
from saccade.pocket.words import COLOURS, NAMES, SIZES, a, sentence, shuffled

PANELS = 5
_SHAPES = ("circle", "square", "triangle", "diamond")  # forms with room for a face
_GROUNDS = {"day": "grey", "night": "dark"}

Panel = dict[str, Any]
"""A picture: `cast` (name -> thing, with `there` False if away), `time`, and `events` since the picture before."""


def _face(image: Image.Image, thing: Thing) -> None:
    """Draw two eyes and a mouth, so that the shape looks like a character."""
    canvas = ImageDraw.Draw(image)
    x, y, r = thing["x"], thing["y"] + RADIUS[thing["size"]] // 4, RADIUS[thing["size"]]
    gap, size = r // 3 + 1, 1 if r < 10 else 2
    for eye in (x - gap, x + gap):
        canvas.rectangle((eye - size + 1, y - size, eye + size - 1, y + size - 1), fill=(0, 0, 0))
    canvas.line([(x - gap, y + gap), (x + gap, y + gap)], fill=(0, 0, 0), width=size)


def draw_panel(panel: Panel) -> Image.Image:
    """Picture of a panel."""
    cast = [thing for thing in panel["cast"].values() if thing["there"]]
    image = render(_GROUNDS[panel["time"]], cast)
    for thing in cast:
        _face(image, thing)
    return image


def _change(rng: Random, cast: dict[str, Thing], who: str) -> dict[str, Any] | None:
    """Draw an event for a character and apply it to the cast; None if there is no room for it."""
    thing = cast[who]
    others = [other for somebody, other in cast.items() if somebody != who and other["there"]]
    if not thing["there"]:
        where = room(rng, thing["size"], others)
        if where is None:
            return None
        cast[who] = {**locate(thing, *where), "there": True}
        return {"who": who, "kind": "back", "value": at(cast[who])}
    kind = rng.choice(("place", "place", "place", "size", "colour", "gone"))
    if kind == "gone":
        if not others:
            return None
        cast[who] = {**thing, "there": False}
        return {"who": who, "kind": kind, "value": ""}
    if kind == "colour":
        taken = [thing["colour"], *(other["colour"] for other in others)]
        new = {**thing, "colour": rng.choice([hue for hue in COLOURS if hue not in taken])}
    else:
        size = SIZES[1 - SIZES.index(thing["size"])] if kind == "size" else thing["size"]
        where = room(rng, size, [thing, *others] if kind == "place" else others)
        if where is None:
            return None
        new = locate({**thing, "size": size}, *where)
        if kind == "size":  # in its place, if there is room
            new = locate(new, thing["x"], thing["y"])
            reach = RADIUS[size] + 1
            inside = all(reach <= new[axis] <= 95 - reach for axis in "xy")
            clear = all(max(abs(new[v] - o[v]) for v in "xy") > reach + RADIUS[o["size"]] for o in others)
            if not inside or not clear:
                return None
        elif at(new) == at(thing):
            return None
    cast[who] = new
    return {"who": who, "kind": kind, "value": at(new) if kind == "place" else new[kind]}


def _next(rng: Random, panel: Panel, names: list[str]) -> Panel:
    """Draw the next panel: events of one or both characters, and sometimes a change of day and night."""
    while True:
        cast = dict(panel["cast"])
        events = [_change(rng, cast, who) for who in (names if rng.random() < 0.5 else [rng.choice(names)])]
        done = [event for event in events if event is not None]
        if done and any(thing["there"] for thing in cast.values()):
            break
    time = panel["time"]
    if rng.random() < 0.3:
        time = "night" if time == "day" else "day"
        done.append({"who": "", "kind": "time", "value": time})
    return {"cast": cast, "time": time, "events": done}


def paint(rng: Random) -> Media:
    """Draw the five panels of a story."""
    names = rng.sample(NAMES, 2)
    cast: dict[str, Thing] = {}
    hues = rng.sample(list(COLOURS), 2)
    for who, hue in zip(names, hues, strict=True):
        while (where := room(rng, "large", cast.values())) is None:
            pass
        look = {"colour": hue, "shape": rng.choice(_SHAPES), "size": "large", "there": True}
        cast[who] = locate(look, *where)
    panels: list[Panel] = [{"cast": cast, "time": rng.choice(list(_GROUNDS)), "events": []}]
    while len(panels) < PANELS:
        panels.append(_next(rng, panels[-1], names))
    return Media({"names": names, "panels": panels}, tuple(draw_panel(panel) for panel in panels))


def _event(rng: Random, who: str, kind: str, value: str) -> str:
    told: tuple[str, ...]
    match kind:
        case "place":
            told = (
                f"{who} goes to the {value}.",
                f"{who} moves to the {value}.",
                f"to the {value} goes {who}.",
                f"now {who} is at the {value}.",
                f"at the {value} we see {who} now.",
                f"{who} runs to the {value}.",
            )
        case "stay":
            told = (
                f"{who} stays at the {value}.",
                f"{who} is still at the {value}.",
                f"still at the {value}: {who}.",
                f"at the {value}, {who} stays.",
                f"{who} does not leave the {value}.",
            )
        case "size" | "colour":
            told = (
                f"{who} is {value} now.",
                f"{who} turns {value}.",
                f"now {value}: {who}.",
                f"{value} is the new {kind} of {who}.",
                f"how {value} {who} is now!",
            )
        case "look":
            told = (
                f"{who} is a {value}.",
                f"{who} looks like a {value}.",
                f"a {value}, that is {who}.",
                f"we see a {value} for {who}.",
                f"{who}: a {value}.",
            )
        case "gone":
            told = (
                f"{who} is gone.",
                f"{who} goes away.",
                f"we no longer see {who}.",
                f"{who} is no longer there.",
            )
        case "back":
            told = (
                f"{who} comes back to the {value}.",
                f"back at the {value}: {who}.",
                f"{who} is back, {value}.",
                f"to the {value} comes {who}, back again.",
            )
        case _:
            told = (f"it is {value} now.", f"the {value} comes.", f"now it is {value}.")
    return sentence(rng, *told).replace("!", ".")


def _told(panel: Panel, names: list[str]) -> list[tuple[str, str, str]]:
    """Who, kind and value of all facts of a caption: events, characters that stay, and everybody's looks."""
    told = [(event["who"], event["kind"], event["value"]) for event in panel["events"]]
    placed = {who for who, kind, _ in told if kind in ("place", "back", "gone")}
    for who in names:
        thing = panel["cast"][who]
        if thing["there"] and who not in placed:
            told.append((who, "stay", at(thing)))
        if thing["there"]:
            told.append((who, "look", f"{thing['size']} {name(thing)}"))
    return told


def _caption(rng: Random, facts: Facts, number: int, verbose: bool) -> str:
    panel, names = facts["panels"][number], facts["names"]
    if number:
        told = _told(panel, names)
        parts = [_event(rng, *fact) for fact in (told if verbose else shuffled(rng, told))]
        one, two = (panel["cast"][who] for who in names)
        if one["there"] and two["there"] and rng.random() < 0.5:
            parts.append(f"{names[0]} is {relation(one, two)} {names[1]}.")
        return " ".join([f"This is what happens in picture {number + 1}.", *parts] if verbose else parts)
    parts = []
    for who in names if verbose else shuffled(rng, names):
        thing = panel["cast"][who]
        what, place = f"{thing['colour']} {thing['shape']}", at(thing)
        parts.append(
            sentence(
                rng,
                f"{who} is {a(what)} at the {place}.",
                f"{a(what)} at the {place}: {who}.",
                f"at the {place} we see {who}, {a(what)}.",
            )
        )
    opening = "This is a story of two friends. " if verbose else ""
    return f"{opening}{' '.join(parts)} It is {panel['time']}."


def _question(verbose: bool) -> Any:
    def question(rng: Random, facts: Facts) -> str:
        pictures = [f"{IMAGE_MARK}{_caption(rng, facts, number, verbose)} " for number in range(PANELS - 1)]
        asked = sentence(
            rng,
            "write the last part of the story.",
            "what happens in the last picture?",
            "how does the story end?",
            "go on with the story.",
        )
        return "".join([*pictures, IMAGE_MARK, asked])

    return question


def _answer(verbose: bool) -> Any:
    return lambda rng, facts: _caption(rng, facts, PANELS - 1, verbose)


_SAID = tuple(who.lower() for who in NAMES)
_KINDS = (
    ("gone", re.compile(r"\b(gone|goes away|no longer)\b")),
    ("back", re.compile(r"\bback\b")),
    ("stay", re.compile(r"\b(stays|still|does not leave)\b")),
)


def _read(answer: str) -> list[tuple[str, str, str]]:
    told = []
    for part in sentences(answer.replace(":", " ").replace(",", " ").replace("!", ".")):
        who, where = only(part, _SAID), [" ".join(place) for place in places(part)]
        kind = next((kind for kind, pattern in _KINDS if pattern.search(part)), None)
        if who is None:
            told += [("", "time", time) for time in mentioned(part, _GROUNDS)]
        elif kind == "gone":
            told.append((who, kind, ""))
        elif where:
            told.append((who, kind or "place", where[0]))
        elif named(part) and mentioned(part, SIZES):
            told.append((who, "look", " ".join([mentioned(part, SIZES)[0], *named(part)[0]])))
        else:
            told += [(who, "size", size) for size in mentioned(part, SIZES)]
            told += [(who, "colour", hue) for hue in mentioned(part, COLOURS)]
    return told


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the places, of the looks, and of all facts."""
    told = _read(answer)
    true = [(who.lower(), kind, value) for who, kind, value in _told(facts["panels"][-1], facts["names"])]
    marks = {}
    for fact, kinds in (("place", ("place", "stay", "back")), ("look", ("look",)), ("all", None)):
        said, right = ([f for f in facts_ if kinds is None or f[1] in kinds] for facts_ in (told, true))
        marks[fact] = overlap(said, right)
    return marks


TASK = Task(
    paint=paint,
    grammars={
        "dense": Grammar(_question(False), _answer(False)),
        "verbose": Grammar(_question(True), _answer(True)),
    },
    score=mark,
    share=0.06,
)
