"""Targets and draft models that tests share and do not change, and their prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

from families import FAMILIES
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.target_model.adapter import Target


@cache
def target(name: str) -> Target:
    return Target(FAMILIES[name].model())


@cache
def draft(name: str) -> Target:
    return Target(FAMILIES[name].draft_model())


def prompts(name: str, kind: str = "image", rows: int = 3) -> list[Prompt]:
    return split(target(name).config, FAMILIES[name].inputs(kind, rows))


def prompt(name: str, kind: str = "image", row: int = 0) -> Prompt:
    return split(target(name).config, FAMILIES[name].row_inputs(kind, row))[0]


def generate(engine: Engine, prompts: list[Prompt], session: Any = None, new: int = 20, **options: Any) -> list[Output]:
    return engine.generate([Request(p) for p in prompts], max_new_tokens=new, session=session, **options)


def course(output: Output) -> tuple[Any, ...]:
    """What two generations have in common whose drafters drafted alike."""
    return output.tokens, output.marks, output.stats.accepted_histogram, output.stats.drafted_tokens
