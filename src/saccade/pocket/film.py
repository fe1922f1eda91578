"""Videos of two or three shapes with one event after another, and the sentences on those events."""

from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import in_order, mentioned, overlap, sentences
from saccade.pocket.shapes import RADIUS, Thing, key, name, named, render, scatter
from saccade.pocket.words import BACKGROUNDS, NUMBERS, ORDINALS, a, joined, sentence, shuffled, spoken

Event = dict[str, Any]  # `what` (a direction, "appears", "leaves" or a new size) and the number of the `thing`

FRAMES = (8, 12, 16, 24, 32, 64)
_FRAME_WEIGHTS = (6, 6, 5, 3, 2, 1)
FPS = 4.0
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
WHATS = (*DIRECTIONS, "appears", "leaves", "small", "large")
_SHORTEST = 26  # pixels of a move, so that it is easy to see
_EVENTS_BY_FRAMES = {8: 2, 12: 3}  # at least three frames per event; four events otherwise


def _clear(thing: Thing, end: tuple[int, int], others: list[Thing]) -> bool:
    """Whether the path to `end` touches nothing."""
    left, right = sorted((thing["x"], end[0]))
    top, bottom = sorted((thing["y"], end[1]))
    for other in others:
        gap = RADIUS[thing["size"]] + RADIUS[other["size"]] + 2
        is_across = left - gap < other["x"] < right + gap
        is_along = top - gap < other["y"] < bottom + gap
        if is_across and is_along:
            return False
    return True


def _is_inside(place: tuple[int, int], size: str) -> bool:
    """Whether a shape of that size lies within the picture."""
    reach = RADIUS[size] + 1
    return all(reach <= value <= 95 - reach for value in place)


def _happen(rng: Random, things: list[Thing]) -> tuple[Event, list[Thing]] | None:
    """Draw an event; return it and the things after it, or None if there is no room for it."""
    number = rng.randrange(len(things))
    thing = things[number]
    others = [other for other in things if other is not thing and other["there"]]
    after = dict(thing)
    if not thing["there"]:
        what, after["there"] = "appears", True
        if not _clear(after, (thing["x"], thing["y"]), others):
            return None
    elif rng.random() < 0.85:
        what = rng.choice(list(DIRECTIONS))
        dx, dy = DIRECTIONS[what]
        far = rng.randint(_SHORTEST, 60)
        end = (thing["x"] + dx * far, thing["y"] + dy * far)
        if not _is_inside(end, thing["size"]) or not _clear(thing, end, others):
            return None
        after["x"], after["y"] = end
    elif rng.random() < 0.5:
        if not others:
            return None
        what, after["there"] = "leaves", False
    else:
        what = after["size"] = "small" if thing["size"] == "large" else "large"
        place = (thing["x"], thing["y"])
        if not _is_inside(place, what) or not _clear(after, place, others):
            return None
    return {"thing": number, "what": what}, [after if other is thing else other for other in things]


def plot(rng: Random, wanted: int, most: int) -> tuple[list[list[Thing]], list[Event]]:
    """Draw `wanted` events of two to `most` shapes; return the states before, between and after, and the events."""
    while True:
        scene = scatter(rng, rng.randint(2, most))
        things: list[Thing] = [{**thing, "there": True} for thing in scene]
        if rng.random() < 0.4:
            things[-1]["there"] = False
        states: list[list[Thing]] = [things]
        events: list[Event] = []
        for _ in range(80):
            if len(events) == wanted:
                break
            chance = _happen(rng, states[-1])
            if chance is None:
                continue
            event, after = chance
            # Two events of one shape in a row could look like one.
            if events and event["thing"] == events[-1]["thing"] and rng.random() < 0.7:
                continue
            if events and event == events[-1]:
                continue
            events.append(event)
            states.append(after)
        seen = {event["thing"] for event in events}
        has_all = all(thing["there"] or number in seen for number, thing in enumerate(things))
        if has_all and len(events) == wanted:
            return states, events


def between(before: list[Thing], after: list[Thing], share: float) -> list[Thing]:
    """Visible things at a share of the way from one state to the next."""
    seen = []
    for old, new in zip(before, after, strict=True):
        now = dict(new if share >= 0.5 else old)
        for axis in "xy":
            way = new[axis] - old[axis]
            now[axis] = round(old[axis] + share * way)
        if now["there"]:
            seen.append(now)
    return seen


def unplaced_things(things: list[Thing]) -> list[Thing]:
    """The things without the words for their places, which do not hold after a move."""
    return [{k: v for k, v in thing.items() if k not in ("row", "column")} for thing in things]


def film(rng: Random) -> Media:
    """A video of 8 to 64 frames with two to four events that do not overlap in time.

    Facts: `things` at the start, `events` in order, `frames`.
    """
    background = rng.choice(list(BACKGROUNDS))
    frames = rng.choices(FRAMES, _FRAME_WEIGHTS)[0]
    wanted = rng.randint(2, _EVENTS_BY_FRAMES.get(frames, 4))
    states, events = plot(rng, wanted, 3)
    shown = []
    for number in range(frames):
        at = (number / (frames - 1)) * wanted  # in events
        step = min(int(at), wanted - 1)
        visible = between(states[step], states[step + 1], at - step)
        shown.append(render(background, visible))
    facts = {
        "things": unplaced_things(states[0]),
        "events": events,
        "frames": frames,
        "background": background,
    }
    return Media(facts, video=tuple(shown), fps=FPS)


def describe_event(rng: Random, thing: Thing, what: str) -> str:
    """A sentence on an event of a thing."""
    its = f"the {name(thing)}"
    if what in DIRECTIONS:
        return sentence(
            rng,
            f"{its} moves {what}.",
            f"{its} goes {what}.",
            f"{what} goes {its}.",
            f"there is a move {what} of {its}.",
            f"I see {its} run {what}.",
            f"we see how {its} goes {what}.",
        )
    if what == "appears":
        return sentence(rng, f"{its} appears.", f"{its} comes in.", f"there comes {its}.", f"now I see {its}, too.")
    if what == "leaves":
        return sentence(rng, f"{its} is gone.", f"{its} leaves.", f"away goes {its}.", f"I no longer see {its}.")
    return sentence(
        rng,
        f"{its} turns {what}.",
        f"{what} is the new size of {its}.",
        f"now {its} is {what}.",
        f"{its} is {what} from now on.",
    )


_APPEARS = ("appears", "comes", "too")
_LEAVES = ("gone", "leaves", "away", "longer")


def read_events(answer: str) -> list[tuple[tuple[str, str], str]]:
    """Colour and shape, and event, of every sentence on one event."""
    events = []
    for part in sentences(answer.replace(":", ".").replace(",", " ")):
        subjects = named(part)
        if len(subjects) != 1:
            continue
        whats = mentioned(part, (*DIRECTIONS, "small", "large"))
        if mentioned(part, _LEAVES):
            whats = ["leaves"]
        elif mentioned(part, _APPEARS):
            whats = ["appears"]
        events += [(subjects[0], what) for what in whats[:1]]
    return events


def true_events(things: list[Thing], events: list[Event]) -> list[tuple[tuple[str, str], str]]:
    """Result of `read_events` for a perfect answer."""
    return [(key(things[event["thing"]]), event["what"]) for event in events]


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
    texts = [describe_event(rng, things[event["thing"]], event["what"]) for event in ordered]
    count = sentence(rng, f"{NUMBERS[len(texts)]} things happen.", f"{NUMBERS[len(texts)]} in total.", "")
    listed = cast(rng, facts)
    if rng.random() < 0.5:
        return spoken([listed, *texts, count])
    return spoken([count, *texts, listed])


def _verbose(rng: Random, facts: Facts) -> str:
    things, events = facts["things"], facts["events"]
    ordered = events[::-1] if facts["backwards"] else events
    listed = joined([f"{a(thing['size'])} {name(thing)}" for thing in things])
    texts = [f"In this video there are {listed}."]
    for number, event in enumerate(ordered):
        place = len(events) - 1 - number if facts["backwards"] else number
        happened = describe_event(rng, things[event["thing"]], event["what"])
        texts.append(f"This is the {ORDINALS[place]} thing to happen: {happened}")
    return " ".join([*texts, f"So {NUMBERS[len(events)]} things happen in the video."])


def read_cast(answer: str) -> list[tuple[str, str, str]]:
    """Size, colour and form of the things in the sentence that lists them."""
    for part in sentences(answer):
        sizes, things = mentioned(part, ("small", "large")), named(part)
        if len(things) == len(sizes) >= 2:
            return [(size, *thing) for size, thing in zip(sizes, things, strict=True)]
    return []


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the events, of their order, and of the things with their first size."""
    stated, true = read_events(answer), true_events(facts["things"], facts["events"])
    ordered = true[::-1] if facts["backwards"] else true
    at_first = [(thing["size"], *key(thing)) for thing in facts["things"]]
    return {
        "event": overlap(stated, true),
        "order": in_order(stated, ordered),
        "cast": overlap(read_cast(answer), at_first),
    }


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.1)
