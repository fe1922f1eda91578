"""Wordings of the tasks, which `phrases.toml` lists, and the words that fill them in."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from saccade.pocket.shapes import Thing, at, name
from saccade.pocket.words import a

PHRASES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Task -> phrase -> wordings."""


def wordings(task: str) -> Callable[..., str]:
    """A function that says a phrase of a task in one of its wordings at random, filled in and capitalised."""

    def say(rng: Random, phrase: str, **words: Any) -> str:
        chosen: str = rng.choice(PHRASES[task][phrase]).format(**words)
        return chosen[:1].upper() + chosen[1:]

    return say


def words_for(thing: Thing) -> dict[str, Any]:
    """The words that phrases have for a shape: its properties, name and place, and its colour with an article."""
    return {**thing, "name": name(thing), "place": at(thing), "hue": a(thing["colour"])}
