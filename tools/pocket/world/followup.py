"""Task `followup`: the first answer again, sorted or selected; and the first turns of all second turns."""

from collections.abc import Mapping
from itertools import pairwise
from random import Random

from PIL import Image

from saccade.pocket.sample import Facts, Media, Task, draw, grammars
from saccade.pocket.scoring import in_order, mentioned, numbers, overlap, sentences
from saccade.pocket.shapes import at, name, named, places
from saccade.pocket.words import COLOURS, GOODS, NUMBERS, SIZES, difference, joined, sentence, shuffled

FIRST_TASKS = ("chart", "receipt", "scene")
_FIRST_SEED, _LAST_SEED = 10**6, 2**48  # not the seeds of tests and evaluation

Earlier = Mapping[str, int | str]


def start(rng: Random) -> tuple[Image.Image, Facts, Earlier]:
    """Draw a first turn; return its picture, its facts, and its task and seed."""
    task = rng.choice(FIRST_TASKS)
    seed = rng.randrange(_FIRST_SEED, _LAST_SEED)
    sample = draw(seed, task)
    return sample.image, sample.facts, {"task": task, "seed": seed}


def earlier(grammar: str, facts: Facts) -> tuple[tuple[str, str], ...]:
    """The first turn, in the grammar of the second."""
    first = facts["first"]
    sample = draw(first["seed"], first["task"], grammar)
    return ((sample.question, sample.answer),)


def second(rng: Random, facts: Facts) -> Media:
    """Draw a first turn for a second one that does not need its picture."""
    image, _, first = start(rng)
    return Media({**facts, "first": first}, (image,))


_CLEAR = 4  # pixels by which shapes sorted from left to right must differ
_NOUNS = {"scene": "shapes", "chart": "bars", "receipt": "items"}


def paint(rng: Random) -> Media:
    """Draw a first turn and a part of it: (what, value) pairs, in order if sorted."""
    while True:
        image, facts, first = start(rng)
        task = str(first["task"])
        sort = rng.random() < 0.5
        if task == "scene":
            things = sorted(facts["things"], key=lambda thing: thing["x"])
            if any(two["x"] - one["x"] < _CLEAR for one, two in pairwise(things)):
                continue
            how = rng.choice(("from left to right", "from right to left") if sort else SIZES)
            things = things[::-1] if how == "from right to left" else things
            told = [(name(thing), at(thing)) for thing in things if sort or thing["size"] == how]
            rest = [name(thing) for thing in things if not sort and thing["size"] != how]
        else:
            words, values = ("colours", "values") if task == "chart" else ("goods", "prices")
            pairs = sorted(zip(facts[words], facts[values], strict=True), key=lambda pair: pair[1])
            how = rng.choice(("from low to high", "from high to low")) if sort else NUMBERS[rng.randint(1, 6)]
            pairs = pairs[::-1] if how == "from high to low" else pairs
            told = [(what, NUMBERS[value]) for what, value in pairs if sort or value > NUMBERS.index(how)]
            rest = [what for what, value in pairs if not sort and value <= NUMBERS.index(how)]
        if told:
            return Media({"first": first, "sort": sort, "how": how, "told": told, "rest": rest}, (image,))


def _question(rng: Random, facts: Facts) -> str:
    nouns, how = _NOUNS[facts["first"]["task"]], facts["how"]
    if facts["sort"]:
        return sentence(
            rng,
            f"now sort the {nouns} {how}.",
            f"tell me the same {nouns} again, {how}.",
            f"and what are the {nouns} {how}?",
        )
    which = f"the {how} {nouns}" if facts["first"]["task"] == "scene" else f"{nouns} of more than {how}"
    return sentence(rng, f"now list only {which}.", f"which of those are {which}?", f"and only {which}?")


def _again(rng: Random, what: str, value: str) -> str:
    return sentence(
        rng,
        f"the {what} at {value}.",
        f"{value}: the {what}.",
        f"{value} has the {what}.",
        f"{what}, {value}.",
        f"then the {what}, {value}.",
        f"there is the {what} at {value}.",
        f"I said {value} for the {what}.",
    )


def _closing(rng: Random, facts: Facts) -> str:
    """A sentence that follows from the list: its ends and their distance, or the things not in it."""
    told, nouns = facts["told"], _NOUNS[facts["first"]["task"]]
    if not facts["sort"]:
        rest = joined([f"the {what}" for what in facts["rest"]]) if facts["rest"] else "there are none"
        return sentence(rng, f"the other {nouns}: {rest}.", f"not in the list: {rest}.")
    ends = f"the {told[0][0]} is the first and the {told[-1][0]} the last"
    if facts["first"]["task"] == "scene":
        return sentence(rng, f"{ends}.")
    apart = difference(NUMBERS.index(told[-1][1]), NUMBERS.index(told[0][1]))
    return sentence(rng, f"{ends}.", f"the last is {apart} the first.", f"{ends}, and that is {apart} it.")


def _dense(rng: Random, facts: Facts) -> str:
    told = facts["told"] if facts["sort"] else shuffled(rng, list(facts["told"]))
    count, how = NUMBERS[len(told)], facts["how"]
    if facts["sort"]:
        opening = rng.choice((f"{how}:", f"these are the {count}, {how}.", "in that order:"))
    else:
        opening = rng.choice((f"{count} of them.", f"that leaves {count}.", f"only {count}."))
    return " ".join([sentence(rng, opening), *(_again(rng, *pair) for pair in told), _closing(rng, facts)])


def _verbose(rng: Random, facts: Facts) -> str:
    task, count = facts["first"]["task"], len(facts["told"])
    told = [f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} of the {_NOUNS[task]} to tell you about."]
    place = "at the" if task == "scene" else "at"
    for i, (what, value) in enumerate(facts["told"]):
        told.append(f"{'First comes' if i == 0 else 'Next comes'} the {what} {place} {value}.")
    return " ".join([*told, _closing(rng, facts)])


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the selected things with their values, and in the right order if there is one."""
    told = []
    scene = facts["first"]["task"] == "scene"
    for part in sentences(answer.replace(":", " ").replace(",", " ")):
        if "other" in part or "not in" in part or "the first" in part:
            continue
        if scene:
            whats, values = (
                [" ".join(pair) for pair in named(part)],
                [" ".join(pair) for pair in places(part)],
            )
        else:
            whats = mentioned(part, (*COLOURS, *GOODS))
            values = [NUMBERS[value] for value in numbers(part)]
        if len(whats) == 1 and values:
            told.append((whats[0], values[-1] if scene else values[0]))
    true = [(what, value) for what, value in facts["told"]]
    items = overlap(told, true)
    # Equal values may come in either order, hence the order of the values.
    place = 0 if scene else 1
    order = in_order([pair[place] for pair in told], [pair[place] for pair in true])
    return {"items": items, "order": order if facts["sort"] else items}


TASK = Task(paint, grammars(_question, _dense, _verbose, earlier), mark, share=0.08)
