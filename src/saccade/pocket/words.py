"""The closed vocabulary of the pocket world: colours, shapes, numbers, places and goods."""

from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Item = TypeVar("_Item")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 50),
    "purple": (150, 50, 190),
    "orange": (250, 140, 20),
    "white": (250, 250, 250),
    "cyan": (60, 220, 230),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "dark": (20, 20, 28),
    "grey": (120, 120, 124),
    "brown": (84, 56, 36),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
SIZES = ("small", "large")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
GOODS = ("tea", "milk", "rice", "cake", "soap", "corn", "ham", "jam", "pear", "fish", "salt", "plum")
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
NAMES = ("Ann", "Bob", "Eva", "Leo", "Mia", "Tom")
TOWNS = ("Cairo", "Delhi", "Lima", "Oslo", "Paris", "Rome")


def plural(noun: str, count: int) -> str:
    """`noun` in the number of `count`: `plural("cross", 2) == "crosses"`."""
    if count == 1:
        return noun
    return noun + ("es" if noun.endswith("s") else "s")


CONTENT = frozenset(
    word.lower()
    for group in (
        *(COLOURS, BACKGROUNDS, SHAPES, SIZES, ROWS, COLUMNS, GOODS, NUMBERS, ORDINALS),
        *([plural(noun, 2) for noun in nouns] for nouns in (SHAPES, GOODS)),
    )
    for word in group
)
"""Words that no answer can get right without looking."""


def joined(parts: list[str]) -> str:
    """The parts as an English list: "one, two and three"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def sentence(rng: Random, *phrasings: str) -> str:
    """One of the phrasings at random, capitalised."""
    chosen = rng.choice(phrasings)
    return chosen[:1].upper() + chosen[1:]


def shuffled(rng: Random, items: list[_Item]) -> list[_Item]:
    """A shuffled copy of `items`."""
    return rng.sample(items, len(items))


def a(noun: str) -> str:
    """The noun with its indefinite article: `a("orange ring") == "an orange ring"`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def difference(this: int, other: int) -> str:
    """Comparison of two numbers in words: `difference(5, 3) == "two more than"`."""
    if this == other:
        return "the same as"
    return f"{NUMBERS[abs(this - other)]} {'more' if this > other else 'less'} than"


IMAGE_SIZE = 96
PATCH_SIZE = 12
GRID = IMAGE_SIZE // PATCH_SIZE
IGNORED_LABEL = -100
"""Label of a patch without ground truth, which PyTorch's cross-entropy ignores."""

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

LABEL_CLASSES = {kind: 1 + len(words) for kind, words in LABEL_WORDS.items()}
"""Number of classes of each kind, including "nothing here"."""

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
