"""Task `caption`: one or two sentences on any single picture of the world, with one fixed prompt."""

import re
from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import mentioned, overlap
from saccade.pocket.shapes import name, named
from saccade.pocket.tasks import chart, line, receipt, scene
from saccade.pocket.words import COLOURS, DAYS, GOODS, NAMES, NUMBERS, TOWNS, joined, sentence, shuffled
from tools.pocket.world import document

CAPTION_PROMPT = "Caption this picture."
"""Prompt for captions, also of captioners for drafting with captions."""

_PAINTERS = {
    "scene": (scene.paint, 5),
    "chart": (chart.paint, 2),
    "receipt": (receipt.paint, 2),
    "line": (line.paint, 1),
    "document": (document.paint, 1),
}


def paint(rng: Random) -> Picture:
    """A picture of any kind, scenes most often."""
    kind = rng.choices(list(_PAINTERS), [weight for _, weight in _PAINTERS.values()])[0]
    picture = _PAINTERS[kind][0](rng)
    return Picture(picture.image, {"kind": kind, "of": picture.facts}, picture.labels)


def parts(kind: str, of: Facts) -> list[str]:
    """Contents of a picture, one phrase each."""
    if kind == "scene":
        return [f"a {thing['size']} {name(thing)}" for thing in of["things"]]
    if kind == "chart":
        return [f"{hue} at {NUMBERS[value]}" for hue, value in zip(of["colours"], of["values"], strict=True)]
    if kind == "receipt":
        return [f"{item} for {NUMBERS[price]}" for item, price in zip(of["goods"], of["prices"], strict=True)]
    if kind == "line":
        return [f"{NUMBERS[value]} on {day}" for day, value in zip(DAYS, of["values"], strict=True)]
    if of["kind"] == "trains":
        return [f"{town} at {NUMBERS[hour]}" for town, hour in zip(of["towns"], of["hours"], strict=True)]
    return [f"the day {of['day']}", f"the hour {NUMBERS[of['hour']]}", f"the word {of['bring']}"]


def title(kind: str, of: Facts) -> str:
    """The picture as a whole, in a phrase."""
    if kind == "scene":
        count = NUMBERS[len(of["things"])]
        return f"{count} shapes on a {of['background']} background"
    if kind == "chart":
        return f"a bar chart with {NUMBERS[len(of['values'])]} bars"
    if kind == "receipt":
        return f"a receipt of {of['total']} dollars"
    if kind == "line":
        return f"a line chart in {of['colour']}"
    if of["kind"] == "trains":
        return f"a table of {NUMBERS[len(of['towns'])]} trains"
    return f"a note from {of['from']} to {of['to']}"


def _dense(rng: Random, facts: Facts) -> str:
    kind, of = facts["kind"], facts["of"]
    whole, listed = title(kind, of), joined(shuffled(rng, parts(kind, of)))
    return sentence(
        rng,
        f"{whole}: {listed}.",
        f"{whole} with {listed}.",
        f"{listed}: {whole}.",
        f"{whole}. I can see {listed}.",
        f"{listed} are in {whole}.",
    )


def _verbose(rng: Random, facts: Facts) -> str:
    kind, of = facts["kind"], facts["of"]
    opening = sentence(rng, f"this is a picture of {title(kind, of)}.", f"the picture shows {title(kind, of)}.")
    return f"{opening} In it there are {joined(parts(kind, of))}."


_KINDS = {
    "scene": r"\bshapes on\b",
    "chart": r"\bbar chart\b",
    "receipt": r"\breceipt\b",
    "line": r"\bline chart\b",
    "document": r"\b(trains|note)\b",
}


def _pairs(answer: str, first: tuple[str, ...], link: str, second: tuple[str, ...]) -> list[Any]:
    return re.findall(rf"\b({'|'.join(first)}) {link} ({'|'.join(second)})\b", answer)


def content(answer: str, kind: str, of: Facts) -> list[Any]:
    """Contents of a picture of that kind in a caption."""
    answer = answer.lower()
    towns, days = (tuple(word.lower() for word in words) for words in (TOWNS, DAYS))
    if kind == "scene":
        return named(answer)
    if kind == "chart":
        return _pairs(answer, tuple(COLOURS), "at", NUMBERS)
    if kind == "receipt":
        return _pairs(answer, GOODS, "for", NUMBERS)
    if kind == "line":
        return _pairs(answer, NUMBERS, "on", days)
    if of["kind"] == "trains":
        return _pairs(answer, towns, "at", NUMBERS)
    names = tuple(word.lower() for word in NAMES)
    told = _pairs(answer, names, "to", names)
    return [*(told[0] if told else ()), *mentioned(answer, (*days, *GOODS, *NUMBERS))]


def kinds(answer: str) -> list[str]:
    """Kinds of picture that a caption names."""
    return [kind for kind, pattern in _KINDS.items() if re.search(pattern, answer.lower())]


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the kind of picture is right, and the share of its contents in the caption."""
    kind, of = facts["kind"], facts["of"]
    perfect = f"{title(kind, of)}: {joined(parts(kind, of))}"
    true = content(perfect, kind, of)
    return {"kind": float(kinds(answer) == [kind]), "content": overlap(content(answer, kind, of), true)}


TASK = Task(paint, grammars((CAPTION_PROMPT,), _dense, _verbose), mark, share=0.1)
