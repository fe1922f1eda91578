"""Task `arithmetic`: a second turn that needs no picture, with small sums in words and their steps."""

from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import numbers, overlap, sentences
from saccade.pocket.words import NAMES, NUMBERS, plural, sentence
from tools.pocket.world.followup import earlier, second

_COUNTED = ("cake", "pear", "plum")


def paint(rng: Random) -> Media:
    """Draw a first turn and a number of goods, with two or three gains, losses or doublings, at most eighteen."""
    start = rng.randint(2, 7)
    steps: list[dict[str, Any]] = []
    now = start
    for _ in range(rng.randint(2, 3)):
        kinds = [
            kind for kind, possible in (("gain", now <= 12), ("lose", now >= 3), ("double", 2 <= now <= 9)) if possible
        ]
        kind = rng.choice(kinds)
        by = {"gain": rng.randint(1, 6), "lose": rng.randint(1, max(1, min(now - 1, 6))), "double": now}[kind]
        now += -by if kind == "lose" else by
        steps.append({"kind": kind, "by": by, "now": now})
    who, other = rng.sample(NAMES, 2)
    facts = {"who": who, "other": other, "what": rng.choice(_COUNTED), "start": start, "steps": steps}
    return second(rng, facts)


def _question(rng: Random, facts: Facts) -> str:
    who, other, what, start = facts["who"], facts["other"], facts["what"], facts["start"]
    told = [f"{who} has {NUMBERS[start]} {plural(what, start)}."]
    for step in facts["steps"]:
        by = NUMBERS[step["by"]]
        if step["kind"] == "gain":
            told.append(sentence(rng, f"{other} brings {by} more.", f"{who} buys {by} more."))
        elif step["kind"] == "lose":
            told.append(sentence(rng, f"{who} eats {by}.", f"{other} takes {by} away."))
        else:
            told.append(sentence(rng, f"{other} brings the same number again.", f"{who} buys as many again."))
    told.append(rng.choice((f"How many {what}s does {who} have now?", f"How many {what}s are there now?")))
    return " ".join(told)


def _step(rng: Random, before: int, step: dict[str, Any]) -> str:
    old, by, now = NUMBERS[before], NUMBERS[step["by"]], NUMBERS[step["now"]]
    if step["kind"] == "lose":
        return sentence(
            rng,
            f"{old} less {by} is {now}.",
            f"take {by} from {old}: {now}.",
            f"{now} is left of {old} without {by}.",
            f"that leaves {now}, {by} less than {old}.",
            f"from {old} to {now}: {by} are gone.",
        )
    return sentence(
        rng,
        f"{old} and {by} make {now}.",
        f"{by} more than {old} is {now}.",
        f"with {by} more, {old} turns into {now}.",
        f"that makes {now}, {by} more than {old}.",
        f"from {old} to {now}: {by} are new.",
    )


def _result(facts: Facts) -> int:
    return int(facts["steps"][-1]["now"])


def _dense(rng: Random, facts: Facts) -> str:
    now, before = _result(facts), facts["start"]
    steps = []
    for step in facts["steps"]:
        steps.append(_step(rng, before, step))
        before = step["now"]
    who, what, count = facts["who"], plural(facts["what"], now), NUMBERS[now]
    result = sentence(
        rng, f"the answer is {count}.", f"answer: {count} {what}.", f"so the answer is {count} for {who}."
    )
    return " ".join([*steps, result] if rng.random() < 0.8 else [result, *steps])


def _verbose(rng: Random, facts: Facts) -> str:
    told = [f"Let me count the {facts['what']}s step by step."]
    before = facts["start"]
    for step in facts["steps"]:
        word = "less" if step["kind"] == "lose" else "more"
        old, by, now = NUMBERS[before], NUMBERS[step["by"]], NUMBERS[step["now"]]
        told.append(f"There are {old} first, then {by} {word}, and that makes {now}.")
        before = step["now"]
    told.append(f"So the answer to the question is {NUMBERS[_result(facts)]}.")
    return " ".join(told)


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the result is right, and the share of the steps with their three numbers."""
    told, results = [], []
    for part in sentences(answer):
        values = numbers(part)
        if "answer" in part:
            results += values
        elif len(values) == 3:
            told.append(tuple(sorted(values)))
    true, before = [], facts["start"]
    for step in facts["steps"]:
        true.append(tuple(sorted((before, step["by"], step["now"]))))
        before = step["now"]
    return {"result": float(results == [_result(facts)]), "steps": overlap(told, true)}


TASK = Task(paint, grammars(_question, _dense, _verbose, earlier), mark, share=0.05)
