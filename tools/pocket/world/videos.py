"""Tasks on videos: `video-question`, open or with four choices (`choice`), and `long-video`."""

import re
from collections import Counter
from functools import partial
from random import Random
from typing import Any

from saccade.pocket.film import (
    DIRECTIONS,
    FPS,
    WHATS,
    between,
    cast,
    describe_event,
    film,
    plot,
    read_cast,
    read_events,
    true_events,
    unplaced_things,
)
from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import CONCLUSION, in_order, mentioned, overlap, sentences
from saccade.pocket.shapes import key, name, named, render
from saccade.pocket.words import BACKGROUNDS, COLOURS, NUMBERS, ORDINALS, SHAPES, a, joined, shuffled, spoken
from tools.pocket.world.phrases import wordings

# -- video-question and choice: order, direction or number of events -----------------------------------------

_question = wordings("video-question")
LETTERS = ("A", "B", "C", "D")


def ask(rng: Random, facts: Facts) -> dict[str, Any]:
    """Draw a question: its kind, what it is about, the result, three other choices, and the events that show it."""
    things, events = facts["things"], facts["events"]
    names = [name(thing) for thing in things]

    def question(kind: str, about: str, result: str, others: list[str], shown: list[Any]) -> dict[str, Any]:
        return {"kind": kind, "about": about, "result": result, "others": others, "shown": shown}

    kind = rng.choice(("order", "first", "way", "count", "count"))
    if kind == "order" and events[0]["thing"] != events[1]["thing"]:
        i = rng.randrange(len(events) - 1)
        this, then = events[i : i + 2]
        if this["thing"] != then["thing"]:
            result = names[then["thing"]]
            absent = [f"{hue} {form}" for hue in COLOURS for form in SHAPES if f"{hue} {form}" not in names]
            here = [other for other in names if other != result]
            others = [*here, *rng.sample(absent, 3 - len(here))]
            verb = "goes " if this["what"] in DIRECTIONS else "turns " if this["what"] in ("small", "large") else ""
            if events.count(this) == 1:
                return question(kind, f"{names[this['thing']]} {verb}{this['what']}", result, others, [this, then])
    if kind == "way":
        moves = [event for event in events if event["what"] in DIRECTIONS]
        alone = [e for e in moves if sum(o["thing"] == e["thing"] for o in moves) == 1]
        if alone:
            event = rng.choice(alone)
            others = [way for way in DIRECTIONS if way != event["what"]]
            return question(kind, names[event["thing"]], event["what"], others, [event])
    if kind == "count":
        who = rng.randrange(len(names))
        shown = [event for event in events if event["thing"] == who]
        others = rng.sample([NUMBERS[n] for n in range(5) if n != len(shown)], 3)
        return question(kind, names[who], NUMBERS[len(shown)], others, shown)
    event = events[0]
    others = rng.sample([what for what in WHATS if what != event["what"]], 3)
    return question("first", names[event["thing"]], event["what"], others, [event])


def lettered(rng: Random, question: dict[str, Any]) -> dict[str, Any]:
    """Draw four choices for a question, and the letter of the right one."""
    right = rng.choice(LETTERS)
    options = shuffled(rng, question["others"])
    options.insert(LETTERS.index(right), question["result"])
    return {"letter": right, "options": options}


def paint_question(rng: Random, choices: bool) -> Media:
    """Draw a video with a question on it."""
    media = film(rng)
    question = ask(rng, media.facts)
    letters = lettered(rng, question) if choices else {}
    return Media({**media.facts, **question, **letters}, media.images, media.video, media.fps)


def video_question(rng: Random, facts: Facts) -> str:
    """A question in words, with its choices if it has some."""
    question = _question(rng, facts["kind"], about=facts["about"])
    if "options" not in facts:
        return question
    listed = " ".join(f"{letter}: {option}." for letter, option in zip(LETTERS, facts["options"], strict=True))
    return f"{question} {listed} {_question(rng, 'choose')}"


def _reasons(rng: Random, facts: Facts) -> list[str]:
    things, events, shown = facts["things"], facts["events"], facts["shown"]
    rest = [event for event in events if event not in shown]
    chosen = [*shown, *rest[: max(0, 3 - len(shown))]]
    parts = [describe_event(rng, things[event["thing"]], event["what"]) for event in chosen]
    still = [name(thing) for i, thing in enumerate(things) if all(event["thing"] != i for event in events)]
    return parts + [f"Nothing happens to the {n}." for n in still]


def conclusion(rng: Random, facts: Facts) -> str:
    """A sentence with the result alone."""
    if "letter" in facts:
        return _question(rng, "lettered", letter=facts["letter"], result=facts["result"])
    return _question(rng, "result", result=facts["result"])


def _dense_question(rng: Random, facts: Facts) -> str:
    parts, result = _reasons(rng, facts), conclusion(rng, facts)
    return " ".join([result, *parts] if rng.random() < 0.5 else [*parts, result])


def _verbose_question(rng: Random, facts: Facts) -> str:
    end = f"{facts['result']}, which is letter {facts['letter']}" if "letter" in facts else facts["result"]
    parts = ["Let me look at the video first.", *_reasons(rng, facts)]
    return " ".join([*parts, f"So the answer to the question is {end}."])


_LETTER = re.compile(r"\b([A-D])\b")
_STILL = "nothing"


def _reason(answer: str, facts: Facts) -> float:
    """Share of the events that show the result; other events may be mentioned as often as they happen.

    A shape without events may be mentioned as well; if it is the shape in question, that is the reason.
    """
    stated = read_events(answer)
    stated += [(thing, _STILL) for part in sentences(answer) if "nothing happens" in part for thing in named(part)]
    things, events = facts["things"], facts["events"]
    moved = {event["thing"] for event in events}
    still = [(key(thing), _STILL) for i, thing in enumerate(things) if i not in moved]
    true = true_events(things, facts["shown"]) or [(named(facts["about"])[0], _STILL)]
    wrong = Counter(stated) - Counter(true_events(things, events) + still)
    other = [fact for fact in wrong.elements() if fact not in true]
    return overlap([fact for fact in stated if fact in true] + other, true)


def mark_question(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the result and, with choices, the letter are right, and the share of the events that show the result."""
    letters: list[str] = []
    results: list[str] = []
    for part in answer.split("."):
        if "answer" in part.lower():
            letters += _LETTER.findall(part)
            results += [" ".join(pair) for pair in named(part.lower())] or mentioned(part.lower(), (*WHATS, *NUMBERS))
    plain = " ".join(f"{part}." for part in sentences(answer) if "answer" not in part)
    marks = {"result": float(results == [facts["result"]]), "reason": _reason(plain, facts)}
    return {"letter": float(letters == [facts["letter"]]), **marks} if "letter" in facts else marks


OPEN, CHOICE = (
    Task(
        partial(paint_question, choices=choices),
        grammars(video_question, _dense_question, _verbose_question),
        mark_question,
        share=0.06,
        decisive=CONCLUSION,
    )
    for choices in (False, True)
)

# -- long-video: half a minute to a minute with few events, all of them or those of one shape, in an order ---
#
# A frame takes 16 tokens, so a prompt has two to four thousand, which pruning and text-only drafters can save. Answers
# are as short as those on short videos.

_long = wordings("long-video")
FRAMES = (128, 160, 192, 256)
_FRAME_WEIGHTS = (4, 3, 2, 1)
_GAP = 3  # fewest frames between two events


def _spans(rng: Random, frames: int, events: int) -> list[list[int]]:
    """Draw the first frame and the frame after the last of each event, with still frames between events."""
    lengths = [rng.randint(4, 8) for _ in range(events)]
    free = frames - sum(lengths) - _GAP * (events + 1)
    cuts = sorted(rng.randint(0, free) for _ in range(events))
    spans, used = [], 0
    for number, (cut, length) in enumerate(zip(cuts, lengths, strict=True), 1):
        start = cut + used + number * _GAP
        spans.append([start, start + length])
        used += length
    return spans


def paint_long(rng: Random) -> Media:
    """Draw a video of 128 to 256 frames with three to five events, and a selection of these.

    Facts: those of `saccade.pocket.film.film`, the frames of each event (`spans`), the shape in question (`about`, None
    for all), `backwards` if events go from last to first, and the numbers of the events to be `told`, in order.
    """
    background = rng.choice(list(BACKGROUNDS))
    frames = rng.choices(FRAMES, _FRAME_WEIGHTS)[0]
    states, events = plot(rng, rng.randint(3, 5), 4)
    spans = _spans(rng, frames, len(events))
    shown, done = [], 0
    for number in range(frames):
        if done < len(events) and number >= spans[done][1]:
            done += 1
        if done < len(events) and number >= spans[done][0]:
            start, end = spans[done]
            seen = between(states[done], states[done + 1], (number - start + 1) / (end - start))
        else:
            seen = [thing for thing in states[done] if thing["there"]]
        shown.append(render(background, seen))
    about = rng.choice(events)["thing"] if rng.random() < 0.4 else None
    backwards = rng.random() < 0.3
    told = [i for i, event in enumerate(events) if about in (None, event["thing"])]
    facts = {
        "things": unplaced_things(states[0]),
        "events": events,
        "frames": frames,
        "background": background,
        "spans": spans,
        "about": about,
        "backwards": backwards,
        "told": told[::-1] if backwards else told,
    }
    return Media(facts, video=tuple(shown), fps=FPS)


def _long_question(rng: Random, facts: Facts) -> str:
    order = "from the last to the first" if facts["backwards"] else "from the first to the last"
    if facts["about"] is None:
        return _long(rng, "all", order=order)
    return _long(rng, "one", order=order, its=f"the {name(facts['things'][facts['about']])}")


def _selected(facts: Facts) -> list[dict[str, Any]]:
    return [facts["events"][number] for number in facts["told"]]


def _described(rng: Random, facts: Facts) -> list[str]:
    return [describe_event(rng, facts["things"][event["thing"]], event["what"]) for event in _selected(facts)]


def _dense_long(rng: Random, facts: Facts) -> str:
    parts, listed = _described(rng, facts), cast(rng, facts)
    happen = "thing happens" if len(parts) == 1 else "things happen"
    count = _long(rng, "count", count=NUMBERS[len(parts)], happen=happen)
    return spoken([listed, *parts, count] if rng.random() < 0.5 else [count, *parts, listed])


def _verbose_long(rng: Random, facts: Facts) -> str:
    events = _described(rng, facts)
    listed = joined([f"{a(thing['size'])} {name(thing)}" for thing in facts["things"]])
    order = range(len(events))[::-1] if facts["backwards"] else range(len(events))
    which = "thing to happen" if facts["about"] is None else "thing that happens to it"
    parts = [f"This is the {ORDINALS[place]} {which}: {event}" for place, event in zip(order, events, strict=True)]
    last = f"So {NUMBERS[len(events)]} {'is' if len(events) == 1 else 'are'} to be told."
    return " ".join([f"In this long video there are {listed}.", *parts, last])


def mark_long(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the selected events, of their order, and of the things with their first size."""
    stated, true = read_events(answer), true_events(facts["things"], _selected(facts))
    return {
        "event": overlap(stated, true),
        "order": in_order(stated, true),
        "cast": overlap(read_cast(answer), [(thing["size"], *key(thing)) for thing in facts["things"]]),
    }


LONG = Task(paint_long, grammars(_long_question, _dense_long, _verbose_long), mark_long, share=0.0)
