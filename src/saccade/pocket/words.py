"""The closed vocabulary of the pocket world: colours, shapes, numbers, places and goods."""

from collections.abc import Iterable
from random import Random
from typing import TypeVar

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


QUESTIONS = {
    "chart": (
        "Read the values from the bar chart.",
        "What does this chart show?",
        "Explain the bar chart.",
        "What are the values in this chart?",
    ),
    "receipt": (
        "Read the receipt.",
        "What was bought and for how much?",
        "Explain the receipt.",
        "What does this receipt say?",
    ),
    "scene": (
        "Describe the picture.",
        "What can you see in this image?",
        "List every shape and say where it is.",
        "What is drawn here?",
    ),
    "line": (
        "Read the values from the line chart.",
        "What does the line show on every day?",
        "Explain the line chart.",
        "What are the values of the days?",
    ),
}
"""Questions of the tasks with one picture."""


def plural(noun: str, count: int) -> str:
    """`noun` in the number of `count`: `plural("cross", 2) == "crosses"`."""
    if count == 1:
        return noun
    return noun + ("es" if noun.endswith("s") else "s")


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


def often_shuffled(rng: Random, items: list[_Item], chance: float) -> list[_Item]:
    """The items, shuffled with a probability."""
    if rng.random() < chance:
        return shuffled(rng, items)
    return items


def spoken(sentences: Iterable[str]) -> str:
    """The sentences of an answer, empty ones left out."""
    return " ".join(text for text in sentences if text)


def a(noun: str) -> str:
    """The noun with its indefinite article: `a("orange ring") == "an orange ring"`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def difference(this: int, other: int) -> str:
    """Comparison of two numbers in words: `difference(5, 3) == "two more than"`."""
    if this == other:
        return "the same as"
    return f"{NUMBERS[abs(this - other)]} {'more' if this > other else 'less'} than"
