"""Labels of the patches of a picture, for pre-training of the vision tower."""

import numpy as np
from numpy.typing import NDArray

from saccade.pocket.words import COLOURS, COLUMNS, DAYS, GOODS, NAMES, NUMBERS, ORDINALS, ROWS, SHAPES, SIZES, TOWNS

IMAGE_SIZE = 96
PATCH_SIZE = 12
GRID = IMAGE_SIZE // PATCH_SIZE
IGNORED_LABEL = -100  # label of a patch without ground truth, which PyTorch's cross-entropy ignores

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
"""Kind of label -> words for its classes, from class 1 on.

All patches of an object have the object's labels: a price with its item, a shape with the cell of its centre, a bar or
a line with its number from the left or the top.
"""

_KINDS = list(LABEL_WORDS)


def label_patch(labels: Labels, x: int, y: int, **words: str) -> None:
    """Label the patch around a pixel with one word for each given kind."""
    for kind, word in words.items():
        labels[y // PATCH_SIZE, x // PATCH_SIZE, _KINDS.index(kind)] = 1 + LABEL_WORDS[kind].index(word)


def blank_labels() -> Labels:
    """Labels of an empty picture, `[GRID, GRID, 8]`."""
    return np.zeros((GRID, GRID, len(LABEL_WORDS)), np.int64)


def no_labels() -> Labels:
    """Labels of a picture without ground truth for its patches."""
    return np.full((GRID, GRID, len(LABEL_WORDS)), IGNORED_LABEL, np.int64)
