"""Task `receipt`: two to four printed lines with a word and a price, and their sum."""

import re
from random import Random

from PIL import Image, ImageDraw, ImageFont

from saccade.pocket.labels import IMAGE_SIZE, Labels, blank_labels, label_patch
from saccade.pocket.sample import Facts, Picture, Task, grammars
from saccade.pocket.scoring import overlap, pairs_stated, valued
from saccade.pocket.words import GOODS, NUMBERS, ORDINALS, QUESTIONS, difference, often_shuffled, sentence, spoken

# The bitmap font inside Pillow: no antialiasing and no FreeType, hence the same pixels everywhere.
FONT = ImageFont.load_default_imagefont()
_LETTER = 6  # pixels from one letter to the next
_PITCH = 17  # pixels from one line to the next
_PRICE_END = 90
PAPERS = ((250, 250, 250), (250, 244, 220), (225, 240, 250))
INKS = ((0, 0, 0), (20, 20, 120), (120, 10, 10))


class _Printer:
    """Printer of words and right-aligned numbers that labels the patches they cover."""

    def __init__(self, image: Image.Image, ink: tuple[int, int, int]) -> None:
        self.canvas = ImageDraw.Draw(image)
        self.canvas.fontmode = "1"
        self.ink = ink
        self.labels: Labels = blank_labels()

    def word(self, x: int, y: int, text: str, **labels: str) -> None:
        self.canvas.text((x, y), text, font=FONT, fill=self.ink)
        self._label(x, y, len(text), labels)

    def number(self, y: int, value: int, **labels: str) -> None:
        digits = str(value)
        start = _PRICE_END - _LETTER * len(digits)
        self.canvas.text((start, y), digits, font=FONT, fill=self.ink)
        if labels:
            self._label(start, y, len(digits), labels)
            return
        for i, digit in enumerate(digits):  # of a sum: digit by digit
            number = {"number": NUMBERS[int(digit)]} if digit != "0" else {}
            self._label(start + i * _LETTER, y, 1, number)

    def _label(self, x: int, y: int, letters: int, labels: dict[str, str]) -> None:
        for i in range(letters):
            label_patch(self.labels, x + i * _LETTER + _LETTER // 2, y + 5, **labels)


def paint(rng: Random) -> Picture:
    """Draw a receipt with prices from 1 to 9 dollars."""
    goods = rng.sample(GOODS, rng.randint(2, 4))
    prices = [rng.randint(1, 9) for _ in goods]
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.choice(PAPERS))
    printer = _Printer(image, rng.choice(INKS))
    margin, y = 4, rng.randint(2, 8)
    for item, price, ordinal in zip(goods, prices, ORDINALS[: len(goods)], strict=True):
        labels = {"word": item, "number": NUMBERS[price], "ordinal": ordinal}
        printer.word(margin, y, item.upper(), **labels)
        printer.number(y, price, **labels)
        y += _PITCH
    printer.canvas.line([(margin, y - 2), (IMAGE_SIZE - margin, y - 2)], fill=printer.ink)
    printer.word(margin, y, "SUM")
    printer.number(y, sum(prices))
    return Picture(image, {"goods": goods, "prices": prices, "total": sum(prices)}, printer.labels)


def _dense(rng: Random, facts: Facts) -> str:
    goods, prices, total = facts["goods"], facts["prices"], facts["total"]
    lines = list(range(len(goods)))
    texts = [sentence(rng, f"{NUMBERS[len(goods)]} items.", "the receipt lists these.", "")]
    for i in often_shuffled(rng, lines, 0.7):
        item, price = goods[i], NUMBERS[prices[i]]
        texts.append(
            sentence(
                rng,
                f"{item} costs {price}.",
                f"{price} dollars for {item}.",
                f"line number {NUMBERS[i + 1]} shows {item} at {price}.",
                f"the {item} is priced at {price}.",
                f"{price} is what the {item} costs.",
                f"the {ORDINALS[i]} line, {item}: {price}.",
            )
        )
        j = rng.choice([line for line in lines if line != i])
        luck = rng.random()
        if luck < 0.35:
            texts.append(f"The {item} costs {difference(prices[i], prices[j])} the {goods[j]}.")
        elif luck < 0.5:
            texts.append(f"The {item} and the {goods[j]} cost {NUMBERS[prices[i] + prices[j]]} together.")
    texts.append(
        rng.choice((f"The sum is {total} dollars.", f"In total {total} dollars.", f"{total} dollars in total."))
    )
    return spoken(texts)


def _verbose(rng: Random, facts: Facts) -> str:
    goods, prices, total = facts["goods"], facts["prices"], facts["total"]
    count = NUMBERS[len(goods)]
    texts = [
        sentence(
            rng,
            f"this receipt lists {count} items.",
            f"there are {count} items on the receipt.",
            f"the customer bought {count} items.",
        )
    ]
    for i, (item, price) in enumerate(zip(goods, prices, strict=True)):
        dollars = f"{NUMBERS[price]} {'dollar' if price == 1 else 'dollars'}"
        texts.append(
            sentence(
                rng,
                f"the {ORDINALS[i]} line shows {item} for {dollars}.",
                f"the {item} costs {dollars}.",
                f"line number {NUMBERS[i + 1]} is {item}, priced at {dollars}.",
            )
        )
    texts.append(
        rng.choice((f"The sum at the bottom is {total} dollars.", f"In total the customer paid {total} dollars."))
    )
    dear, cheap = goods[prices.index(max(prices))], goods[prices.index(min(prices))]
    texts.append(f"The most expensive item is the {dear}, and the cheapest one is the {cheap}.")
    return " ".join(texts)


_ASIDE = re.compile(r"line number \w+")
_TOTAL = re.compile(r"\b(\d+) dollars")


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Whether each line is mentioned once, the shares of words and of words with prices, and the sum."""
    stated = valued(answer, GOODS, _ASIDE)
    count, word, price = pairs_stated(stated, facts["goods"], facts["prices"])
    total = overlap(_TOTAL.findall(answer), [str(facts["total"])])
    return {"count": count, "word": word, "price": price, "total": total}


TASK = Task(paint, grammars(QUESTIONS["receipt"], _dense, _verbose), mark, share=0.25, decisive=r"(?i)\w+ items")
