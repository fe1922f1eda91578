"""Task `prose`: flowing descriptions with a fact every sixth word and many wordings between them.

A sentence on a shape has its place, size, colour and form once, in any order. The words between them are free: two
equally good models often differ in these, which costs nothing in quality.
"""

from random import Random

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import only, overlap, sentences
from saccade.pocket.shapes import Thing, at, key, label, places, render, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, SHAPES, SIZES, sentence, shuffled

LEADS = (
    "as far as I can see,",
    "now that I look again,",
    "to say it in other words,",
    "let me go on with this:",
    "what I can also see is this:",
    "and then, if you look there,",
    "of all that there is to see here,",
    *[""] * 5,
)
TAILS = (", as you can see", ", or so it looks from here", ", and you will see it, too", *[""] * 7)
ASIDES = (
    "This is how I read it.",
    "There is not much else to say on that.",
    "It is a picture that you can look at for longer.",
    "I will let you know what else there is to see.",
    "What it all stands for, I do not know.",
    "Let me look at the picture again.",
    "So that is how it is with this picture.",
)
_SUBJECTS = (
    "there is something",
    "I can see something",
    "you will find a thing",
    "the picture shows something",
    "we have a shape there",
)


def _clauses(rng: Random, thing: Thing) -> list[str]:
    """Clauses on place, size, colour and form."""
    place, size, colour, shape = at(thing), thing["size"], thing["colour"], thing["shape"]
    return [
        rng.choice(
            (
                f"near the {place}",
                f"at the {place} of the picture",
                f"to be found at the {place}",
                f"which sits at the {place}",
                f"and it has its place at the {place}",
            )
        ),
        rng.choice(
            (
                f"which looks {size}",
                f"and it is {size}",
                f"{size} in size",
                f"that I would call {size}",
                f"and as to its size, {size}",
            )
        ),
        rng.choice(
            (
                f"in {colour}",
                f"drawn in {colour}",
                f"and its colour is {colour}",
                f"and all of it is {colour}",
                f"with {colour} for its colour",
            )
        ),
        rng.choice(
            (
                f"in the shape of a {shape}",
                f"and I know it for a {shape}",
                f"which makes it a {shape}",
                f"so that you can call it a {shape}",
                f"and it has the edges of a {shape}",
            )
        ),
    ]


def flowing(rng: Random, clauses: list[str]) -> str:
    """A sentence with those clauses, in any order and wording."""
    said = f"{rng.choice(LEADS)} {rng.choice(_SUBJECTS)} {', '.join(shuffled(rng, clauses))}{rng.choice(TAILS)}."
    said = said.replace(", and", " and", 1).strip()
    return said[:1].upper() + said[1:]


def on_shape(rng: Random, thing: Thing) -> str:
    """A flowing sentence on a shape."""
    return flowing(rng, _clauses(rng, thing))


def plainly_on_shape(thing: Thing) -> str:
    """A sentence on a shape in the fixed wording of the verbose grammar."""
    return (
        f"In the picture there is something at the {at(thing)}, and it is {thing['size']}, and its colour is "
        f"{thing['colour']}, and I know it for a {thing['shape']}."
    )


def read_shapes(answer: str) -> list[tuple[str, str, str, tuple[str, str]]]:
    """Colour, form, size and place of every sentence that has each of them once."""
    told = []
    for part in sentences(answer):
        colour, shape, size = (only(part, words) for words in (COLOURS, SHAPES, SIZES))
        where = places(part)
        if colour and shape and size and len(where) == 1:
            told.append((colour, shape, size, where[0]))
    return told


def true_shape(thing: Thing) -> tuple[str, str, str, tuple[str, str]]:
    """Result of `read_shapes` for a correct sentence on the thing."""
    return (*key(thing), thing["size"], (thing["row"], thing["column"]))


def paint(rng: Random) -> Picture:
    """Draw a scene of two to four shapes."""
    background = rng.choice(list(BACKGROUNDS))
    things = scatter(rng, rng.randint(2, 4))
    return Picture(render(background, things), {"things": things, "background": background}, label(things))


def _dense(rng: Random, facts: Facts) -> str:
    told = [rng.choice(ASIDES)] if rng.random() < 0.6 else []
    for thing in shuffled(rng, facts["things"]):
        told.append(on_shape(rng, thing))
        if rng.random() < 0.4:
            told.append(rng.choice([aside for aside in ASIDES if aside not in told]))
    return " ".join(told)


def _verbose(rng: Random, facts: Facts) -> str:
    return " ".join(["Let me say what I can see in this picture.", *map(plainly_on_shape, facts["things"]), ASIDES[-1]])


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the shapes named correctly, and described correctly in all."""
    told, true = read_shapes(answer), [true_shape(thing) for thing in facts["things"]]
    return {"named": overlap([t[:2] for t in told], [t[:2] for t in true]), "thing": overlap(told, true)}


def _question(rng: Random, facts: Facts) -> str:
    return sentence(
        rng,
        "write at length about the picture.",
        "tell me in flowing words what you see.",
        "what is there to say about this picture? Take your time.",
        "describe the picture at length, in your own words.",
    )


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.0, longest=384)
