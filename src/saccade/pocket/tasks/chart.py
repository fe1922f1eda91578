"""Task `chart`: bar charts of three to six coloured bars with whole values from one to eight."""

import re
from random import Random

from PIL import Image, ImageDraw

from saccade.pocket.labels import IMAGE_SIZE, PATCH_SIZE, blank_labels, label_patch
from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import in_order, mentioned, pairs_stated, valued
from saccade.pocket.words import COLOURS, NUMBERS, ORDINALS, QUESTIONS, difference, often_shuffled, sentence, spoken

HIGHEST = 8
_UNIT = 10  # pixels for a value of one
_FLOOR = 92  # the line that the bars stand on
_LEFT = 6


def paint(rng: Random) -> Picture:
    """A bar chart with grid lines at the whole values."""
    count = rng.randint(3, 6)
    colours = rng.sample([name for name in COLOURS if name != "white"], count)
    values = [rng.randint(1, HIGHEST) for _ in range(count)]
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (245, 245, 245))
    canvas = ImageDraw.Draw(image)
    for value in range(1, HIGHEST + 1):
        canvas.line([(3, _FLOOR - value * _UNIT), (IMAGE_SIZE - 1, _FLOOR - value * _UNIT)], fill=(212, 212, 212))
    canvas.line([(3, 4), (3, _FLOOR)], fill=(0, 0, 0))
    canvas.line([(3, _FLOOR), (IMAGE_SIZE - 1, _FLOOR)], fill=(0, 0, 0))
    labels = blank_labels()
    for i, (colour, value) in enumerate(zip(colours, values, strict=True)):
        left = _LEFT + i * (IMAGE_SIZE - _LEFT) // count
        right = left + (IMAGE_SIZE - _LEFT) * 13 // (20 * count)
        top = _FLOOR - value * _UNIT
        canvas.rectangle((left, top, right, _FLOOR - 1), fill=COLOURS[colour])
        for y in range(top, IMAGE_SIZE, PATCH_SIZE):
            words = {"colour": colour, "shape": "bar", "number": NUMBERS[value], "ordinal": ORDINALS[i]}
            label_patch(labels, (left + right) // 2, y, **words)
    return Picture(image, {"colours": colours, "values": values}, labels)


def _dense(rng: Random, facts: Facts) -> str:
    colours, values = facts["colours"], facts["values"]
    bars = list(range(len(values)))
    count = NUMBERS[len(bars)]
    texts = [sentence(rng, f"{count} bars.", f"the chart has {count} bars.", "")]
    for i in often_shuffled(rng, bars, 0.7):
        colour, value = colours[i], NUMBERS[values[i]]
        texts.append(
            sentence(
                rng,
                f"{colour} is {value}.",
                f"{value} for {colour}.",
                f"the {ORDINALS[i]} bar, {colour}, reaches {value}.",
                f"{colour} comes {ORDINALS[i]} at {value}.",
                f"a height of {value} for the {colour} bar.",
                f"bar number {NUMBERS[i + 1]} is {colour}: {value}.",
                f"the value of {colour} is {value}.",
            )
        )
        j = rng.choice([bar for bar in bars if bar != i])
        luck = rng.random()
        if luck < 0.35:
            texts.append(sentence(rng, f"{colour} is {difference(values[i], values[j])} {colours[j]}."))
        elif luck < 0.5:
            texts.append(sentence(rng, f"{colour} and {colours[j]} make {NUMBERS[values[i] + values[j]]}."))
    ranked = ", ".join(colours[i] for i in sorted(bars, key=lambda i: (values[i], i)))
    texts.append(sentence(rng, "from the lowest to the highest: ", "by height: ") + ranked + ".")
    return spoken(texts)


def _verbose(rng: Random, facts: Facts) -> str:
    colours, values = facts["colours"], facts["values"]
    count = NUMBERS[len(values)]
    texts = [
        sentence(
            rng,
            f"this bar chart contains {count} bars.",
            f"the chart has {count} bars of different colours.",
            f"{count} bars are shown in this chart.",
        )
    ]
    for i, (colour, value) in enumerate(zip(colours, values, strict=True)):
        height = NUMBERS[value]
        if i and rng.random() < 0.4:
            step = difference(value, values[i - 1])
            texts.append(f"The {ORDINALS[i]} bar is {colour} and reaches {height}, which is {step} the one before.")
        else:
            texts.append(
                sentence(
                    rng,
                    f"the {ORDINALS[i]} bar is {colour} and has a value of {height}.",
                    f"the {colour} bar comes {ORDINALS[i]} with a height of {height}.",
                    f"bar number {NUMBERS[i + 1]}, in {colour}, stands at {height}.",
                )
            )
    high, low = values.index(max(values)), values.index(min(values))
    texts.append(
        f"The tallest bar is the {colours[high]} one at {NUMBERS[values[high]]}, "
        f"while the shortest is {colours[low]} at {NUMBERS[values[low]]}."
    )
    return " ".join(texts)


_ASIDE = re.compile(r"bar number \w+|, which is .*")
_RANKED = re.compile(r"(?:from the lowest to the highest|by height):([^.]*)")
_ENDS = re.compile(r"tallest bar is the (\w+)[^.]* shortest is (\w+)")


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether each bar is mentioned once, the shares of colours and of bars with the right value, and their order."""
    colours, values = facts["colours"], facts["values"]
    count, colour, value = pairs_stated(valued(answer, COLOURS, _ASIDE), colours, values)
    bars = sorted(range(len(values)), key=lambda i: (values[i], i))
    ranked = [colours[i] for i in bars]
    text = answer.lower()
    stated = mentioned(" ".join(_RANKED.findall(text)), COLOURS)
    if ends := _ENDS.findall(text):
        stated = [name for pair in ends for name in pair]
        ranked = [colours[values.index(max(values))], ranked[0]]
    return {"count": count, "colour": colour, "value": value, "order": in_order(stated, ranked)}


TASK = Task(paint, grammars(QUESTIONS["chart"], _dense, _verbose), mark, share=0.3)
