"""What stands in every patch of a picture, by number: the vision tower is pre-trained to name it.

A label is one number for each kind in `LABEL_WORDS`; 0 is "nothing here".
"""

import numpy as np
from numpy.typing import NDArray

from saccade.pocket.words import (
    COLOURS,
    COLUMNS,
    DAYS,
    GOODS,
    NAMES,
    NUMBERS,
    ORDINALS,
    ROWS,
    SHAPES,
    SIZES,
    TOWNS,
)

IMAGE_SIZE = 96
PATCH_SIZE = 12
GRID = IMAGE_SIZE // PATCH_SIZE
IGNORED_LABEL = -100
"""The label of a patch that nobody has named (what PyTorch's cross-entropy leaves out)."""

Labels = NDArray[np.int64]

LABEL_WORDS: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": (*SHAPES, "bar"),
    "size": SIZES,
    "word": (*GOODS, *TOWNS, *NAMES, *DAYS),
    "number": NUMBERS[1:13],
    "row": ROWS,
    "column": COLUMNS,
    "ordinal": ORDINALS,
}
"""For every kind of label the words for its classes, from class 1 on.

What belongs together is told in every patch of it: a price with its item, a shape with the place that its centre
is in, a bar or a line with its number from the left or the top.
"""

LABEL_CLASSES = {kind: 1 + len(words) for kind, words in LABEL_WORDS.items()}
"""The number of classes of every kind, "nothing here" among them."""

_KINDS = list(LABEL_WORDS)


def tell(labels: Labels, x: int, y: int, **words: str) -> None:
    """Name what is in the patch around a pixel: one word for each kind that is given."""
    for kind, word in words.items():
        labels[y // PATCH_SIZE, x // PATCH_SIZE, _KINDS.index(kind)] = 1 + LABEL_WORDS[kind].index(word)


def blank_labels() -> Labels:
    """Labels of an empty picture, `[GRID, GRID, 8]`."""
    return np.zeros((GRID, GRID, len(LABEL_WORDS)), np.int64)


def no_labels() -> Labels:
    """Labels of a picture whose patches nobody has named."""
    return np.full((GRID, GRID, len(LABEL_WORDS)), IGNORED_LABEL, np.int64)
