"""Task `long-video`: half a minute to a minute with few events, all of them or those of one shape, in an order.

A frame takes 16 tokens, so a prompt has two to four thousand, which pruning and text-only drafters can save. Answers
are as short as those on short videos.
"""

from random import Random

from saccade.pocket.film import FPS, between, describe_event, plot, read_events, true_events, unplaced_things
from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import in_order, overlap
from saccade.pocket.shapes import Thing, key, name, render
from saccade.pocket.tasks.short_video import cast, read_cast
from saccade.pocket.words import BACKGROUNDS, NUMBERS, ORDINALS, a, joined, sentence

FRAMES = (128, 160, 192, 256)
_FRAME_WEIGHTS = (4, 3, 2, 1)
_STILL = 3  # fewest frames between two events


def _spans(rng: Random, frames: int, events: int) -> list[tuple[int, int]]:
    """Draw the first frame and the frame after the last of each event, with still frames between events."""
    lengths = [rng.randint(4, 8) for _ in range(events)]
    free = frames - sum(lengths) - _STILL * (events + 1)
    cuts = sorted(rng.randint(0, free) for _ in range(events))
    spans, used = [], 0
    for number, (cut, length) in enumerate(zip(cuts, lengths, strict=True), 1):
        start = cut + used + number * _STILL
        spans.append((start, start + length))
        used += length
    return spans


def paint(rng: Random) -> Media:
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
        "spans": [list(span) for span in spans],
        "about": about,
        "backwards": backwards,
        "told": told[::-1] if backwards else told,
    }
    return Media(facts, video=tuple(shown), fps=FPS)


def _question(rng: Random, facts: Facts) -> str:
    order = "from the last to the first" if facts["backwards"] else "from the first to the last"
    if facts["about"] is None:
        return sentence(
            rng,
            f"this is a long video. Tell me what happens, {order}.",
            f"what happens in this long video, {order}?",
            f"describe the long video {order}.",
        )
    its = f"the {name(facts['things'][facts['about']])}"
    return sentence(
        rng,
        f"this is a long video. What happens to {its}? Tell me {order}.",
        f"find {its} in this long video and tell me only what it does, {order}.",
        f"look for {its}: what happens to it, {order}?",
    )


def _events(rng: Random, facts: Facts) -> list[str]:
    happened = [facts["events"][number] for number in facts["told"]]
    return [describe_event(rng, facts["things"][event["thing"]], event["what"]) for event in happened]


def _dense(rng: Random, facts: Facts) -> str:
    told, listed = _events(rng, facts), cast(rng, facts)
    happen = "thing happens" if len(told) == 1 else "things happen"
    count = sentence(rng, f"{NUMBERS[len(told)]} {happen}.", f"{NUMBERS[len(told)]} in total.", "")
    parts = [listed, *told, count] if rng.random() < 0.5 else [count, *told, listed]
    return " ".join(part for part in parts if part)


def _listed(thing: Thing) -> str:
    return f"{a(thing['size'])} {name(thing)}"


def _verbose(rng: Random, facts: Facts) -> str:
    told = _events(rng, facts)
    parts = [f"In this long video there are {joined([_listed(thing) for thing in facts['things']])}."]
    order = range(len(told))[::-1] if facts["backwards"] else range(len(told))
    which = "thing to happen" if facts["about"] is None else "thing that happens to it"
    parts += [f"This is the {ORDINALS[place]} {which}: {event}" for place, event in zip(order, told, strict=True)]
    return " ".join([*parts, f"So {NUMBERS[len(told)]} {'is' if len(told) == 1 else 'are'} to be told."])


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the selected events, of their order, and of the things with their first size."""
    things = facts["things"]
    told, true = (
        read_events(answer),
        true_events(things, [facts["events"][number] for number in facts["told"]]),
    )
    return {
        "event": overlap(told, true),
        "order": in_order(told, true),
        "cast": overlap(read_cast(answer), [(thing["size"], *key(thing)) for thing in things]),
    }


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.0)
