"""Task `vet`: questions that need several skills (reading, arithmetic, places, comparing), answered with steps."""

import re
from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import CONCLUSION, mentioned, overlap, sentences
from saccade.pocket.shapes import at, name, relation
from saccade.pocket.tasks import chart, receipt, scene
from saccade.pocket.words import (
    COLOURS,
    GOODS,
    NUMBERS,
    SHAPES,
    TOWNS,
    difference,
    joined,
    sentence,
    shuffled,
)
from tools.pocket.world import document

_EDGES = {"furthest left": ("x", 1), "furthest right": ("x", -1), "highest": ("y", 1), "lowest": ("y", -1)}
_CLEAR = 6  # pixels between the shape in question and the next one, so that the answer is unambiguous

QuestionFacts = dict[str, Any]
"""Facts of a question; `steps` are the (subject, value) pairs on the way to the result."""


def _sum_of_bars(rng: Random) -> tuple[Picture, QuestionFacts]:
    picture = chart.paint(rng)
    hues, values = picture.facts["colours"], picture.facts["values"]
    chosen = rng.sample(range(len(hues)), 2)
    steps = [(hues[i], NUMBERS[values[i]]) for i in chosen]
    one, two = chosen
    aside = f"{hues[one]} is {difference(values[one], values[two])} {hues[two]}."
    total = NUMBERS[values[one] + values[two]]
    return picture, {"kind": "bars", "steps": steps, "aside": aside, "result": total}


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
        ranked = sorted(picture.facts["things"], key=lambda thing: sign * thing[axis])
        if abs(ranked[0][axis] - ranked[1][axis]) >= _CLEAR:
            winner, second = ranked[0], ranked[1]
            steps = [(winner["shape"], at(winner)), (second["shape"], at(second))]
            aside = f"the {name(winner)} is {relation(winner, second)} the {name(second)}."
            return picture, {
                "kind": "edge",
                "edge": edge,
                "steps": steps,
                "aside": aside,
                "result": name(winner),
            }


def _first_train(rng: Random) -> tuple[Picture, QuestionFacts]:
    while True:
        picture = document.paint(rng)
        if picture.facts["kind"] != "trains":
            continue
        hours = dict(zip(picture.facts["towns"], picture.facts["hours"], strict=True))
        i, j = rng.sample(list(hours), 2)
        steps = [(town, NUMBERS[hours[town]]) for town in (i, j)]
        first = i if hours[i] < hours[j] else j
        aside = f"{i} is {difference(hours[i], hours[j])} {j}."
        return picture, {"kind": "trains", "steps": steps, "aside": aside, "result": first}


_KINDS = (_sum_of_bars, _high_bars, _shopping, _extreme_shape, _first_train)


def paint(rng: Random) -> Picture:
    """Draw a picture of any kind and a question on it."""
    picture, facts = rng.choice(_KINDS)(rng)
    return Picture(picture.image, facts, picture.labels)


def _question(rng: Random, facts: Facts) -> str:
    one, two = (*[what for what, _ in facts["steps"]], "")[:2]
    match facts["kind"]:
        case "bars":
            asked = (f"how much do {one} and {two} make together?", f"what is {one} and {two} in total?")
        case "above":
            bound = facts["bound"]
            asked = (f"which bars are higher than {bound}?", f"how many bars reach more than {bound}?")
        case "cost":
            asked = (f"what do the {one} and the {two} cost together?", f"how much are {one} and {two}?")
        case "budget":
            purse = facts["purse"]
            asked = (
                f"are {purse} dollars enough for the {one} and the {two}?",
                f"can I buy the {one} and the {two} for {purse} dollars?",
            )
        case "edge":
            asked = (f"which shape is {facts['edge']}?", f"tell me which shape is {facts['edge']} and where.")
        case _:
            asked = (f"which train leaves first, {one} or {two}?", f"is {one} or {two} the first to go?")
    return sentence(rng, *asked, *(f"{question} Say how you know." for question in asked))


def _step(rng: Random, kind: str, what: str, value: str) -> str:
    if kind == "edge":
        return sentence(
            rng,
            f"the {what} is at the {value}.",
            f"at the {value} there is a {what}.",
            f"{value}: a {what}.",
            f"a {what} sits {value}.",
        )
    thing = f"the {what}" if kind in ("cost", "budget") else what
    return sentence(
        rng,
        f"{thing} is at {value}.",
        f"{value} for {thing}.",
        f"{thing}: {value}.",
        f"I read {value} for {thing}.",
        f"the number for {thing} is {value}.",
    )


def _result(rng: Random, facts: Facts) -> str:
    result = facts["result"]
    what = f"the {result}" if facts["kind"] == "edge" else result
    return sentence(
        rng, f"so the answer is {what}.", f"the answer: {what}.", f"{what} is the answer.", f"answer: {what}."
    )


def _dense(rng: Random, facts: Facts) -> str:
    steps = [_step(rng, facts["kind"], *step) for step in shuffled(rng, list(facts["steps"]))]
    steps.insert(rng.randint(0, len(steps)), sentence(rng, facts["aside"]))
    result = _result(rng, facts)
    return " ".join([*steps, result] if rng.random() < 0.6 else [result, *steps])


def _verbose(rng: Random, facts: Facts) -> str:
    openings = ("To answer this I look at the picture.", "Let me look at the picture first.")
    steps = [_step(rng, facts["kind"], *step) for step in facts["steps"]]
    what = f"the {facts['result']}" if facts["kind"] == "edge" else facts["result"]
    steps.append(sentence(rng, facts["aside"]))
    return " ".join([rng.choice(openings), *steps, f"So the answer to the question is {what}."])


_WORDS = (*COLOURS, *SHAPES, *GOODS, *(town.lower() for town in TOWNS))
_VALUE = re.compile(rf"\b(?:top|middle|bottom) (?:left|centre|right)\b|\b(?:{'|'.join(NUMBERS)})\b")


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the result is right, and the share of the steps."""
    told: list[tuple[str, str]] = []
    results: list[str] = []
    for part in sentences(answer.replace(":", " ")):
        if "answer" in part and "look" not in part:
            results += _VALUE.findall(part) or mentioned(part, ("yes", "no")) or [" ".join(mentioned(part, _WORDS))]
        elif "other" not in part:
            whats, values = mentioned(part, _WORDS), _VALUE.findall(part)
            if len(whats) == len(values) == 1:
                told.append((whats[0], values[0]))
    true = [(what.lower(), value) for what, value in facts["steps"]]
    return {"result": float(results == [facts["result"].lower()]), "steps": overlap(told, true)}


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.12, decisive=CONCLUSION)
