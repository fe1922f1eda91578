"""Task `line`: line charts of five days with whole values from one to eight."""

import re
from random import Random

from PIL import Image, ImageDraw

from saccade.pocket.labels import IMAGE_SIZE, blank_labels, label_patch
from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import mentioned, numbers, overlap, sentences
from saccade.pocket.tasks.receipt import FONT
from saccade.pocket.words import COLOURS, DAYS, NUMBERS, QUESTIONS, a, difference, often_shuffled, sentence

_HIGHEST = 8
_UNIT, _FLOOR = 9, 80  # pixels for a value of one; y of zero
_AXIS, _LEFT, _STEP = 11, 20, 17


def paint(rng: Random) -> Picture:
    """Draw a line with a dot per day, the days' first letters below and even values at the left."""
    colour = rng.choice([hue for hue in COLOURS if hue not in ("white", "yellow")])
    values = [rng.randint(1, _HIGHEST) for _ in DAYS]
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (245, 245, 245))
    canvas = ImageDraw.Draw(image)
    canvas.fontmode = "1"
    for value in range(1, _HIGHEST + 1):
        y = _FLOOR - value * _UNIT
        canvas.line([(_AXIS, y), (IMAGE_SIZE - 1, y)], fill=(212, 212, 212))
        if value % 2 == 0:
            canvas.text((3, y - 5), str(value), font=FONT, fill=(0, 0, 0))
    canvas.line([(_AXIS, 4), (_AXIS, _FLOOR), (IMAGE_SIZE - 1, _FLOOR)], fill=(0, 0, 0))
    points = [(_LEFT + i * _STEP, _FLOOR - value * _UNIT) for i, value in enumerate(values)]
    canvas.line(points, fill=COLOURS[colour], width=3)
    labels = blank_labels()
    for (x, y), value, day in zip(points, values, DAYS, strict=True):
        canvas.ellipse((x - 4, y - 4, x + 4, y + 4), fill=COLOURS[colour])
        label_patch(labels, x, y, colour=colour, word=day, number=NUMBERS[value])
    for (x, _), day in zip(points, DAYS, strict=True):
        canvas.text((x - 6, _FLOOR + 3), day[:2].upper(), font=FONT, fill=(0, 0, 0))
        label_patch(labels, x, _FLOOR + 8, word=day)
    return Picture(image, {"colour": colour, "values": values}, labels)


def _dense(rng: Random, facts: Facts) -> str:
    colour, values = facts["colour"], facts["values"]
    texts = [sentence(rng, f"{a(colour)} line.", f"the line is {colour}.")]
    days = list(range(len(DAYS)))
    for i in often_shuffled(rng, days, 0.6):
        day, value = DAYS[i], NUMBERS[values[i]]
        texts.append(
            sentence(
                rng,
                f"{day} is {value}.",
                f"{value} on {day}.",
                f"on {day} it reaches {value}.",
                f"{day}: {value}.",
                f"the value of {day} is {value}.",
                f"{day} comes at {value}.",
                f"a height of {value} on {day}.",
            )
        )
        if i and rng.random() < 0.35:
            texts.append(f"{day} is {difference(values[i], values[i - 1])} {DAYS[i - 1]}.")
    high, low = values.index(max(values)), values.index(min(values))
    texts.append(
        sentence(
            rng,
            f"the highest is {DAYS[high]}, the lowest {DAYS[low]}.",
            f"highest on {DAYS[high]}, lowest on {DAYS[low]}.",
            f"from the highest, {DAYS[high]}, to the lowest, {DAYS[low]}.",
        )
    )
    return " ".join(texts)


def _verbose(rng: Random, facts: Facts) -> str:
    colour, values = facts["colour"], facts["values"]
    texts = [sentence(rng, f"this chart shows the values of five days with {a(colour)} line.")]
    for day, value in zip(DAYS, values, strict=True):
        texts.append(
            sentence(
                rng,
                f"on {day} the line stands at {NUMBERS[value]}.",
                f"the value of {day} is {NUMBERS[value]}.",
            )
        )
    high, low = values.index(max(values)), values.index(min(values))
    texts.append(f"The line is highest on {DAYS[high]} and lowest on {DAYS[low]}.")
    return " ".join(texts)


_SAID = tuple(day.lower() for day in DAYS)
_EXTREMES = re.compile(rf"highest\b.*?\b({'|'.join(_SAID)}).*?lowest\b.*?\b({'|'.join(_SAID)})")


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the colour is right, the share of days with the right value, and the two extremes."""
    stated: list[tuple[str, int]] = []
    colours: list[str] = []
    extremes: list[tuple[str, str]] = []
    for part in sentences(answer.replace(" five days", " days")):
        days, values = mentioned(part, _SAID), numbers(part)
        colours += mentioned(part, COLOURS)
        extremes += _EXTREMES.findall(part)
        if len(days) == len(values) == 1:
            stated.append((days[0], values[0]))
    values = facts["values"]
    true = list(zip(_SAID, values, strict=True))
    high, low = values.index(max(values)), values.index(min(values))
    best = [(_SAID[high], _SAID[low])]
    return {
        "colour": overlap(colours, [facts["colour"]]),
        "value": overlap(stated, true),
        "extremes": overlap(extremes, best),
    }


TASK = Task(
    paint, grammars(QUESTIONS["line"], _dense, _verbose), mark, share=0.06, decisive=r"(?i)(highest|lowest)[^.]*"
)
