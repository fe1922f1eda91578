"""Tasks that take steps: `vet` on a picture, and the second turns `followup`, `arithmetic` and `knowledge`."""

import re
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

from PIL import Image

from saccade.pocket.sample import Facts, Media, Picture, Task, draw, grammars
from saccade.pocket.scoring import CONCLUSION, in_order, mentioned, numbers, overlap, sentences
from saccade.pocket.shapes import at, name, named, places, relation
from saccade.pocket.tasks import chart, receipt, scene
from saccade.pocket.words import (
    COLOURS,
    GOODS,
    NAMES,
    NUMBERS,
    SHAPES,
    SIZES,
    TOWNS,
    a,
    difference,
    joined,
    plural,
    sentence,
    shuffled,
)
from tools.pocket.world import pictures
from tools.pocket.world.phrases import PHRASES, wordings

# -- vet: questions that need several skills (reading, arithmetic, places, comparing), answered with steps ---

_vet = wordings("vet")
_EDGES = {"furthest left": ("x", 1), "furthest right": ("x", -1), "highest": ("y", 1), "lowest": ("y", -1)}
_CLEAR = 6  # pixels between the shape in question and the next one, so that the answer is unambiguous

QuestionFacts = dict[str, Any]  # facts of a question; `steps` are the (subject, value) pairs on the way to the result


def _sum_of_bars(rng: Random) -> tuple[Picture, QuestionFacts]:
    picture = chart.paint(rng)
    hues, values = picture.facts["colours"], picture.facts["values"]
    one, two = chosen = rng.sample(range(len(hues)), 2)
    steps = [(hues[i], NUMBERS[values[i]]) for i in chosen]
    aside = f"{hues[one]} is {difference(values[one], values[two])} {hues[two]}."
    return picture, {"kind": "bars", "steps": steps, "aside": aside, "result": NUMBERS[values[one] + values[two]]}


def _high_bars(rng: Random) -> tuple[Picture, QuestionFacts]:
    while True:
        picture = chart.paint(rng)
        bound = rng.randint(2, 6)
        bars = list(zip(picture.facts["colours"], picture.facts["values"], strict=True))
        steps = [(hue, NUMBERS[value]) for hue, value in bars if value > bound]
        others = [f"{hue} at {NUMBERS[value]}" for hue, value in bars if value <= bound]
        if steps and others:
            aside = f"{'other bar is' if len(others) == 1 else 'other bars are'} lower: {joined(others)}."
            facts = {"kind": "above", "bound": NUMBERS[bound], "steps": steps, "aside": f"the {aside}"}
            return picture, {**facts, "result": NUMBERS[len(steps)]}


def _shopping(rng: Random) -> tuple[Picture, QuestionFacts]:
    picture = receipt.paint(rng)
    goods, prices = picture.facts["goods"], picture.facts["prices"]
    i, j = rng.sample(range(len(goods)), 2)
    steps = [(goods[i], NUMBERS[prices[i]]), (goods[j], NUMBERS[prices[j]])]
    total = prices[i] + prices[j]
    if rng.random() < 0.5:
        aside = f"the {goods[i]} costs {difference(prices[i], prices[j])} the {goods[j]}."
        return picture, {"kind": "cost", "steps": steps, "aside": aside, "result": NUMBERS[total]}
    # Half of the budgets suffice, with zero to three dollars left; the others are one to three dollars short.
    purse = min(total + rng.randint(0, 3), 18) if rng.random() < 0.5 else max(total - rng.randint(1, 3), 1)
    aside = f"the {goods[i]} and the {goods[j]} cost {NUMBERS[total]} together."
    facts = {"kind": "budget", "purse": NUMBERS[purse], "steps": steps, "aside": aside}
    return picture, {**facts, "result": "yes" if purse >= total else "no"}


def _extreme_shape(rng: Random) -> tuple[Picture, QuestionFacts]:
    while True:
        picture = scene.paint(rng)
        edge = rng.choice(list(_EDGES))
        axis, sign = _EDGES[edge]
        first, second, *_ = sorted(picture.facts["things"], key=lambda thing: sign * thing[axis])
        if abs(first[axis] - second[axis]) >= _CLEAR:
            steps = [(thing["shape"], at(thing)) for thing in (first, second)]
            aside = f"the {name(first)} is {relation(first, second)} the {name(second)}."
            return picture, {"kind": "edge", "edge": edge, "steps": steps, "aside": aside, "result": name(first)}


def _first_train(rng: Random) -> tuple[Picture, QuestionFacts]:
    while True:
        picture = pictures.paint_document(rng)
        if picture.facts["kind"] != "trains":
            continue
        hours = dict(zip(picture.facts["towns"], picture.facts["hours"], strict=True))
        i, j = rng.sample(list(hours), 2)
        steps = [(town, NUMBERS[hours[town]]) for town in (i, j)]
        aside = f"{i} is {difference(hours[i], hours[j])} {j}."
        return picture, {"kind": "trains", "steps": steps, "aside": aside, "result": min(i, j, key=lambda t: hours[t])}


def paint_vet(rng: Random) -> Picture:
    """Draw a picture of any kind and a question on it."""
    picture, facts = rng.choice((_sum_of_bars, _high_bars, _shopping, _extreme_shape, _first_train))(rng)
    return Picture(picture.image, facts, picture.labels)


def _vet_question(rng: Random, facts: Facts) -> str:
    one, two = (*[what for what, _ in facts["steps"]], "")[:2]
    wording = rng.randrange(4)  # two with and two without a request for reasons
    question = PHRASES["vet"][facts["kind"]][wording % 2].format(**{**facts, "one": one, "two": two})
    return f"{question[:1].upper()}{question[1:]}{' Say how you know.' if wording > 1 else ''}"


def _vet_step(rng: Random, kind: str, what: str, value: str) -> str:
    if kind == "edge":
        return _vet(rng, "place", what=what, value=value)
    return _vet(rng, "step", what=f"the {what}" if kind in ("cost", "budget") else what, value=value)


def _vet_result(facts: Facts) -> str:
    return f"the {facts['result']}" if facts["kind"] == "edge" else str(facts["result"])


def _vet_dense(rng: Random, facts: Facts) -> str:
    steps = [_vet_step(rng, facts["kind"], *step) for step in shuffled(rng, list(facts["steps"]))]
    steps.insert(rng.randint(0, len(steps)), _vet(rng, "aside", aside=facts["aside"]))
    result = _vet(rng, "result", what=_vet_result(facts))
    return " ".join([*steps, result] if rng.random() < 0.6 else [result, *steps])


def _vet_verbose(rng: Random, facts: Facts) -> str:
    steps = [_vet_step(rng, facts["kind"], *step) for step in facts["steps"]]
    steps.append(_vet(rng, "aside", aside=facts["aside"]))
    opening = _vet(rng, "opening")
    return " ".join([opening, *steps, f"So the answer to the question is {_vet_result(facts)}."])


_WORDS = (*COLOURS, *SHAPES, *GOODS, *(town.lower() for town in TOWNS))
_VALUE = re.compile(rf"\b(?:top|middle|bottom) (?:left|centre|right)\b|\b(?:{'|'.join(NUMBERS)})\b")


def mark_vet(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the result is right, and the share of the steps."""
    steps: list[tuple[str, str]] = []
    results: list[str] = []
    for part in sentences(answer.replace(":", " ")):
        if "answer" in part and "look" not in part:
            results += _VALUE.findall(part) or mentioned(part, ("yes", "no")) or [" ".join(mentioned(part, _WORDS))]
        elif "other" not in part:
            whats, values = mentioned(part, _WORDS), _VALUE.findall(part)
            if len(whats) == len(values) == 1:
                steps.append((whats[0], values[0]))
    true = [(what.lower(), value) for what, value in facts["steps"]]
    return {"result": float(results == [facts["result"].lower()]), "steps": overlap(steps, true)}


VET = Task(paint_vet, grammars(_vet_question, _vet_dense, _vet_verbose), mark_vet, share=0.12, decisive=CONCLUSION)

# -- first turns of all second turns -------------------------------------------------------------------------

FIRST_TASKS = ("chart", "receipt", "scene")
_FIRST_SEED, _LAST_SEED = 10**6, 2**48  # not the seeds of tests and evaluation


def _start(rng: Random) -> tuple[Image.Image, Facts, Mapping[str, int | str]]:
    """Draw a first turn; return its picture, its facts, and its task and seed."""
    task = rng.choice(FIRST_TASKS)
    seed = rng.randrange(_FIRST_SEED, _LAST_SEED)
    sample = draw(seed, task)
    return sample.image, sample.facts, {"task": task, "seed": seed}


def _earlier(grammar: str, facts: Facts) -> tuple[tuple[str, str], ...]:
    """The first turn, in the grammar of the second."""
    sample = draw(facts["first"]["seed"], facts["first"]["task"], grammar)
    return ((sample.question, sample.answer),)


def _second(rng: Random, facts: Facts) -> Media:
    """Draw a first turn for a second one that does not need its picture."""
    image, _, first = _start(rng)
    return Media({**facts, "first": first}, (image,))


# -- followup: the first answer again, sorted or selected ----------------------------------------------------

_followup = wordings("followup")
_APART = 4  # pixels by which shapes sorted from left to right must differ
_NOUNS = {"scene": "shapes", "chart": "bars", "receipt": "items"}


def paint_followup(rng: Random) -> Media:
    """Draw a first turn and a part of it: (what, value) pairs, in order if sorted."""
    while True:
        image, facts, first = _start(rng)
        sort = rng.random() < 0.5
        if first["task"] == "scene":
            things = sorted(facts["things"], key=lambda thing: thing["x"])
            if any(two["x"] - one["x"] < _APART for one, two in pairwise(things)):
                continue
            how = rng.choice(("from left to right", "from right to left") if sort else SIZES)
            things = things[::-1] if how == "from right to left" else things
            told = [(name(thing), at(thing)) for thing in things if sort or thing["size"] == how]
            rest = [name(thing) for thing in things if not sort and thing["size"] != how]
        else:
            words, values = ("colours", "values") if first["task"] == "chart" else ("goods", "prices")
            pairs = sorted(zip(facts[words], facts[values], strict=True), key=lambda pair: pair[1])
            how = rng.choice(("from low to high", "from high to low")) if sort else NUMBERS[rng.randint(1, 6)]
            pairs = pairs[::-1] if how == "from high to low" else pairs
            told = [(what, NUMBERS[value]) for what, value in pairs if sort or value > NUMBERS.index(how)]
            rest = [what for what, value in pairs if not sort and value <= NUMBERS.index(how)]
        if told:
            return Media({"first": first, "sort": sort, "how": how, "told": told, "rest": rest}, (image,))


def _followup_question(rng: Random, facts: Facts) -> str:
    nouns, how = _NOUNS[facts["first"]["task"]], facts["how"]
    if facts["sort"]:
        return _followup(rng, "sort", nouns=nouns, how=how)
    which = f"the {how} {nouns}" if facts["first"]["task"] == "scene" else f"{nouns} of more than {how}"
    return _followup(rng, "select", which=which)


def _closing(rng: Random, facts: Facts) -> str:
    """A sentence that follows from the list: its ends and their distance, or the things not in it."""
    told, nouns = facts["told"], _NOUNS[facts["first"]["task"]]
    if not facts["sort"]:
        rest = joined([f"the {what}" for what in facts["rest"]]) if facts["rest"] else "there are none"
        return _followup(rng, "rest", nouns=nouns, rest=rest)
    ends = f"the {told[0][0]} is the first and the {told[-1][0]} the last"
    if facts["first"]["task"] == "scene":
        return _followup(rng, "ends", ends=ends)
    apart = difference(NUMBERS.index(told[-1][1]), NUMBERS.index(told[0][1]))
    return _followup(rng, "distance", ends=ends, apart=apart)


def _followup_dense(rng: Random, facts: Facts) -> str:
    pairs = facts["told"] if facts["sort"] else shuffled(rng, list(facts["told"]))
    opening = rng.choice(PHRASES["followup"]["sorted" if facts["sort"] else "selected"])
    opening = sentence(rng, opening.format(count=NUMBERS[len(pairs)], how=facts["how"]))
    items = [_followup(rng, "item", what=what, value=value) for what, value in pairs]
    return " ".join([opening, *items, _closing(rng, facts)])


def _followup_verbose(rng: Random, facts: Facts) -> str:
    task, count = facts["first"]["task"], len(facts["told"])
    parts = [f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} of the {_NOUNS[task]} to tell you about."]
    place = "at the" if task == "scene" else "at"
    for i, (what, value) in enumerate(facts["told"]):
        parts.append(f"{'Next' if i else 'First'} comes the {what} {place} {value}.")
    return " ".join([*parts, _closing(rng, facts)])


def mark_followup(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the selected things with their values, and in the right order if there is one."""
    pairs = []
    is_scene = facts["first"]["task"] == "scene"
    for part in sentences(answer.replace(":", " ").replace(",", " ")):
        if "other" in part or "not in" in part or "the first" in part:
            continue
        if is_scene:
            whats, values = ([" ".join(pair) for pair in read(part)] for read in (named, places))
        else:
            whats, values = mentioned(part, (*COLOURS, *GOODS)), [NUMBERS[value] for value in numbers(part)]
        if len(whats) == 1 and values:
            pairs.append((whats[0], values[-1] if is_scene else values[0]))
    true = [(what, value) for what, value in facts["told"]]
    items = overlap(pairs, true)
    # Equal values may come in either order, hence the order of the values.
    place = 0 if is_scene else 1
    order = in_order([pair[place] for pair in pairs], [pair[place] for pair in true])
    return {"items": items, "order": order if facts["sort"] else items}


FOLLOWUP = Task(
    paint_followup,
    grammars(_followup_question, _followup_dense, _followup_verbose, _earlier),
    mark_followup,
    share=0.08,
)

# -- arithmetic: small sums in words and their steps, without a picture --------------------------------------

_arithmetic = wordings("arithmetic")


def paint_arithmetic(rng: Random) -> Media:
    """Draw a first turn and a number of goods, with two or three gains, losses or doublings, at most eighteen."""
    now = start = rng.randint(2, 7)
    steps: list[dict[str, Any]] = []
    for _ in range(rng.randint(2, 3)):
        possible = {"gain": now <= 12, "lose": now >= 3, "double": 2 <= now <= 9}
        kind = rng.choice([kind for kind, holds in possible.items() if holds])
        by = {"gain": rng.randint(1, 6), "lose": rng.randint(1, max(1, min(now - 1, 6))), "double": now}[kind]
        now += -by if kind == "lose" else by
        steps.append({"kind": kind, "by": by, "now": now})
    who, other = rng.sample(NAMES, 2)
    what = rng.choice(("cake", "pear", "plum"))
    return _second(rng, {"who": who, "other": other, "what": what, "start": start, "steps": steps})


def _steps(facts: Facts) -> list[tuple[str, dict[str, str]]]:
    """Kind and number words of every step."""
    before = [facts["start"], *(step["now"] for step in facts["steps"])]
    return [
        (step["kind"], {"old": NUMBERS[old], "by": NUMBERS[step["by"]], "now": NUMBERS[step["now"]]})
        for old, step in zip(before, facts["steps"], strict=False)
    ]


def _arithmetic_question(rng: Random, facts: Facts) -> str:
    people = {key: facts[key] for key in ("who", "other", "what")}
    start = f"{facts['who']} has {NUMBERS[facts['start']]} {plural(facts['what'], facts['start'])}."
    steps = [_arithmetic(rng, kind, **people, **words) for kind, words in _steps(facts)]
    return " ".join([start, *steps, _arithmetic(rng, "question", **people)])


def _arithmetic_dense(rng: Random, facts: Facts) -> str:
    steps = [_arithmetic(rng, "less" if kind == "lose" else "more", **words) for kind, words in _steps(facts)]
    now = facts["steps"][-1]["now"]
    result = _arithmetic(rng, "result", who=facts["who"], what=plural(facts["what"], now), count=NUMBERS[now])
    return " ".join([*steps, result] if rng.random() < 0.8 else [result, *steps])


def _arithmetic_verbose(rng: Random, facts: Facts) -> str:
    words = [{**numbers, "word": "less" if kind == "lose" else "more"} for kind, numbers in _steps(facts)]
    steps = ["There are {old} first, then {by} {word}, and that makes {now}.".format(**each) for each in words]
    end = f"So the answer to the question is {NUMBERS[facts['steps'][-1]['now']]}."
    return " ".join([f"Let me count the {facts['what']}s step by step.", *steps, end])


def mark_arithmetic(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the result is right, and the share of the steps with their three numbers."""
    steps, results = [], []
    for part in sentences(answer):
        values = numbers(part)
        if "answer" in part:
            results += values
        elif len(values) == 3:
            steps.append(tuple(sorted(values)))
    true = [tuple(sorted(map(NUMBERS.index, words.values()))) for _, words in _steps(facts)]
    return {"result": float(results == [facts["steps"][-1]["now"]]), "steps": overlap(steps, true)}


ARITHMETIC = Task(
    paint_arithmetic,
    grammars(_arithmetic_question, _arithmetic_dense, _arithmetic_verbose, _earlier),
    mark_arithmetic,
    share=0.05,
)

# -- knowledge: three of a few dozen facts about the real world, without a picture ---------------------------

_knowledge = wordings("knowledge")
_KNOWN: dict[str, dict[str, str]] = PHRASES["known"]  # kind -> subject -> value


def paint_knowledge(rng: Random) -> Media:
    """Draw a first turn and three facts of different kinds."""
    return _second(rng, {"asked": [(k, rng.choice(sorted(_KNOWN[k]))) for k in rng.sample(sorted(_KNOWN), 3)]})


def _fact(rng: Random, kind: str, subject: str, prefix: str = "") -> str:
    return _knowledge(rng, prefix + kind, subject=subject, a=a(subject), value=_KNOWN[kind][subject])


_TOPICS = {**_KNOWN, "legs": ("legs",), "corners": ("corners",), "day": ("after",)}
"""Kind -> words of which a sentence on it has one."""


def mark_knowledge(answer: str, facts: Facts) -> dict[str, float]:
    """Share of the facts stated correctly."""
    stated = []
    for part in sentences(answer):
        for kind, table in _KNOWN.items():
            if not mentioned(part, [word.lower() for word in _TOPICS[kind]]):
                continue
            after = part.split("after")[-1] if kind == "day" else part
            subjects = mentioned(after, [subject.lower() for subject in table])[:1]
            left = part
            for subject in subjects:
                left = left.replace(subject, " ")
            values = mentioned(left, sorted({value.lower() for value in table.values()}))
            if len(subjects) == len(values) == 1:
                stated.append((kind, subjects[0], values[0]))
    true = [(kind, subject.lower(), _KNOWN[kind][subject].lower()) for kind, subject in facts["asked"]]
    return {"fact": overlap(stated, true)}


KNOWLEDGE = Task(
    paint_knowledge,
    grammars(
        lambda rng, facts: " ".join(_fact(rng, kind, what, "ask_") for kind, what in facts["asked"]),
        lambda rng, facts: " ".join(_fact(rng, *pair) for pair in shuffled(rng, list(facts["asked"]))),
        lambda rng, facts: " ".join([_knowledge(rng, "opening"), *(_fact(rng, *pair) for pair in facts["asked"])]),
        _earlier,
    ),
    mark_knowledge,
    share=0.05,
)
