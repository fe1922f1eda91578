"""Task `existence`: whether a certain shape is in the picture, with a reason; half of them are."""

import re
from random import Random

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import only, overlap, sentences
from saccade.pocket.shapes import Thing, at, key, label, name, places, render, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, SHAPES, a, sentence, shuffled


def suspected(rng: Random, things: list[Thing]) -> tuple[bool, tuple[str, str]]:
    """Draw the colour and form in question; return whether a thing has them, which half do, and both."""
    there = {key(thing) for thing in things}
    present = rng.random() < 0.5
    if present:
        return True, key(rng.choice(things))
    hues, forms = [t["colour"] for t in things], [t["shape"] for t in things]
    mixed = [(hue, form) for hue in hues for form in forms if (hue, form) not in there]
    strangers = [(hue, form) for hue in COLOURS for form in SHAPES if (hue, form) not in there]
    return False, rng.choice(mixed if mixed and rng.random() < 0.7 else strangers)


def paint(rng: Random) -> Picture:
    """Draw a scene and a shape in question: present, a mixture of two things, or another one."""
    background = rng.choice(list(BACKGROUNDS))
    things = scatter(rng, 4)
    present, suspect = suspected(rng, things)
    kin = [thing for thing in things if thing["colour"] == suspect[0] or thing["shape"] == suspect[1]]
    facts = {
        "colour": suspect[0],
        "shape": suspect[1],
        "present": present,
        "reason": kin if len(kin) >= 2 else things,
        "background": background,
    }
    return Picture(render(background, things), facts, label(things))


def _question(rng: Random, facts: Facts) -> str:
    what = a(f"{facts['colour']} {facts['shape']}")
    return sentence(
        rng,
        f"is there {what} in the picture?",
        f"can you see {what} here?",
        f"does this image have {what}?",
        f"is {what} drawn here? Say why.",
    )


def _witness(rng: Random, thing: Thing) -> str:
    colour, shape, size, place = thing["colour"], thing["shape"], thing["size"], at(thing)
    return sentence(
        rng,
        f"a {size} {colour} {shape} is at the {place}.",
        f"at the {place} there is {a(colour)} {shape}, {size}.",
        f"the {shape} at the {place} is {colour} and {size}.",
        f"{place}: {a(colour)} {shape}, {size}.",
        f"in {colour} I see a {size} {shape}, {place}.",
        f"{size} and {colour}, a {shape} sits {place}.",
        f"the {place} has a {size} {shape} in {colour}.",
    )


def verdict(rng: Random, facts: Facts) -> str:
    """A sentence on the presence of the shape alone."""
    what = f"{facts['colour']} {facts['shape']}"
    if facts["present"]:
        return rng.choice(("Yes.", f"Yes, there is {a(what)}.", f"Yes, I can see the {what}.", "Yes, it is."))
    return rng.choice(("No.", f"No, there is no {what}.", f"No {what}.", f"No, I see no {what} here."))


def _dense(rng: Random, facts: Facts) -> str:
    told = [_witness(rng, thing) for thing in shuffled(rng, facts["reason"])]
    said = verdict(rng, facts)
    return " ".join([said, *told] if rng.random() < 0.6 else [*told, said])


def _verbose(rng: Random, facts: Facts) -> str:
    what = f"{facts['colour']} {facts['shape']}"
    opening = f"Yes, there is {a(what)}" if facts["present"] else f"No, there is no {what}"
    told = [f"{opening} in the picture."]
    for i, thing in enumerate(facts["reason"]):
        size, place = thing["size"], at(thing)
        if i == 0:
            told.append(sentence(rng, f"there is a {size} {name(thing)} at the {place}."))
        else:
            told.append(sentence(rng, f"I can also see a {size} {name(thing)} at the {place}."))
    return " ".join(told)


_YES_NO = re.compile(r"\b(yes|no)\b")


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether yes or no is right, and the share of the things in the reason with their places.

    Exactly one sentence has to say yes or no ("No, there is no ring." counts once).
    """
    said = [set(words) for part in sentences(answer) if (words := _YES_NO.findall(part))]
    told = []
    for part in sentences(answer.replace(":", " ")):
        colour, shape, where = only(part, COLOURS), only(part, SHAPES), places(part)
        if colour and shape and len(where) == 1:
            told.append((colour, shape, where[0]))
    true = [(*key(thing), (thing["row"], thing["column"])) for thing in facts["reason"]]
    wanted = "yes" if facts["present"] else "no"
    return {"verdict": float(said == [{wanted}]), "reason": overlap(told, true)}


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.1, decisive=r"(?i)\b(yes|no)\b")
