"""What stands in every patch of a picture, by number: the vision tower is pre-trained to name it.

A label is four numbers, one for each kind in `LABEL_WORDS`; 0 is "nothing here".
"""

import numpy as np
from numpy.typing import NDArray

from saccade.pocket.words import COLOURS, DAYS, GOODS, NAMES, NUMBERS, SHAPES, SIZES, TOWNS

IMAGE_SIZE = 96
PATCH_SIZE = 12
GRID = IMAGE_SIZE // PATCH_SIZE
IGNORED_LABEL = -100
"""The label of a patch that nobody has named (what PyTorch's cross-entropy leaves out)."""

Labels = NDArray[np.int64]

LABEL_WORDS: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": (*SHAPES, "bar"),
    "word": (*SIZES, *GOODS, *TOWNS, *NAMES, *DAYS),
    "number": NUMBERS[1:13],
}
"""For every kind of label the words for its classes, from class 1 on."""

LABEL_CLASSES = {kind: 1 + len(words) for kind, words in LABEL_WORDS.items()}
"""The number of classes of every kind, "nothing here" among them."""

_SHORTEST_WORD = 3
_WORD_CLASS = {word.lower(): 1 + i for i, word in enumerate(LABEL_WORDS["word"])}


def word_label(printed: str) -> int:
    """The class of a printed word, also of a day's first letters; 0 for a word without one."""
    found = [number for word, number in _WORD_CLASS.items() if word.startswith(printed.lower())]
    return found[0] if len(found) == 1 and len(printed) >= _SHORTEST_WORD else 0


def blank_labels() -> Labels:
    """Labels of an empty picture, `[GRID, GRID, 4]`."""
    return np.zeros((GRID, GRID, len(LABEL_WORDS)), np.int64)


def no_labels() -> Labels:
    """Labels of a picture whose patches nobody has named."""
    return np.full((GRID, GRID, len(LABEL_WORDS)), IGNORED_LABEL, np.int64)
