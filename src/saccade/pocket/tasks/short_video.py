"""Task `video`: detailed captions of short videos, forwards or backwards."""

from random import Random

from saccade.pocket.film import describe_event, film, read_events, true_events
from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import in_order, mentioned, overlap, sentences
from saccade.pocket.shapes import key, name, named
from saccade.pocket.words import NUMBERS, ORDINALS, a, joined, sentence, shuffled


def paint(rng: Random) -> Media:
    """Draw a video, and the order of the caption."""
    media = film(rng)
    facts = {**media.facts, "backwards": rng.random() < 0.3}
    return Media(facts, media.images, media.video, media.fps)


def _question(rng: Random, facts: Facts) -> str:
    if facts["backwards"]:
        return sentence(
            rng,
            "tell me what happens, from the last to the first.",
            "what happens in the video? Start with the last.",
            "from the end to the start, describe the video in detail.",
        )
    return sentence(
        rng,
        "describe the video in detail.",
        "what happens in the video?",
        "tell me what happens, from the first to the last.",
    )


def cast(rng: Random, facts: Facts) -> str:
    """A sentence that lists the shapes of a video with their first size."""
    names = [f"{a(thing['size'])} {name(thing)}" for thing in shuffled(rng, facts["things"])]
    return sentence(rng, f"the video has {joined(names)}.", f"{joined(names)} are in the video.", f"{joined(names)}.")


def _dense(rng: Random, facts: Facts) -> str:
    things, events = facts["things"], facts["events"]
    ordered = events[::-1] if facts["backwards"] else events
    told = [describe_event(rng, things[event["thing"]], event["what"]) for event in ordered]
    count = sentence(rng, f"{NUMBERS[len(told)]} things happen.", f"{NUMBERS[len(told)]} in total.", "")
    listed = cast(rng, facts)
    parts = [listed, *told, count] if rng.random() < 0.5 else [count, *told, listed]
    return " ".join(part for part in parts if part)


def _verbose(rng: Random, facts: Facts) -> str:
    things, events = facts["things"], facts["events"]
    ordered = events[::-1] if facts["backwards"] else events
    listed = joined([f"{a(thing['size'])} {name(thing)}" for thing in things])
    told = [f"In this video there are {listed}."]
    for number, event in enumerate(ordered):
        place = len(events) - 1 - number if facts["backwards"] else number
        happened = describe_event(rng, things[event["thing"]], event["what"])
        told.append(f"This is the {ORDINALS[place]} thing to happen: {happened}")
    return " ".join([*told, f"So {NUMBERS[len(events)]} things happen in the video."])


def read_cast(answer: str) -> list[tuple[str, str, str]]:
    """Size, colour and form of the things in the sentence that lists them."""
    for part in sentences(answer):
        sizes, things = mentioned(part, ("small", "large")), named(part)
        if len(things) == len(sizes) >= 2:
            return [(size, *thing) for size, thing in zip(sizes, things, strict=True)]
    return []


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the events, of their order, and of the things with their first size."""
    told, true = read_events(answer), true_events(facts["things"], facts["events"])
    ordered = true[::-1] if facts["backwards"] else true
    at_first = [(thing["size"], *key(thing)) for thing in facts["things"]]
    return {
        "event": overlap(told, true),
        "order": in_order(told, ordered),
        "cast": overlap(read_cast(answer), at_first),
    }


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.1)
