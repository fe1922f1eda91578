"""Tasks `difference` and `edit`: changes between two pictures, as statements or as instructions."""

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import only, overlap, sentences
from saccade.pocket.shapes import Thing, at, key, locate, name, named, places, render, room, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, NUMBERS, SHAPES, SIZES, a, plural, sentence, shuffled

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


def paint(rng: Random) -> Media:
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


def _change(rng: Random, edit: Edit) -> str:
    """A sentence that states a change."""
    kind, old, new = edit["kind"], edit["before"] or edit["after"], edit["after"] or edit["before"]
    its = f"the {name(old)}"
    told: dict[str, Callable[[], tuple[str, ...]]] = {
        "colour": lambda: (
            f"{its} is {new['colour']} now.",
            f"{its} turns {new['colour']}.",
            f"now {new['colour']}: {its}.",
            f"{new['colour']} is the new colour of {its}.",
            f"the colour of {its} changes to {new['colour']}.",
        ),
        "shape": lambda: (
            f"{its} is a {new['shape']} now.",
            f"{its} turns into a {new['shape']}.",
            f"a {new['shape']} is in the place of {its}.",
            f"now a {new['shape']}: {its}.",
            f"the shape of {its} changes to a {new['shape']}.",
        ),
        "size": lambda: (
            f"{its} is {new['size']} now.",
            f"{its} turns {new['size']}.",
            f"now {new['size']}: {its}.",
            f"{new['size']} is the new size of {its}.",
            f"the size of {its} changes to {new['size']}.",
        ),
        "move": lambda: (
            f"{its} moves to the {at(new)}.",
            f"{its} is at the {at(new)} now.",
            f"now at the {at(new)}: {its}.",
            f"{at(new)} is the new place of {its}.",
            f"the place of {its} changes to the {at(new)}.",
        ),
        "remove": lambda: (
            f"{its} is gone.",
            f"{its} is no longer there.",
            f"I can no longer see {its}.",
            f"there is no {name(old)} now.",
        ),
        "add": lambda: (
            f"{a(name(new))} is new at the {at(new)}, {new['size']}.",
            f"a new {name(new)}, {new['size']}, is at the {at(new)}.",
            f"new at the {at(new)}: a {new['size']} {name(new)}.",
            f"a {new['size']} {name(new)} comes in, {at(new)}.",
        ),
    }
    return sentence(rng, *told[kind]())


def _order(rng: Random, edit: Edit) -> str:
    """A sentence that asks for a change."""
    kind, old, new = edit["kind"], edit["before"] or edit["after"], edit["after"] or edit["before"]
    its = f"the {name(old)}"
    if kind == "move":
        return sentence(
            rng,
            f"move {its} to the {at(new)}.",
            f"put {its} at the {at(new)}.",
            f"to the {at(new)}, move {its}.",
            f"take {its} and put it at the {at(new)}.",
        )
    if kind == "remove":
        return sentence(rng, f"remove {its}.", f"take {its} away.", f"let {its} be gone.")
    if kind == "add":
        what = f"{new['size']} {name(new)}"
        return sentence(
            rng,
            f"add a {what} at the {at(new)}.",
            f"at the {at(new)}, draw a new {what}.",
            f"put in a new {what}, {at(new)}.",
            f"draw {a(name(new))}, {new['size']}, at the {at(new)}: it is new.",
        )
    value = f"a {new['shape']}" if kind == "shape" else new[kind]
    return sentence(
        rng,
        f"make {its} {value}." if kind != "shape" else f"make {its} into {value}.",
        f"change the {kind} of {its} to {value}.",
        f"to {value}, change the {kind} of {its}.",
        f"turn {its} {'into ' if kind == 'shape' else ''}{value}.",
    )


def _stays(rng: Random, thing: Thing) -> str:
    its = f"the {name(thing)}"
    return sentence(rng, f"{its} stays the same.", f"{its} stays.", f"nothing happens to {its}.", f"{its} is the same.")


def _keep(rng: Random, thing: Thing) -> str:
    its = f"the {name(thing)}"
    return sentence(rng, f"keep {its} as it is.", f"{its} stays.", f"leave {its} the same.", f"keep {its}.")


def _dense(speak: Callable[[Random, Edit], str], same: Callable[[Random, Thing], str]) -> Any:
    def answer(rng: Random, facts: Facts) -> str:
        count = len(facts["edits"])
        parts = [speak(rng, edit) for edit in facts["edits"]] + [same(rng, thing) for thing in facts["same"]]
        opening = rng.choice((f"{NUMBERS[count]} {plural('change', count)}.", f"{NUMBERS[count]} in total.", ""))
        told = [opening[:1].upper() + opening[1:], *shuffled(rng, parts)]
        return " ".join(part for part in told if part)

    return answer


def _verbose_difference(rng: Random, facts: Facts) -> str:
    count = len(facts["edits"])
    be = "is one change" if count == 1 else f"are {NUMBERS[count]} changes"
    told = [f"There {be} from the first picture to the second one."]
    told += [_change(rng, edit) for edit in facts["edits"]]
    told += [f"The {name(thing)} stays the same in the second picture." for thing in facts["same"]]
    return " ".join(told)


def _verbose_edit(rng: Random, facts: Facts) -> str:
    told = ["To turn the first picture into the second one, do this."]
    told += [_order(rng, edit) for edit in facts["edits"]]
    told += [f"Keep the {name(thing)} as it is in the first picture." for thing in facts["same"]]
    return " ".join(told)


_KEPT = re.compile(r"\b(stays?|same|keep|leave|nothing)\b")
_GONE = re.compile(r"\b(gone|no longer|there is no|away|remove)\b")
_NEW = re.compile(r"\b(comes in|draw|add|put in|is new|new at|a new)\b")


def _read(answer: str) -> list[tuple[Any, ...]]:
    """Thing, edit and new value, of every sentence that names one thing by colour and form."""
    told: list[tuple[Any, ...]] = []
    for part in sentences(answer.replace(":", " ").replace(",", " ")):
        subjects, where = named(part), places(part)
        if not subjects:
            continue
        subject = subjects[0]
        rest = part.replace(" ".join(subject), " ", 1)
        hue, form, size = only(rest, COLOURS), only(rest, SHAPES), only(rest, SIZES)
        if _KEPT.search(part):
            told.append((subject, "same"))
        elif _GONE.search(part):
            told.append((subject, "remove"))
        elif size and where and _NEW.search(part):
            told.append((subject, "add", size, where[0]))
        elif where:
            told.append((subject, "move", where[0]))
        else:
            told += [(subject, kind, v) for kind, v in (("colour", hue), ("shape", form), ("size", size)) if v]
    return told


def _true(edit: Edit) -> tuple[Any, ...]:
    kind, old, new = edit["kind"], edit["before"], edit["after"]
    if kind == "remove":
        return key(old), kind
    place = new["row"], new["column"]
    if kind == "add":
        return key(new), kind, new["size"], place
    return key(old), kind, place if kind == "move" else new[kind]


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the edits, of the edited things, and of the unchanged things."""
    told = _read(answer)
    true = [_true(edit) for edit in facts["edits"]]
    edits = [fact for fact in told if fact[1] != "same"]
    same = [fact[0] for fact in told if fact[1] == "same"]
    return {
        "edit": overlap(edits, true),
        "which": overlap([fact[0] for fact in edits], [fact[0] for fact in true]),
        "same": overlap(same, [key(thing) for thing in facts["same"]]),
    }


_DIFFERENCE = (
    "What has changed from the first picture to the second?",
    "Spot the differences between the two pictures. What stays?",
    "Two pictures: what is different, and what is the same?",
    "List every change between the two images.",
)
_EDIT = (
    "How do I change the first picture into the second? Say what to keep, too.",
    "Tell me how to make the second picture from the first.",
    "What edits turn the first image into the second?",
    "List the edits between these pictures, and what to keep.",
)


_task = partial(Task, paint=paint, score=mark, share=0.08)
DIFFERENCE = _task(grammars=grammars(_DIFFERENCE, _dense(_change, _stays), _verbose_difference))
EDIT = _task(grammars=grammars(_EDIT, _dense(_order, _keep), _verbose_edit))
