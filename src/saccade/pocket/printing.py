"""Printed words: the receipts' bitmap letters on the receipts' papers, for every task that prints."""

from collections.abc import Sequence
from random import Random

from PIL import Image, ImageDraw

from saccade.pocket.receipt import _FONT as FONT
from saccade.pocket.receipt import _INKS as INKS
from saccade.pocket.receipt import _PAPERS as PAPERS
from saccade.pocket.sample import IMAGE_SIZE

__all__ = ["FONT", "LETTER", "page"]

LETTER = 7  # pixels from one letter to the next: one more than on receipts, so that letters do not touch
_MARGIN, _PITCH = 5, 17


def _write(canvas: ImageDraw.ImageDraw, x: int, y: int, text: str, ink: tuple[int, int, int]) -> None:
    for i, letter in enumerate(text.upper()):
        canvas.text((x + i * LETTER, y), letter, font=FONT, fill=ink)


def page(rng: Random, title: str, lines: Sequence[tuple[str, str]]) -> Image.Image:
    """A framed sheet with a title, a rule, and lines of a left-hand and a right-hand word."""
    ink = rng.choice(INKS)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.choice(PAPERS))
    canvas = ImageDraw.Draw(image)
    canvas.fontmode = "1"
    canvas.rectangle((0, 0, IMAGE_SIZE - 1, IMAGE_SIZE - 1), outline=ink)
    _write(canvas, (IMAGE_SIZE - LETTER * len(title)) // 2, 3, title, ink)
    canvas.line([(_MARGIN, 16), (IMAGE_SIZE - _MARGIN, 16)], fill=ink)
    for i, (left, right) in enumerate(lines):
        y = 20 + i * _PITCH
        _write(canvas, _MARGIN, y, left, ink)
        _write(canvas, IMAGE_SIZE - _MARGIN - LETTER * len(right), y, right, ink)
    return image
