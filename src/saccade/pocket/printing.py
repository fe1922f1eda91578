"""Printed words: the receipts' bitmap letters on the receipts' papers, for every task that prints."""

from collections.abc import Mapping, Sequence
from random import Random

from PIL import Image, ImageDraw

from saccade.pocket.labels import IMAGE_SIZE, Labels, blank_labels, tell
from saccade.pocket.receipt import _FONT as FONT
from saccade.pocket.receipt import _INKS as INKS
from saccade.pocket.receipt import _PAPERS as PAPERS

__all__ = ["FONT", "LETTER", "page"]

LETTER = 7  # pixels from one letter to the next: one more than on receipts, so that letters do not touch
_MARGIN, _PITCH = 5, 17


def page(
    rng: Random, title: str, lines: Sequence[tuple[str, str]], told: Sequence[Mapping[str, str]]
) -> tuple[Image.Image, Labels]:
    """A framed sheet with a title, a rule, and lines of a left-hand and a right-hand word; and its labels.

    Args:
        told: what to name in the patches of the title and of every line, as in `tell`.
    """
    ink = rng.choice(INKS)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.choice(PAPERS))
    canvas = ImageDraw.Draw(image)
    canvas.fontmode = "1"
    labels = blank_labels()

    def write(x: int, y: int, text: str, words: Mapping[str, str]) -> None:
        for i, letter in enumerate(text.upper()):
            canvas.text((x + i * LETTER, y), letter, font=FONT, fill=ink)
            tell(labels, x + i * LETTER + LETTER // 2, y + 5, **words)

    canvas.rectangle((0, 0, IMAGE_SIZE - 1, IMAGE_SIZE - 1), outline=ink)
    write((IMAGE_SIZE - LETTER * len(title)) // 2, 3, title, told[0])
    canvas.line([(_MARGIN, 16), (IMAGE_SIZE - _MARGIN, 16)], fill=ink)
    for i, (left, right) in enumerate(lines):
        y = 20 + i * _PITCH
        write(_MARGIN, y, left, told[i + 1])
        write(IMAGE_SIZE - _MARGIN - LETTER * len(right), y, right, told[i + 1])
    return image, labels
