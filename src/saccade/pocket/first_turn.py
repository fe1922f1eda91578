"""What second turns come after: a picture with its question and true answer."""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from PIL import Image

from saccade.pocket.sample import Facts, Grammar, Media, draw

FIRST_TASKS = ("chart", "receipt", "scene")
_FIRST_SEED, _LAST_SEED = 10**6, 2**48  # never those that tests and evaluation draw first turns from

Earlier = Mapping[str, int | str]


def start(rng: Random) -> tuple[Image.Image, Facts, Earlier]:
    """A picture of one of the first tasks, its facts, and the names to draw its turn by."""
    task = rng.choice(FIRST_TASKS)
    seed = rng.randrange(_FIRST_SEED, _LAST_SEED)
    sample = draw(seed, task)
    return sample.image, sample.facts, {"task": task, "seed": seed}


def _earlier(grammar: str, facts: Facts) -> tuple[tuple[str, str], ...]:
    first = facts["first"]
    sample = draw(first["seed"], first["task"], grammar)
    return ((sample.question, sample.answer),)


def grammars(
    question: Callable[[Random, Facts], str],
    dense: Callable[[Random, Facts], str],
    verbose: Callable[[Random, Facts], str],
) -> dict[str, Grammar]:
    """Both grammars of a second turn; the first turn is told in the same one."""
    return {
        "dense": Grammar(question, dense, partial(_earlier, "dense")),
        "verbose": Grammar(
            lambda rng, facts: f"{question(rng, facts)} Use full sentences.",
            verbose,
            partial(_earlier, "verbose"),
        ),
    }


def second(rng: Random, facts: Facts) -> Media:
    """A text-only second turn after any first one: the picture is there, and of no use."""
    image, _, first = start(rng)
    return Media({**facts, "first": first}, (image,))
