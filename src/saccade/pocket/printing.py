"""Printed words: the receipts' bitmap letters on the receipts' papers, for every task that prints."""

from collections.abc import Sequence
from random import Random

from PIL import Image, ImageDraw

from saccade.pocket.receipt import _FONT as FONT
from saccade.pocket.receipt import _INKS as INKS
from saccade.pocket.receipt import _PAPERS as PAPERS
from saccade.pocket.sample import IMAGE_SIZE

__all__ = ["FONT", "LETTER", "page"]

LETTER = 6  # pixels from one letter to the next
_MARGIN, _PITCH = 5, 17


def page(rng: Random, title: str, lines: Sequence[tuple[str, str]]) -> Image.Image:
    """A framed sheet with a title, a rule, and lines of a left-hand and a right-hand word."""
    ink = rng.choice(INKS)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.choice(PAPERS))
    canvas = ImageDraw.Draw(image)
    canvas.fontmode = "1"
    canvas.rectangle((0, 0, IMAGE_SIZE - 1, IMAGE_SIZE - 1), outline=ink)
    canvas.text(((IMAGE_SIZE - LETTER * len(title)) // 2, 3), title.upper(), font=FONT, fill=ink)
    canvas.line([(_MARGIN, 16), (IMAGE_SIZE - _MARGIN, 16)], fill=ink)
    for i, (left, right) in enumerate(lines):
        y = 20 + i * _PITCH
        canvas.text((_MARGIN, y), left.upper(), font=FONT, fill=ink)
        start = IMAGE_SIZE - _MARGIN - LETTER * len(right)
        canvas.text((start, y), right.upper(), font=FONT, fill=ink)
    return image
