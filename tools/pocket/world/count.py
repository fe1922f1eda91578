"""Task `count`: the number of shapes of a colour, a form or a size, and their places."""

from random import Random

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import mentioned, numbers, only, overlap, sentences
from saccade.pocket.shapes import Thing, at, label, places, render, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, NUMBERS, SHAPES, SIZES, plural, sentence, shuffled

_MOST = 8


def paint(rng: Random) -> Picture:
    """Draw three to eight shapes in few colours and forms, and the kind to count."""
    background = rng.choice(list(BACKGROUNDS))
    colours, shapes = rng.sample(list(COLOURS), 3), rng.sample(SHAPES, 3)
    sizes = SIZES if rng.random() < 0.5 else SIZES[:1]
    things = scatter(rng, rng.randint(3, _MOST), colours=colours[:2], shapes=shapes[:2], sizes=sizes, twins=True)
    # The third colour and form are not in the picture, for counts of zero.
    by = rng.choice(("colour", "shape", "both", "size"))
    absent = rng.random() < 0.1
    asked: dict[str, str] = {}
    if by in ("colour", "both"):
        asked["colour"] = colours[2] if absent else rng.choice(colours[:2])
    if by in ("shape", "both"):
        asked["shape"] = shapes[2] if absent else rng.choice(shapes[:2])
    if by == "size":
        asked["size"] = rng.choice(SIZES)
    counted = [thing for thing in things if all(thing[k] == v for k, v in asked.items())]
    facts = {"asked": asked, "counted": counted, "all": len(things), "background": background}
    return Picture(render(background, things), facts, label(things))


def _kind(facts: Facts, count: int) -> str:
    asked = facts["asked"]
    words = [asked[k] for k in ("size", "colour") if k in asked]
    return " ".join([*words, plural(asked.get("shape", "shape"), count)])


def _question(rng: Random, facts: Facts) -> str:
    kinds = _kind(facts, 2)
    return sentence(
        rng,
        f"how many {kinds} are there?",
        f"count the {kinds}.",
        f"how many {kinds} can you see, and where?",
        f"tell me the number of {kinds} in this image.",
    )


def _which(rng: Random, facts: Facts, thing: Thing) -> str:
    """A sentence on one counted thing, without the properties in the question."""
    left = [thing[k] for k in ("size", "colour") if k not in facts["asked"]]
    what, place = " ".join([*left, thing["shape"]]), at(thing)
    return sentence(
        rng,
        f"a {what}, {place}.",
        f"{place}: a {what}.",
        f"there is a {what} at the {place}.",
        f"the {place} has a {what}.",
        f"at the {place} sits a {what}.",
        f"next, a {what} near the {place}.",
    ).replace("a orange", "an orange")


def total(rng: Random, facts: Facts) -> str:
    """A sentence on the number alone."""
    count = len(facts["counted"])
    number, kinds = NUMBERS[count], _kind(facts, count)
    return sentence(
        rng,
        f"{number} {kinds}.",
        f"that makes {number} {kinds}.",
        f"the count is {number}.",
        f"I count {number} {kinds}.",
        f"{number} in total.",
    )


def _dense(rng: Random, facts: Facts) -> str:
    counted, count = facts["counted"], len(facts["counted"])
    said = total(rng, facts)
    which = [_which(rng, facts, thing) for thing in shuffled(rng, counted)]
    other = facts["all"] - count
    if rng.random() < 0.6 or not count:
        rest = "shape is" if other == 1 else "shapes are"
        which.append(sentence(rng, f"the other {NUMBERS[other]} {rest} of another kind."))
    if count < 3:
        which.append(f"The background is {facts['background']}.")
    return " ".join([said, *which] if rng.random() < 0.5 else [*which, said])


def _verbose(rng: Random, facts: Facts) -> str:
    counted, count = facts["counted"], len(facts["counted"])
    be = "is" if count == 1 else "are"
    told = [f"There {be} {NUMBERS[count]} {_kind(facts, count)} on the {facts['background']} background."]
    for i, thing in enumerate(counted):
        opening = "the first one" if i == 0 else "the next one"
        told.append(
            sentence(rng, f"{opening} is a {thing['size']} {thing['colour']} {thing['shape']} at the {at(thing)}.")
        )
    other = facts["all"] - count
    told.append(f"The other {NUMBERS[other]} {'shape is' if other == 1 else 'shapes are'} of another kind.")
    return " ".join(told)


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the count is right, and the share of the counted things with their form and place."""
    told, counts = [], []
    for part in sentences(answer.replace(":", " ")):
        shape, where = only(part, SHAPES), places(part)
        if shape and len(where) == 1:
            told.append((shape, where[0]))
        elif not mentioned(part, ("other",)):
            counts += numbers(part)
    true = [(thing["shape"], (thing["row"], thing["column"])) for thing in facts["counted"]]
    right = counts == [len(true)]
    return {"count": float(right), "which": overlap(told, true) if told or true else float(right)}


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.1, decisive=rf"(?i)\b({'|'.join(NUMBERS)})\b")
