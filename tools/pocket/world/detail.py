"""Task `detail`: descriptions of all or some shapes, in the order that the question asks for."""

from itertools import pairwise
from random import Random

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import in_order, overlap
from saccade.pocket.shapes import Thing, at, label, name, relation, render, scatter, unplaced
from saccade.pocket.words import BACKGROUNDS, NUMBERS, SIZES, a, sentence
from tools.pocket.world.prose import read_shapes, true_shape

_ORDERS = {
    "from left to right": ("x", False),
    "from right to left": ("x", True),
    "from top to bottom": ("y", False),
    "from bottom to top": ("y", True),
}
_CLEAR = 4  # pixels by which neighbours in an order must differ


def paint(rng: Random) -> Picture:
    """Draw a scene of three to five shapes, a selection of them and an order."""
    background = rng.choice(list(BACKGROUNDS))
    wanted = rng.choice(("all", "all", *SIZES))
    order = rng.choice(list(_ORDERS))
    axis, backwards = _ORDERS[order]
    while True:
        things = scatter(rng, rng.randint(3, 5))
        told = [thing for thing in things if wanted in ("all", thing["size"])]
        told.sort(key=lambda thing: thing[axis], reverse=backwards)
        clear = all(abs(one[axis] - two[axis]) >= _CLEAR for one, two in pairwise(told))
        if len(told) >= 2 and clear:
            break
    facts = {"things": told, "wanted": wanted, "order": order, "background": background}
    return Picture(render(background, things), facts, label(things))


def _question(rng: Random, facts: Facts) -> str:
    order, wanted = facts["order"], facts["wanted"]
    what = "the shapes" if wanted == "all" else f"only the {wanted} shapes"
    return sentence(
        rng,
        f"describe {what} {order}.",
        f"tell me about {what}, {order}.",
        f"{order}, list {what} in detail.",
        f"what can you see {order}? Describe {what}.",
    )


def _step(rng: Random, this: Thing, before: Thing) -> str:
    side, its = relation(this, before), f"the {name(before)}"
    if rng.random() < 0.6:
        return sentence(rng, f"it is {side} {its}.", f"that one lies {side} {its}.", f"{side} {its}, that is.")
    if this["size"] == before["size"]:
        return sentence(rng, f"it is as {this['size']} as {its}.", f"no larger or smaller than {its}.")
    return f"It is {'larger' if this['size'] == 'large' else 'smaller'} than {its}."


def _dense(rng: Random, facts: Facts) -> str:
    things = facts["things"]
    told = [sentence(rng, f"{facts['order']}:", f"{NUMBERS[len(things)]} shapes.", "")]
    before: Thing | None = None
    for thing in things:
        colour, shape, size, place = thing["colour"], thing["shape"], thing["size"], at(thing)
        told.append(
            sentence(
                rng,
                f"a {size} {colour} {shape}, {place}.",
                f"{place}: {a(colour)} {shape}, {size}.",
                f"{a(colour)} {shape} at the {place}; {size}.",
                f"the {shape} at the {place} is {size} and {colour}.",
                f"here is a {size} {shape} in {colour}, {place}.",
                f"{size} and {colour}, a {shape} at the {place}.",
                f"next, {place}, one {size} {shape} in {colour}.",
            )
        )
        if before is not None and rng.random() < 0.5:
            told.append(_step(rng, thing, before))
        before = thing
    return " ".join(part for part in told if part)


def _verbose(rng: Random, facts: Facts) -> str:
    things = facts["things"]
    which = "" if facts["wanted"] == "all" else f"{facts['wanted']} "
    told = [
        sentence(
            rng,
            f"{facts['order']} I can see {NUMBERS[len(things)]} {which}shapes on a {facts['background']} background.",
            f"there are {NUMBERS[len(things)]} {which}shapes, {facts['order']}.",
        )
    ]
    for i, thing in enumerate(things):
        opening = "first there is" if i == 0 else "next comes"
        told.append(sentence(rng, f"{opening} a {thing['size']} {name(thing)} at the {at(thing)}."))
    return " ".join(told)


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the selected things named correctly, described correctly in all, and in the right order."""
    told = read_shapes(unplaced(answer.lower()).replace(":", " "))
    true = [true_shape(thing) for thing in facts["things"]]
    return {
        "named": overlap([t[:2] for t in told], [t[:2] for t in true]),
        "thing": overlap(told, true),
        "order": in_order([t[:2] for t in told], [t[:2] for t in true]),
    }


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.1)
