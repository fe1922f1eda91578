"""Tasks on changes: `difference` and `edit` between two pictures, and `story` over five."""

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from saccade.pocket.sample import IMAGE_MARK, Facts, Grammar, Media, Task, grammars
from saccade.pocket.scoring import mentioned, only, overlap, sentences
from saccade.pocket.shapes import RADIUS, Thing, at, key, locate, name, named, places, relation, render, room, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, NAMES, NUMBERS, SHAPES, SIZES, a, plural, shuffled, spoken
from tools.pocket.world.phrases import PHRASES, wordings

# -- difference and edit: one to three changes, as statements or as instructions -----------------------------

Edit = dict[str, Any]
_KINDS = ("colour", "shape", "size", "move", "remove", "add")


def _edited(rng: Random, kind: str, thing: Thing, scene: list[Thing]) -> Thing | None:
    """The thing after an edit; None if there is no room or its name is taken."""
    others = [other for other in scene if other is not thing]
    new = dict(thing)
    if kind == "colour":
        new["colour"] = rng.choice([hue for hue in COLOURS if hue != thing["colour"]])
    elif kind == "shape":
        new["shape"] = rng.choice([form for form in SHAPES if form != thing["shape"]])
    elif kind == "size":
        new["size"] = SIZES[1 - SIZES.index(thing["size"])]
        reach = 15 if new["size"] == "large" else 0  # a larger one must stay inside the picture and off the others
        if any(not reach <= thing[axis] <= 95 - reach for axis in "xy"):
            return None
        if reach and any(max(abs(thing[axis] - o[axis]) for axis in "xy") <= 30 for o in others):
            return None
    else:
        where = room(rng, thing["size"], scene)
        if where is None:
            return None
        new = locate(new, *where)
        if kind == "move" and at(new) == at(thing):
            return None
    return None if any(key(new) == key(other) for other in others) else new


def paint_pair(rng: Random) -> Media:
    """Draw a scene of three or four shapes, and a copy with one to three edits."""
    background = rng.choice(list(BACKGROUNDS))
    first = scatter(rng, rng.randint(3, 4))
    while len(first) < 3:
        first = scatter(rng, 3)
    scene, untouched = list(first), list(first)
    edits: list[Edit] = []
    wanted = rng.randint(1, 3)
    for _ in range(60):
        if len(edits) == wanted:
            break
        kind = rng.choice(_KINDS)
        if kind == "add":
            new = scatter(rng, 1)[0]
            placed = _edited(rng, kind, new, scene)
            if placed is not None and all(key(placed) != key(thing) for thing in (*scene, *first)):
                scene.append(placed)
                edits.append({"kind": kind, "before": None, "after": placed})
            continue
        if len(untouched) < 2:  # at least one thing stays unchanged
            continue
        thing = rng.choice(untouched)
        after = None if kind == "remove" else _edited(rng, kind, thing, scene)
        if kind != "remove" and (after is None or any(key(after) == key(o) for o in first if o is not thing)):
            continue
        untouched.remove(thing)
        scene.remove(thing)
        scene += [after] if after else []
        edits.append({"kind": kind, "before": thing, "after": after})
    facts = {"edits": edits, "same": untouched, "background": background}
    return Media(facts, (render(background, first), render(background, scene)))


def _change(say: Callable[..., str], rng: Random, edit: Edit) -> str:
    """A sentence that states a change, or asks for it."""
    old, new = edit["before"] or edit["after"], edit["after"] or edit["before"]
    words = {"its": f"the {name(old)}", "old": name(old), "new": new, "name": name(new), "a_name": a(name(new))}
    return say(rng, edit["kind"], place=at(new), **words)


def _dense_pair(task: str, rng: Random, facts: Facts) -> str:
    say, count = wordings(task), len(facts["edits"])
    parts = [_change(say, rng, edit) for edit in facts["edits"]]
    parts += [say(rng, "same", its=f"the {name(thing)}") for thing in facts["same"]]
    opening = say(rng, "opening", count=NUMBERS[count], changes=plural("change", count))
    return spoken([opening, *shuffled(rng, parts)])


def _verbose_pair(task: str, rng: Random, facts: Facts) -> str:
    count, is_edit = len(facts["edits"]), task == "edit"
    changes = "is one change" if count == 1 else f"are {NUMBERS[count]} changes"
    opening = f"There {changes} from the first picture to the second one."
    parts = ["To turn the first picture into the second one, do this." if is_edit else opening]
    parts += [_change(wordings(task), rng, edit) for edit in facts["edits"]]
    same = "Keep the {} as it is in the first picture." if is_edit else "The {} stays the same in the second picture."
    return " ".join([*parts, *(same.format(name(thing)) for thing in facts["same"])])


_KEPT = re.compile(r"\b(stays?|same|keep|leave|nothing)\b")
_GONE = re.compile(r"\b(gone|no longer|there is no|away|remove)\b")
_NEW = re.compile(r"\b(comes in|draw|add|put in|is new|new at|a new)\b")


def _read_changes(answer: str) -> list[tuple[Any, ...]]:
    """Thing, edit and new value, of every sentence that names one thing by colour and form."""
    changes: list[tuple[Any, ...]] = []
    for part in sentences(answer.replace(":", " ").replace(",", " ")):
        subjects, where = named(part), places(part)
        if not subjects:
            continue
        subject = subjects[0]
        rest = part.replace(" ".join(subject), " ", 1)
        values = {"colour": only(rest, COLOURS), "shape": only(rest, SHAPES), "size": only(rest, SIZES)}
        if _KEPT.search(part):
            changes.append((subject, "same"))
        elif _GONE.search(part):
            changes.append((subject, "remove"))
        elif values["size"] and where and _NEW.search(part):
            changes.append((subject, "add", values["size"], where[0]))
        elif where:
            changes.append((subject, "move", where[0]))
        else:
            changes += [(subject, kind, value) for kind, value in values.items() if value]
    return changes


def _true_change(edit: Edit) -> tuple[Any, ...]:
    kind, old, new = edit["kind"], edit["before"], edit["after"]
    if kind == "remove":
        return key(old), kind
    place = new["row"], new["column"]
    if kind == "add":
        return key(new), kind, new["size"], place
    return key(old), kind, place if kind == "move" else new[kind]


def mark_pair(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the edits, of the edited things, and of the unchanged things."""
    changes, true = _read_changes(answer), [_true_change(edit) for edit in facts["edits"]]
    edits = [change for change in changes if change[1] != "same"]
    same = [change[0] for change in changes if change[1] == "same"]
    return {
        "edit": overlap(edits, true),
        "which": overlap([edit[0] for edit in edits], [edit[0] for edit in true]),
        "same": overlap(same, [key(thing) for thing in facts["same"]]),
    }


DIFFERENCE, EDIT = (
    Task(
        paint_pair,
        grammars(tuple(PHRASES[task]["questions"]), partial(_dense_pair, task), partial(_verbose_pair, task)),
        mark_pair,
        share=0.08,
    )
    for task in ("difference", "edit")
)

# -- story: two characters in five pictures; four captions are in the question and the fifth is the answer ---
#
# Pocket drafters are not trained on it, so it represents prompts out of a drafter's distribution.

_story = wordings("story")
PANELS = 5
_GROUNDS = {"day": "grey", "night": "dark"}

Panel = dict[str, Any]
"""A picture: `cast` (name -> thing, with `there` False if away), `time`, and `events` since the picture before."""


def draw_panel(panel: Panel) -> Image.Image:
    """Picture of a panel, with two eyes and a mouth on every shape, so that it looks like a character."""
    cast = [thing for thing in panel["cast"].values() if thing["there"]]
    image = render(_GROUNDS[panel["time"]], cast)
    canvas = ImageDraw.Draw(image)
    for thing in cast:
        x, y, r = thing["x"], thing["y"] + RADIUS[thing["size"]] // 4, RADIUS[thing["size"]]
        gap, size = r // 3 + 1, 1 if r < 10 else 2
        for eye in (x - gap, x + gap):
            canvas.rectangle((eye - size + 1, y - size, eye + size - 1, y + size - 1), fill=(0, 0, 0))
        canvas.line([(x - gap, y + gap), (x + gap, y + gap)], fill=(0, 0, 0), width=size)
    return image


def _happen(rng: Random, cast: dict[str, Thing], who: str) -> dict[str, Any] | None:
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
        events = [_happen(rng, cast, who) for who in (names if rng.random() < 0.5 else [rng.choice(names)])]
        done = [event for event in events if event is not None]
        if done and any(thing["there"] for thing in cast.values()):
            break
    time = panel["time"]
    if rng.random() < 0.3:
        time = "night" if time == "day" else "day"
        done.append({"who": "", "kind": "time", "value": time})
    return {"cast": cast, "time": time, "events": done}


def paint_story(rng: Random) -> Media:
    """Draw the five panels of a story."""
    names = rng.sample(NAMES, 2)
    cast: dict[str, Thing] = {}
    hues = rng.sample(list(COLOURS), 2)
    for who, hue in zip(names, hues, strict=True):
        while (where := room(rng, "large", cast.values())) is None:
            pass
        shape = rng.choice(("circle", "square", "triangle", "diamond"))  # forms with room for a face
        cast[who] = locate({"colour": hue, "shape": shape, "size": "large", "there": True}, *where)
    panels: list[Panel] = [{"cast": cast, "time": rng.choice(list(_GROUNDS)), "events": []}]
    while len(panels) < PANELS:
        panels.append(_next(rng, panels[-1], names))
    return Media({"names": names, "panels": panels}, tuple(draw_panel(panel) for panel in panels))


def _panel_facts(panel: Panel, names: list[str]) -> list[tuple[str, str, str]]:
    """Who, kind and value of all facts of a caption: events, characters that stay, and everybody's looks."""
    facts = [(event["who"], event["kind"], event["value"]) for event in panel["events"]]
    placed = {who for who, kind, _ in facts if kind in ("place", "back", "gone")}
    for who in names:
        thing = panel["cast"][who]
        if thing["there"] and who not in placed:
            facts.append((who, "stay", at(thing)))
        if thing["there"]:
            facts.append((who, "look", f"{thing['size']} {name(thing)}"))
    return facts


def _panel_caption(rng: Random, facts: Facts, number: int, verbose: bool) -> str:
    panel, names = facts["panels"][number], facts["names"]
    if number:
        listed = _panel_facts(panel, names)
        parts = [_story(rng, k, who=w, value=v) for w, k, v in (listed if verbose else shuffled(rng, listed))]
        one, two = (panel["cast"][who] for who in names)
        if one["there"] and two["there"] and rng.random() < 0.5:
            parts.append(f"{names[0]} is {relation(one, two)} {names[1]}.")
        return " ".join([f"This is what happens in picture {number + 1}.", *parts] if verbose else parts)
    parts = []
    for who in names if verbose else shuffled(rng, names):
        thing = panel["cast"][who]
        parts.append(_story(rng, "first", who=who, what=a(name(thing)), place=at(thing)))
    opening = "This is a story of two friends. " if verbose else ""
    return f"{opening}{' '.join(parts)} It is {panel['time']}."


def _story_grammar(verbose: bool) -> Grammar:
    def question(rng: Random, facts: Facts) -> str:
        pictures = [f"{IMAGE_MARK}{_panel_caption(rng, facts, number, verbose)} " for number in range(PANELS - 1)]
        return "".join([*pictures, IMAGE_MARK, _story(rng, "question")])

    return Grammar(question, lambda rng, facts: _panel_caption(rng, facts, PANELS - 1, verbose))


_EVENTS = (
    ("gone", re.compile(r"\b(gone|goes away|no longer)\b")),
    ("back", re.compile(r"\bback\b")),
    ("stay", re.compile(r"\b(stays|still|does not leave)\b")),
)


def _read_story(answer: str) -> list[tuple[str, str, str]]:
    """Who, kind and value, as of `_panel_facts`."""
    facts = []
    for part in sentences(answer.replace(":", " ").replace(",", " ").replace("!", ".")):
        who, where = only(part, [who.lower() for who in NAMES]), [" ".join(place) for place in places(part)]
        kind = next((kind for kind, pattern in _EVENTS if pattern.search(part)), None)
        if who is None:
            facts += [("", "time", time) for time in mentioned(part, _GROUNDS)]
        elif kind == "gone":
            facts.append((who, kind, ""))
        elif where:
            facts.append((who, kind or "place", where[0]))
        elif named(part) and mentioned(part, SIZES):
            facts.append((who, "look", " ".join([mentioned(part, SIZES)[0], *named(part)[0]])))
        else:
            facts += [(who, "size", size) for size in mentioned(part, SIZES)]
            facts += [(who, "colour", hue) for hue in mentioned(part, COLOURS)]
    return facts


def mark_story(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the places, of the looks, and of all facts."""
    stated, true = _read_story(answer), _panel_facts(facts["panels"][-1], facts["names"])
    true = [(who.lower(), kind, value) for who, kind, value in true]

    def share(*kinds: str) -> float:
        return overlap(*([fact for fact in each if fact[1] in kinds or not kinds] for each in (stated, true)))

    return {"place": share("place", "stay", "back"), "look": share("look"), "all": share()}


STORY = Task(paint_story, {"dense": _story_grammar(False), "verbose": _story_grammar(True)}, mark_story, share=0.06)
