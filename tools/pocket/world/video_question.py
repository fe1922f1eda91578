"""Tasks `video-question` and `choice`: order, direction or number of events, open or with four choices."""

import re
from collections import Counter
from functools import partial
from random import Random
from typing import Any

from saccade.pocket.film import DIRECTIONS, WHATS, describe_event, film, read_events, true_events
from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import CONCLUSION, mentioned, overlap, sentences
from saccade.pocket.shapes import key, name, named
from saccade.pocket.words import COLOURS, NUMBERS, SHAPES, sentence, shuffled

LETTERS = ("A", "B", "C", "D")
_PAST = {
    **{way: f"goes {way}" for way in DIRECTIONS},
    "appears": "appears",
    "leaves": "leaves",
    "small": "turns small",
    "large": "turns large",
}


def ask(rng: Random, facts: Facts) -> dict[str, Any]:
    """Draw a question: its kind, the result, three other choices, and the events that show the result."""
    things, events = facts["things"], facts["events"]
    names = [name(thing) for thing in things]
    kind = rng.choice(("order", "first", "way", "count", "count"))
    others: list[str]
    if kind == "order" and events[0]["thing"] != events[1]["thing"]:
        i = rng.randrange(len(events) - 1)
        if events[i]["thing"] != events[i + 1]["thing"]:
            result = names[events[i + 1]["thing"]]
            strangers = [f"{hue} {form}" for hue in COLOURS for form in SHAPES if f"{hue} {form}" not in names]
            here = [other for other in names if other != result]
            others = [*here, *rng.sample(strangers, 3 - len(here))]
            after = f"{names[events[i]['thing']]} {_PAST[events[i]['what']]}"
            single = [e for e in events if e == events[i]] == [events[i]]
            if single:
                return {
                    "kind": kind,
                    "about": after,
                    "result": result,
                    "others": others,
                    "shown": events[i : i + 2],
                }
    if kind == "way":
        moves = [event for event in events if event["what"] in DIRECTIONS]
        alone = [e for e in moves if sum(o["thing"] == e["thing"] for o in moves) == 1]
        if alone:
            event = rng.choice(alone)
            others = [way for way in DIRECTIONS if way != event["what"]]
            shown = [event]
            about = names[event["thing"]]
            return {"kind": kind, "about": about, "result": event["what"], "others": others, "shown": shown}
    if kind == "count":
        who = rng.randrange(len(names))
        shown = [event for event in events if event["thing"] == who]
        count = len(shown)
        others = [NUMBERS[n] for n in range(5) if n != count]
        others = rng.sample(others, 3)
        about = names[who]
        return {"kind": kind, "about": about, "result": NUMBERS[count], "others": others, "shown": shown}
    event = events[0]
    others = rng.sample([what for what in WHATS if what != event["what"]], 3)
    about, result = names[event["thing"]], event["what"]
    return {"kind": "first", "about": about, "result": result, "others": others, "shown": [event]}


def lettered(rng: Random, asked: dict[str, Any]) -> dict[str, Any]:
    """Draw four choices for a question, and the letter of the right one."""
    right = rng.choice(LETTERS)
    options = shuffled(rng, asked["others"])
    options.insert(LETTERS.index(right), asked["result"])
    return {"letter": right, "options": options}


def paint(rng: Random, choices: bool) -> Media:
    """Draw a video with a question on it."""
    media = film(rng)
    asked = ask(rng, media.facts)
    extra = lettered(rng, asked) if choices else {}
    return Media({**media.facts, **asked, **extra}, media.images, media.video, media.fps)


def _question(rng: Random, facts: Facts) -> str:
    about = facts["about"]
    match facts["kind"]:
        case "order":
            asked = (f"after the {about}, which shape is next?", f"what does something after the {about}?")
            asked = (asked[0], f"which shape comes right after this: the {about}?")
        case "way":
            asked = (f"where does the {about} move?", f"which way does the {about} go?")
        case "count":
            asked = (f"how many things happen to the {about}?", f"count what happens to the {about}.")
        case _:
            asked = ("what is the first thing to happen?", f"at first, what happens to the {about}?")
    question = sentence(rng, *asked)
    if "options" not in facts:
        return question
    listed = " ".join(f"{letter}: {option}." for letter, option in zip(LETTERS, facts["options"], strict=True))
    return f"{question} {listed} {rng.choice(('Choose a letter.', 'Which letter is right?'))}"


def _reasons(rng: Random, facts: Facts) -> list[str]:
    things = facts["things"]
    told = [describe_event(rng, things[event["thing"]], event["what"]) for event in facts["shown"]]
    names = [name(thing) for thing in things]
    rest = [event for event in facts["events"] if event not in facts["shown"]]
    told += [describe_event(rng, things[event["thing"]], event["what"]) for event in rest[: max(0, 3 - len(told))]]
    still = [n for i, n in enumerate(names) if all(event["thing"] != i for event in facts["events"])]
    told += [f"Nothing happens to the {n}." for n in still]
    return told


def conclusion(rng: Random, facts: Facts) -> str:
    """A sentence with the result alone."""
    result = facts["result"]
    if "letter" in facts:
        letter = facts["letter"]
        return sentence(
            rng,
            f"the answer is {letter}, {result}.",
            f"{letter}: {result} is the answer.",
            f"so the answer is {result}, {letter}.",
            f"answer {letter}, {result}.",
        )
    return sentence(rng, f"the answer is {result}.", f"{result} is the answer.", f"so the answer: {result}.")


def _dense(rng: Random, facts: Facts) -> str:
    parts = [*_reasons(rng, facts)]
    result = conclusion(rng, facts)
    return " ".join([result, *parts] if rng.random() < 0.5 else [*parts, result])


def _verbose(rng: Random, facts: Facts) -> str:
    end = f"{facts['result']}, which is letter {facts['letter']}" if "letter" in facts else facts["result"]
    return " ".join(
        ["Let me look at the video first.", *_reasons(rng, facts), f"So the answer to the question is {end}."]
    )


_LETTER = re.compile(r"\b([A-D])\b")


def _said(answer: str) -> tuple[list[str], list[str]]:
    """Letters and results in the sentences with the answer."""
    letters: list[str] = []
    results: list[str] = []
    for part in answer.split("."):
        if "answer" not in part.lower():
            continue
        letters += _LETTER.findall(part)
        low = part.lower()
        results += [" ".join(pair) for pair in named(low)] or mentioned(low, (*WHATS, *NUMBERS))
    return letters, results


_STILL = "nothing"


def _read_still(answer: str) -> list[tuple[tuple[str, str], str]]:
    """Colour and form, and "nothing", of every shape that the answer says stays unchanged."""
    return [(thing, _STILL) for part in sentences(answer) if "nothing happens" in part for thing in named(part)]


def _reason(answer: str, facts: Facts) -> float:
    """Share of the events that show the result; other events may be mentioned as often as they happen.

    A shape without events may be mentioned as well; if it is the shape in question, that is the reason.
    """
    told = read_events(answer) + _read_still(answer)
    things, events = facts["things"], facts["events"]
    moved = {event["thing"] for event in events}
    still = [(key(thing), _STILL) for i, thing in enumerate(things) if i not in moved]
    true = true_events(things, facts["shown"]) or [(named(facts["about"])[0], _STILL)]
    wrong = Counter(told) - Counter(true_events(things, events) + still)
    other = [fact for fact in wrong.elements() if fact not in true]
    return overlap([fact for fact in told if fact in true] + other, true)


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the result and, with choices, the letter are right, and the share of the events that show the result."""
    letters, results = _said(answer)
    plain = " ".join(f"{part}." for part in sentences(answer) if "answer" not in part)
    marks = {"result": float(results == [facts["result"]]), "reason": _reason(plain, facts)}
    return {"letter": float(letters == [facts["letter"]]), **marks} if "letter" in facts else marks


def _task(choices: bool) -> Task:
    return Task(
        paint=partial(paint, choices=choices),
        grammars=grammars(_question, _dense, _verbose),
        score=mark,
        share=0.06,
        decisive=CONCLUSION,
    )


OPEN = _task(choices=False)
CHOICE = _task(choices=True)
