"""Task `report`: answers that alternate long certain stretches with stretches of open description.

The form decides a report's head and foot; between them are a text quoted from the question, a numbered list of the
picture's contents, and remarks in flowing prose. Within a stretch the next word is about as certain as the last.
"""

import re
from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import in_order, only, overlap, sentences
from saccade.pocket.shapes import at, label, name, render, scatter
from saccade.pocket.tasks import receipt
from saccade.pocket.words import (
    BACKGROUNDS,
    COLOURS,
    DAYS,
    GOODS,
    NAMES,
    NUMBERS,
    SHAPES,
    SIZES,
    TOWNS,
    plural,
    sentence,
)
from tools.pocket.world.prose import flowing, on_shape, plainly_on_shape, read_shapes, true_shape

HEADS = {
    "A": "This is form A, and it is to be read in full by everyone who has to know what the picture of the week shows",
    "B": "This is form B, which was made for all those who want to look at pictures but have nobody to show them",
    "C": "This is form C, and what it says is said in the order that the rules of the house ask for and in no other",
    "D": "This is form D, that we use when somebody has asked for a note on what there is to see and to find",
}
"""Form -> first sentence, without its full stop."""
FEET = {
    "A": "Here form A is at its end, and whoever has read it to this point knows all that we know of the picture",
    "B": "So much for form B, which you can keep, show to your friends, or take with you wherever you want to go",
    "C": "Form C ends with this line, and nobody is to write another word under it or to change what stands over it",
    "D": "With these words form D comes to its end, and we hope that it was of use to those who asked us for it",
}
"""Form -> last sentence, without its full stop."""
_QUOTABLE = (*GOODS, *TOWNS, *NAMES, *DAYS)
REMARKS = 2

Item = dict[str, Any]
"""Entry of the list: a shape, or a `word` with its `price`."""


def paint(rng: Random) -> Picture:
    """Draw a scene or a receipt, the form of the report, and the words to quote."""
    form, quote = rng.choice(list(HEADS)), rng.sample(_QUOTABLE, rng.randint(8, 14))
    if rng.random() < 0.5:
        things = scatter(rng, rng.randint(2, 4))
        image, labels, items = render(rng.choice(list(BACKGROUNDS)), things), label(things), things
    else:
        printed = receipt.paint(rng)
        image, labels = printed.image, printed.labels
        lines = zip(printed.facts["goods"], printed.facts["prices"], strict=True)
        items = [{"word": word, "price": price} for word, price in lines]
    return Picture(image, {"form": form, "quote": quote, "items": items}, labels)


def _quoted(facts: Facts) -> str:
    return f'"{", ".join(facts["quote"])}"'


def _question(rng: Random, facts: Facts) -> str:
    return sentence(
        rng,
        f"write form {facts['form']} on this picture, and quote {_quoted(facts)}.",
        f"make a report of form {facts['form']}. Its text is {_quoted(facts)}.",
        f"{_quoted(facts)} is the text for form {facts['form']}. Write it.",
        f"form {facts['form']}, please, with the text {_quoted(facts)}.",
    )


def _line(number: int, item: Item) -> str:
    what = (
        f"{item['word']} for {NUMBERS[item['price']]} {plural('dollar', item['price'])}"
        if "word" in item
        else f"a {item['size']} {name(item)} at the {at(item)}"
    )
    return f"line {NUMBERS[number]}, {what}"


def _list(facts: Facts) -> str:
    lines = "; ".join(_line(number, item) for number, item in enumerate(facts["items"], 1))
    return f"What the picture shows, line by line: {lines}; and that is the end of the list."


def _remark(rng: Random, item: Item) -> str:
    if "word" not in item:
        return on_shape(rng, item)
    word, price = item["word"], NUMBERS[item["price"]]
    clauses = [
        rng.choice(
            (
                f"which was bought for {price}",
                f"and it is priced at {price}",
                f"and what it costs is {price}",
                f"with {price} for its price",
                f"and to buy it you need {price}",
            )
        ),
        rng.choice(
            (
                f"and what I read there is {word}",
                f"with the word {word} on it",
                f"and its name, as I read it, is {word}",
                f"that we know as {word}",
                f"and somebody has bought {word} there",
            )
        ),
    ]
    return flowing(rng, clauses)


def _plain_remark(item: Item) -> str:
    if "word" not in item:
        return plainly_on_shape(item)
    price = NUMBERS[item["price"]]
    return f"On the receipt there is something to be read, and it is {item['word']}, and its price is {price}."


def _written(facts: Facts, remarks: list[str]) -> str:
    form = facts["form"]
    quote = f"The text that goes with it, word by word, is {_quoted(facts)}."
    return " ".join([f"{HEADS[form]}.", remarks[0], quote, remarks[1], _list(facts), f"{FEET[form]}."])


def _dense(rng: Random, facts: Facts) -> str:
    return _written(facts, [_remark(rng, item) for item in rng.sample(facts["items"], REMARKS)])


def _verbose(rng: Random, facts: Facts) -> str:
    return _written(facts, [_plain_remark(item) for item in facts["items"][:REMARKS]])


_QUOTE = re.compile(r'"([^"]*)"')
_SHAPE_LINE = re.compile(
    rf"line (\w+), an? ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) at the (\w+) (\w+)"
)
_WORD_LINE = re.compile(rf"line (\w+), ({'|'.join(GOODS)}) for ({'|'.join(NUMBERS)})\b")


def _true(item: Item) -> Any:
    return (item["word"], NUMBERS[item["price"]]) if "word" in item else true_shape(item)


def _remarked(answer: str) -> list[Any]:
    """Facts of the sentences on one shape, or on one word with its price."""
    text = _QUOTE.sub("", answer.lower())
    told: list[Any] = [*read_shapes(text)]
    for part in sentences(text):
        word, price = only(part, GOODS), only(part, NUMBERS)
        told += [(word, price)] if word and price else []
    return told


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Share of head and foot; shares of the quotation in order, of the list, and of correct remarks."""
    form, lower = facts["form"], answer.lower()
    ends = [HEADS[form], FEET[form]]
    quoted = [word for text in _QUOTE.findall(answer) for word in text.split(", ")]
    lines = [*_SHAPE_LINE.findall(lower), *_WORD_LINE.findall(lower)]
    true = [
        found
        for number, item in enumerate(facts["items"], 1)
        for found in (_WORD_LINE if "word" in item else _SHAPE_LINE).findall(_line(number, item))
    ]
    remarks = _remarked(answer)
    right = set(remarks) & {_true(item) for item in facts["items"]}
    return {
        "form": sum(answer.count(end) == 1 for end in ends) / len(ends),
        "quote": in_order(quoted, facts["quote"]),
        "list": overlap(lines, true),
        "remark": len(right) / max(len(remarks), REMARKS),
    }


TASK = Task(paint, grammars(_question, _dense, _verbose), mark, share=0.0, longest=384)
