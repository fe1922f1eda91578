"""Task `document`: train tables with towns and hours, and notes from one person to another."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from saccade.pocket.labels import IMAGE_SIZE, Labels, blank_labels, label_patch
from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import numbers, only, overlap, sentences
from saccade.pocket.tasks.receipt import FONT, INKS, PAPERS
from saccade.pocket.words import DAYS, GOODS, NAMES, NUMBERS, ORDINALS, TOWNS, sentence, shuffled

_LETTER = 7  # pixels per letter, one more than on receipts, so that letters do not touch
_MARGIN, _PITCH = 5, 17


def _page(
    rng: Random, title: str, lines: Sequence[tuple[str, str]], told: Sequence[Mapping[str, str]]
) -> tuple[Image.Image, Labels]:
    """A framed sheet with a title, a rule, and lines of a left-hand and a right-hand word, and its labels."""
    ink = rng.choice(INKS)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.choice(PAPERS))
    canvas = ImageDraw.Draw(image)
    canvas.fontmode = "1"
    labels = blank_labels()

    def write(x: int, y: int, text: str, words: Mapping[str, str]) -> None:
        for i, letter in enumerate(text.upper()):
            canvas.text((x + i * _LETTER, y), letter, font=FONT, fill=ink)
            label_patch(labels, x + i * _LETTER + _LETTER // 2, y + 5, **words)

    canvas.rectangle((0, 0, IMAGE_SIZE - 1, IMAGE_SIZE - 1), outline=ink)
    write((IMAGE_SIZE - _LETTER * len(title)) // 2, 3, title, told[0])
    canvas.line([(_MARGIN, 16), (IMAGE_SIZE - _MARGIN, 16)], fill=ink)
    for i, (left, right) in enumerate(lines):
        y = 20 + i * _PITCH
        write(_MARGIN, y, left, told[i + 1])
        write(IMAGE_SIZE - _MARGIN - _LETTER * len(right), y, right, told[i + 1])
    return image, labels


def _printed(
    rng: Random, title: str, lines: list[tuple[str, str]], told: list[dict[str, str]], facts: Facts
) -> Picture:
    first, *rest = told
    numbered = [{**words, "ordinal": ordinal} for words, ordinal in zip(rest, ORDINALS[: len(rest)], strict=True)]
    image, labels = _page(rng, title, lines, [first, *numbered])
    return Picture(image, facts, labels)


def paint(rng: Random) -> Picture:
    """Draw a train table of three or four towns, or a note."""
    if rng.random() < 0.5:
        towns = rng.sample(TOWNS, rng.randint(3, 4))
        hours = rng.sample(range(1, 13), len(towns))
        lines = [(town, str(hour)) for town, hour in zip(towns, hours, strict=True)]
        told = [{}, *({"word": t, "number": NUMBERS[h]} for t, h in zip(towns, hours, strict=True))]
        facts: dict[str, Any] = {"kind": "trains", "towns": towns, "hours": hours}
        return _printed(rng, "trains", lines, told, facts)
    writer, reader = rng.sample(NAMES, 2)
    day, hour, item = rng.choice(DAYS), rng.randint(1, 12), rng.choice(GOODS)
    lines = [("to", reader), ("day", day[:3]), ("hour", str(hour)), ("bring", item)]
    values = {"word": reader}, {"word": day}, {"number": NUMBERS[hour]}, {"word": item}
    facts = {"kind": "note", "from": writer, "to": reader, "day": day, "hour": hour, "bring": item}
    return _printed(rng, f"from {writer}", lines, [{"word": writer}, *values], facts)


def _train(rng: Random, town: str, hour: str) -> str:
    return sentence(
        rng,
        f"{town} at {hour}.",
        f"the train to {town} leaves at {hour}.",
        f"at {hour} there is a train to {town}.",
        f"{hour} is the hour for {town}.",
        f"to {town}: {hour}.",
        f"for {town} it says {hour}.",
        f"the line with {town} shows {hour}.",
    )


def _note(rng: Random, facts: Facts) -> list[str]:
    hour = NUMBERS[facts["hour"]]
    return [
        sentence(rng, f"from {facts['from']}.", f"the note is from {facts['from']}."),
        sentence(rng, f"to {facts['to']}.", f"it goes to {facts['to']}.", f"{facts['to']} is to read it."),
        sentence(rng, f"on {facts['day']}.", f"the day is {facts['day']}.", f"{facts['day']} is the day."),
        sentence(rng, f"at {hour}.", f"the hour is {hour}.", f"it says {hour}.", f"{hour} is the hour."),
        sentence(
            rng,
            f"bring {facts['bring']}.",
            f"there should be {facts['bring']}.",
            f"{facts['bring']} is what to bring.",
            f"the {facts['bring']} is to be there, too.",
        ),
    ]


def _dense(rng: Random, facts: Facts) -> str:
    if facts["kind"] == "note":
        told = ["", *shuffled(rng, _note(rng, facts))]
    else:
        rows = [(t, NUMBERS[h]) for t, h in zip(facts["towns"], facts["hours"], strict=True)]
        told = [sentence(rng, f"{NUMBERS[len(rows)]} trains.", "a table of trains.", "")]
        told += [_train(rng, *row) for row in (shuffled(rng, rows) if rng.random() < 0.7 else rows)]
        ranked = sorted(zip(facts["hours"], facts["towns"], strict=True))
        told.append(sentence(rng, "in order: ", "by the hour: ") + ", ".join(t for _, t in ranked) + ".")
    return " ".join(part for part in told if part)


def _verbose(rng: Random, facts: Facts) -> str:
    if facts["kind"] == "note":
        return (
            f"This is a note from {facts['from']}. It goes to {facts['to']}. The day on the note is "
            f"{facts['day']}. The hour on the note is {NUMBERS[facts['hour']]}. "
            f"{facts['to']} should bring {facts['bring']}."
        )
    told = [f"This document is a table of {NUMBERS[len(facts['towns'])]} trains."]
    told += [
        sentence(
            rng,
            f"the train to {town} leaves at {NUMBERS[hour]}.",
            f"at {NUMBERS[hour]} a train leaves to {town}.",
        )
        for town, hour in zip(facts["towns"], facts["hours"], strict=True)
    ]
    ranked = sorted(zip(facts["hours"], facts["towns"], strict=True))
    told.append(f"The first train of the day goes to {ranked[0][1]}, and the last one to {ranked[-1][1]}.")
    return " ".join(told)


def _lower(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.lower() for word in words)


_FIELDS: dict[str, Callable[[str], str | None]] = {
    "day": lambda part: only(part, _lower(DAYS)),
    "bring": lambda part: only(part, GOODS),
    "from": lambda part: only(part, _lower(NAMES)) if "from" in part else None,
    "to": lambda part: only(part, _lower(NAMES)) if "from" not in part and "bring" not in part else None,
}


def _read(answer: str) -> list[tuple[str, str]]:
    told = []
    for part in sentences(answer):
        town, hours = only(part, _lower(TOWNS)), numbers(part)
        if town and len(hours) == 1:
            told.append((town, NUMBERS[hours[0]]))
            continue
        found = [(field, read(part)) for field, read in _FIELDS.items()]
        told += [(field, value) for field, value in found if value]
        if len(hours) == 1 and "train" not in part:
            told.append(("hour", NUMBERS[hours[0]]))
    return told


def _words(told: list[tuple[str, str]]) -> list[str]:
    """Printed words without the names of fields, which all notes have."""
    return [word for pair in told for word in pair if word not in (*_FIELDS, "hour")]


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the words read, and of the lines with all their words."""
    told = _read(answer)
    if facts["kind"] == "note":
        true = [(field, str(facts[field]).lower()) for field in ("from", "to", "day", "bring")]
        true.append(("hour", NUMBERS[facts["hour"]]))
    else:
        true = [(t.lower(), NUMBERS[h]) for t, h in zip(facts["towns"], facts["hours"], strict=True)]
    return {"word": overlap(_words(told), _words(true)), "line": overlap(told, true)}


_QUESTIONS = (
    "Read the document.",
    "What does this document say?",
    "What is written here?",
    "Tell me every line of this document.",
)
TASK = Task(paint, grammars(_QUESTIONS, _dense, _verbose), mark, share=0.06)
