"""Task `knowledge`: a second turn that needs no picture, with three of a few dozen facts about the real world."""

from itertools import pairwise
from random import Random

from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import mentioned, overlap, sentences
from saccade.pocket.words import DAYS, a, sentence, shuffled
from tools.pocket.world.followup import earlier, second

_CAPITALS = {
    "Egypt": "Cairo",
    "India": "Delhi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "France": "Paris",
    "Italy": "Rome",
}
_LEGS = {"spider": "eight", "ant": "six", "dog": "four", "bird": "two", "snake": "zero"}
_CORNERS = {"triangle": "three", "square": "four", "diamond": "four", "circle": "zero"}
_MIXTURES = {"red and yellow": "orange", "blue and yellow": "green", "red and blue": "purple"}
_ORIGINS = {
    "milk": "cow",
    "ham": "pig",
    "pear": "tree",
    "plum": "tree",
    "fish": "sea",
    "rice": "field",
    "corn": "field",
}
_NEXT = dict(pairwise(DAYS))

_TABLES = {
    "capital": _CAPITALS,
    "legs": _LEGS,
    "corners": _CORNERS,
    "mixture": _MIXTURES,
    "origin": _ORIGINS,
    "day": _NEXT,
}
KNOWN = {(kind, subject): value for kind, table in _TABLES.items() for subject, value in table.items()}
"""All facts: (kind, subject) -> value."""


def paint(rng: Random) -> Media:
    """Draw a first turn and three facts of different kinds."""
    asked = [(kind, rng.choice(sorted(_TABLES[kind]))) for kind in rng.sample(sorted(_TABLES), 3)]
    return second(rng, {"asked": asked})


def _ask(rng: Random, kind: str, subject: str) -> str:
    match kind:
        case "capital":
            asked = (f"what is the capital of {subject}?", f"which town is the capital of {subject}?")
        case "legs":
            asked = (f"how many legs does {a(subject)} have?", f"what is the number of legs of {a(subject)}?")
        case "corners":
            asked = (
                f"how many corners does {a(subject)} have?",
                f"what is the number of corners of {a(subject)}?",
            )
        case "mixture":
            asked = (f"what do {subject} make?", f"which colour do {subject} turn into?")
        case "origin":
            asked = (f"where does {subject} come from?", f"what does {subject} come from?")
        case _:
            asked = (f"which day comes after {subject}?", f"what is the day after {subject}?")
    return sentence(rng, *asked)


def _question(rng: Random, facts: Facts) -> str:
    return " ".join(_ask(rng, kind, subject) for kind, subject in facts["asked"])


def _tell(rng: Random, kind: str, subject: str) -> str:
    value = KNOWN[kind, subject]
    match kind:
        case "capital":
            told = (
                f"{value} is the capital of {subject}.",
                f"the capital of {subject} is {value}.",
                f"{subject} has {value} for its capital.",
                f"for {subject} it is {value}.",
            )
        case "legs" | "corners":
            told = (
                f"{a(subject)} has {value} {kind}.",
                f"{value} {kind} for {a(subject)}.",
                f"the number of {kind} of {a(subject)} is {value}.",
                f"{kind} of {a(subject)}: {value}.",
            )
        case "mixture":
            told = (
                f"{subject} make {value}.",
                f"{value} is what {subject} make.",
                f"you see {value} from {subject} together.",
                f"{subject} turn into {value}.",
            )
        case "origin":
            told = (
                f"{subject} comes from a {value}.",
                f"a {value} is where {subject} comes from.",
                f"you take {subject} from a {value}.",
                f"from a {value} comes {subject}.",
            )
        case _:
            told = (
                f"after {subject} comes {value}.",
                f"{value} comes after {subject}.",
                f"{value} is the day after {subject}.",
                f"the day after {subject} is {value}.",
            )
    return sentence(rng, *told)


def _dense(rng: Random, facts: Facts) -> str:
    return " ".join(_tell(rng, *asked) for asked in shuffled(rng, list(facts["asked"])))


def _verbose(rng: Random, facts: Facts) -> str:
    openings = ("Let me answer every question in order.", "These are the answers to the questions in order.")
    return " ".join([rng.choice(openings), *(_tell(rng, *asked) for asked in facts["asked"])])


_MARKS = {
    "capital": tuple(_CAPITALS),
    "legs": ("legs",),
    "corners": ("corners",),
    "mixture": tuple(_MIXTURES),
    "origin": tuple(_ORIGINS),
    "day": ("after",),
}


def _read(answer: str) -> list[tuple[str, str, str]]:
    """Kind, subject and value of every sentence."""
    told = []
    for part in sentences(answer):
        for kind, table in _TABLES.items():
            if not mentioned(part, [word.lower() for word in _MARKS[kind]]):
                continue
            after = part.split("after")[-1] if kind == "day" and "after" in part else part
            subjects = mentioned(after, [subject.lower() for subject in table])[:1]
            left = part
            for subject in subjects:
                left = left.replace(subject, " ")
            values = mentioned(left, sorted({value.lower() for value in table.values()}))
            if len(subjects) == len(values) == 1:
                told.append((kind, subjects[0], values[0]))
    return told


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Share of the facts stated correctly."""
    true = [(kind, subject.lower(), KNOWN[kind, subject].lower()) for kind, subject in facts["asked"]]
    return {"fact": overlap(_read(answer), true)}


TASK = Task(paint, grammars(_question, _dense, _verbose, earlier), mark, share=0.05)
