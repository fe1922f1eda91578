"""Tasks on one picture of scattered shapes: `count`, `detail`, `existence` and `prose`."""

import re
from itertools import pairwise
from random import Random

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import in_order, mentioned, numbers, only, overlap, sentences
from saccade.pocket.shapes import Thing, at, key, label, name, places, relation, render, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, NUMBERS, SHAPES, SIZES, a, plural, shuffled, spoken
from tools.pocket.world.phrases import PHRASES, wordings, words_for

Place = tuple[str, str]
_HUES, _KINDS = "|".join(COLOURS), "|".join(SHAPES)
_PLACED_BESIDE = re.compile(rf"(?:above|below|to the (?:left|right) of|than|as) the (?:{_HUES}) (?:{_KINDS})")
"""Things that others are placed or compared relative to."""


def _picture(background: str, things: list[Thing], facts: Facts) -> Picture:
    return Picture(render(background, things), {**facts, "background": background}, label(things))


# -- count: the number of shapes of a colour, a form or a size, and their places -----------------------------

_count = wordings("count")


def paint_count(rng: Random) -> Picture:
    """Draw three to eight shapes in few colours and forms, and the kind to count."""
    background = rng.choice(list(BACKGROUNDS))
    colours, shapes = rng.sample(list(COLOURS), 3), rng.sample(SHAPES, 3)
    sizes = SIZES if rng.random() < 0.5 else SIZES[:1]
    things = scatter(rng, rng.randint(3, 8), colours=colours[:2], shapes=shapes[:2], sizes=sizes, twins=True)
    # The third colour and form are not in the picture, for counts of zero.
    by = rng.choice(("colour", "shape", "both", "size"))
    absent = rng.random() < 0.1
    kind: dict[str, str] = {}
    if by in ("colour", "both"):
        kind["colour"] = colours[2] if absent else rng.choice(colours[:2])
    if by in ("shape", "both"):
        kind["shape"] = shapes[2] if absent else rng.choice(shapes[:2])
    if by == "size":
        kind["size"] = rng.choice(SIZES)
    counted = [thing for thing in things if all(thing[k] == v for k, v in kind.items())]
    return _picture(background, things, {"asked": kind, "counted": counted, "all": len(things)})


def _kinds(facts: Facts, count: int) -> str:
    kind = facts["asked"]
    words = [kind[k] for k in ("size", "colour") if k in kind]
    return " ".join([*words, plural(kind.get("shape", "shape"), count)])


def total(rng: Random, facts: Facts) -> str:
    """A sentence on the number alone."""
    count = len(facts["counted"])
    return _count(rng, "total", number=NUMBERS[count], kinds=_kinds(facts, count))


def _count_dense(rng: Random, facts: Facts) -> str:
    counted, said = facts["counted"], total(rng, facts)
    which = []
    for thing in shuffled(rng, counted):  # without the properties in the question
        left = [thing[k] for k in ("size", "colour") if k not in facts["asked"]]
        sentence = _count(rng, "which", what=" ".join([*left, thing["shape"]]), place=at(thing))
        which.append(sentence.replace("a orange", "an orange"))
    others = facts["all"] - len(counted)
    if rng.random() < 0.6 or not counted:
        shapes = "shape is" if others == 1 else "shapes are"
        which.append(_count(rng, "rest", number=NUMBERS[others], shapes=shapes))
    if len(counted) < 3:
        which.append(f"The background is {facts['background']}.")
    return " ".join([said, *which] if rng.random() < 0.5 else [*which, said])


def _count_verbose(rng: Random, facts: Facts) -> str:
    counted, count = facts["counted"], len(facts["counted"])
    be = "is" if count == 1 else "are"
    parts = [f"There {be} {NUMBERS[count]} {_kinds(facts, count)} on the {facts['background']} background."]
    for i, thing in enumerate(counted):
        parts.append(_count(rng, "full", opening="the next one" if i else "the first one", **words_for(thing)))
    others = facts["all"] - count
    parts.append(f"The other {NUMBERS[others]} {'shape is' if others == 1 else 'shapes are'} of another kind.")
    return " ".join(parts)


def mark_count(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the count is right, and the share of the counted things with their form and place."""
    which, counts = [], []
    for part in sentences(answer.replace(":", " ")):
        shape, where = only(part, SHAPES), places(part)
        if shape and len(where) == 1:
            which.append((shape, where[0]))
        elif not mentioned(part, ("other",)):
            counts += numbers(part)
    true = [(thing["shape"], (thing["row"], thing["column"])) for thing in facts["counted"]]
    right = counts == [len(true)]
    return {"count": float(right), "which": overlap(which, true) if which or true else float(right)}


# -- existence: whether a certain shape is in the picture, with a reason; half of them are -------------------

_existence = wordings("existence")


def suspected(rng: Random, things: list[Thing]) -> tuple[bool, tuple[str, str]]:
    """Draw the colour and form in question; return whether a thing has them, which half do, and both."""
    there = {key(thing) for thing in things}
    if rng.random() < 0.5:
        return True, key(rng.choice(things))
    hues, forms = [t["colour"] for t in things], [t["shape"] for t in things]
    mixed = [(hue, form) for hue in hues for form in forms if (hue, form) not in there]
    others = [(hue, form) for hue in COLOURS for form in SHAPES if (hue, form) not in there]
    return False, rng.choice(mixed if mixed and rng.random() < 0.7 else others)


def paint_existence(rng: Random) -> Picture:
    """Draw a scene and a shape in question: present, a mixture of two things, or another one."""
    background = rng.choice(list(BACKGROUNDS))
    things = scatter(rng, 4)
    present, (colour, shape) = suspected(rng, things)
    kin = [thing for thing in things if thing["colour"] == colour or thing["shape"] == shape]
    facts = {"colour": colour, "shape": shape, "present": present, "reason": kin if len(kin) >= 2 else things}
    return _picture(background, things, facts)


def verdict(rng: Random, facts: Facts) -> str:
    """A sentence on the presence of the shape alone."""
    what = name(dict(facts))
    return _existence(rng, "yes" if facts["present"] else "no", name=what, a_name=a(what))


def _existence_dense(rng: Random, facts: Facts) -> str:
    reasons = [_existence(rng, "witness", **words_for(thing)) for thing in shuffled(rng, facts["reason"])]
    said = verdict(rng, facts)
    return " ".join([said, *reasons] if rng.random() < 0.6 else [*reasons, said])


def _existence_verbose(rng: Random, facts: Facts) -> str:
    what = name(dict(facts))
    opening = f"Yes, there is {a(what)}" if facts["present"] else f"No, there is no {what}"
    reasons = [_existence(rng, "next" if i else "first", **words_for(t)) for i, t in enumerate(facts["reason"])]
    return " ".join([f"{opening} in the picture.", *reasons])


_YES_NO = re.compile(r"\b(yes|no)\b")


def mark_existence(answer: str, facts: Facts) -> dict[str, float]:
    """Whether yes or no is right, and the share of the things in the reason with their places.

    Exactly one sentence has to say yes or no ("No, there is no ring." counts once).
    """
    verdicts = [set(words) for part in sentences(answer) if (words := _YES_NO.findall(part))]
    reasons = []
    for part in sentences(answer.replace(":", " ")):
        colour, shape, where = only(part, COLOURS), only(part, SHAPES), places(part)
        if colour and shape and len(where) == 1:
            reasons.append((colour, shape, where[0]))
    true = [(*key(thing), (thing["row"], thing["column"])) for thing in facts["reason"]]
    expected = "yes" if facts["present"] else "no"
    return {"verdict": float(verdicts == [{expected}]), "reason": overlap(reasons, true)}


# -- descriptions: one sentence has the place, size, colour and form of one shape ----------------------------


def read_shapes(answer: str) -> list[tuple[str, str, str, Place]]:
    """Colour, form, size and place of every sentence that has each of them once."""
    shapes = []
    for part in sentences(answer):
        colour, shape, size = (only(part, words) for words in (COLOURS, SHAPES, SIZES))
        where = places(part)
        if colour and shape and size and len(where) == 1:
            shapes.append((colour, shape, size, where[0]))
    return shapes


def true_shape(thing: Thing) -> tuple[str, str, str, Place]:
    """Result of `read_shapes` for a correct sentence on the thing."""
    return (*key(thing), thing["size"], (thing["row"], thing["column"]))


def mark_shapes(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the shapes named correctly, and described correctly in all."""
    shapes, true = read_shapes(answer), [true_shape(thing) for thing in facts["things"]]
    return {"named": overlap([s[:2] for s in shapes], [t[:2] for t in true]), "thing": overlap(shapes, true)}


# -- detail: all or some shapes, in the order that the question asks for -------------------------------------

_detail = wordings("detail")
_ORDERS = {
    "from left to right": ("x", False),
    "from right to left": ("x", True),
    "from top to bottom": ("y", False),
    "from bottom to top": ("y", True),
}
_CLEAR = 4  # pixels by which neighbours in an order must differ


def paint_detail(rng: Random) -> Picture:
    """Draw a scene of three to five shapes, a selection of them and an order."""
    background = rng.choice(list(BACKGROUNDS))
    wanted = rng.choice(("all", "all", *SIZES))
    order = rng.choice(list(_ORDERS))
    axis, backwards = _ORDERS[order]
    while True:
        things = scatter(rng, rng.randint(3, 5))
        chosen = [thing for thing in things if wanted in ("all", thing["size"])]
        chosen.sort(key=lambda thing: thing[axis], reverse=backwards)
        if len(chosen) >= 2 and all(abs(one[axis] - two[axis]) >= _CLEAR for one, two in pairwise(chosen)):
            return _picture(background, things, {"things": chosen, "wanted": wanted, "order": order})


def _detail_question(rng: Random, facts: Facts) -> str:
    what = "the shapes" if facts["wanted"] == "all" else f"only the {facts['wanted']} shapes"
    return _detail(rng, "question", what=what, order=facts["order"])


def _step(rng: Random, this: Thing, before: Thing) -> str:
    side, its = relation(this, before), f"the {name(before)}"
    if rng.random() < 0.6:
        return _detail(rng, "side", side=side, its=its)
    if this["size"] == before["size"]:
        return _detail(rng, "same_size", size=this["size"], its=its)
    return f"It is {'larger' if this['size'] == 'large' else 'smaller'} than {its}."


def _detail_dense(rng: Random, facts: Facts) -> str:
    things = facts["things"]
    parts = [_detail(rng, "opening", order=facts["order"], number=NUMBERS[len(things)])]
    for before, thing in zip([None, *things], things, strict=False):
        parts.append(_detail(rng, "shape", **words_for(thing)))
        if before is not None and rng.random() < 0.5:
            parts.append(_step(rng, thing, before))
    return spoken(parts)


def _detail_verbose(rng: Random, facts: Facts) -> str:
    things, which = facts["things"], "" if facts["wanted"] == "all" else f"{facts['wanted']} "
    words = {k: facts[k] for k in ("order", "background")}
    parts = [_detail(rng, "full_opening", number=NUMBERS[len(things)], which=which, **words)]
    for i, thing in enumerate(things):
        parts.append(_detail(rng, "full", opening="next comes" if i else "first there is", **words_for(thing)))
    return " ".join(parts)


def mark_detail(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the selected things named correctly, described correctly in all, and in the right order."""
    plain = _PLACED_BESIDE.sub("", answer.lower()).replace(":", " ")
    order = in_order([shape[:2] for shape in read_shapes(plain)], [key(thing) for thing in facts["things"]])
    return {**mark_shapes(plain, facts), "order": order}


# -- prose: flowing descriptions with a fact every sixth word and many wordings between them -----------------
#
# The words between place, size, colour and form are free: two equally good models often differ in these, which costs
# nothing in quality.

ASIDES: list[str] = PHRASES["prose"]["aside"]


def clauses(rng: Random, *kinds: str, **words: str) -> list[str]:
    """A clause on each kind of fact, in free wording."""
    return [rng.choice(PHRASES["prose"][kind]).format(**words) for kind in kinds]


def flowing(rng: Random, parts: list[str]) -> str:
    """A sentence with those clauses, in any order and wording."""
    lead, subject = (rng.choice(PHRASES["prose"][kind]) for kind in ("lead", "subject"))
    said = f"{lead} {subject} {', '.join(shuffled(rng, parts))}{rng.choice(PHRASES['prose']['tail'])}."
    said = said.replace(", and", " and", 1).strip()
    return said[:1].upper() + said[1:]


def on_shape(rng: Random, thing: Thing) -> str:
    """A flowing sentence on a shape."""
    return flowing(rng, clauses(rng, "place", "size", "colour", "shape", **words_for(thing)))


def plainly_on_shape(thing: Thing) -> str:
    """A sentence on a shape in the fixed wording of the verbose grammar."""
    return (
        f"In the picture there is something at the {at(thing)}, and it is {thing['size']}, and its colour is "
        f"{thing['colour']}, and I know it for a {thing['shape']}."
    )


def paint_prose(rng: Random) -> Picture:
    """Draw a scene of two to four shapes."""
    background = rng.choice(list(BACKGROUNDS))
    things = scatter(rng, rng.randint(2, 4))
    return _picture(background, things, {"things": things})


def _prose_dense(rng: Random, facts: Facts) -> str:
    parts = [rng.choice(ASIDES)] if rng.random() < 0.6 else []
    for thing in shuffled(rng, facts["things"]):
        parts.append(on_shape(rng, thing))
        if rng.random() < 0.4:
            parts.append(rng.choice([aside for aside in ASIDES if aside not in parts]))
    return " ".join(parts)


def _prose_verbose(rng: Random, facts: Facts) -> str:
    return " ".join(["Let me say what I can see in this picture.", *map(plainly_on_shape, facts["things"]), ASIDES[-1]])


_NUMBER = rf"(?i)\b({'|'.join(NUMBERS)})\b"
COUNT = Task(
    paint_count,
    grammars(
        lambda rng, facts: _count(rng, "question", kinds=_kinds(facts, 2)),
        _count_dense,
        _count_verbose,
    ),
    mark_count,
    share=0.1,
    decisive=_NUMBER,
)
EXISTENCE = Task(
    paint_existence,
    grammars(
        lambda rng, facts: _existence(rng, "question", what=a(name(dict(facts)))),
        _existence_dense,
        _existence_verbose,
    ),
    mark_existence,
    share=0.1,
    decisive=r"(?i)\b(yes|no)\b",
)
DETAIL = Task(paint_detail, grammars(_detail_question, _detail_dense, _detail_verbose), mark_detail, share=0.1)
PROSE = Task(
    paint_prose,
    grammars(lambda rng, facts: wordings("prose")(rng, "question"), _prose_dense, _prose_verbose),
    mark_shapes,
    share=0.0,
    longest=384,
)
