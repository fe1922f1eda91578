"""Engines over the tiny families, built once per process, and how their outputs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from families import FAMILIES, MAX_NEW_TOKENS, FamilyCase, Inputs
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.target_model.adapter import Target

POLICIES: dict[str, Any] = {
    "chain": Chain(4),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]),
    "dynamic": DynamicTree(top=3, max_depth=4, total=12),
}
METHODS = ("plain", *POLICIES)


@cache
def target(name: str) -> Target:
    """The family's target under test (the reference has a copy of its own)."""
    return Target(FAMILIES[name].model())


@cache
def draft(name: str) -> Target:
    return Target(FAMILIES[name].draft_model())


@cache
def engine(name: str, method: str) -> Engine:
    """``method``: plain, lookup, or the name of a tree policy for the family's draft model."""
    if method == "plain":
        return Engine(target(name))
    if method == "lookup":
        return Engine(target(name), PromptLookup())
    return Engine(target(name), ModelDrafter(draft(name), POLICIES[method]))


def prompts(case: FamilyCase, inputs: Inputs) -> list[Prompt]:
    """The rows of a Hugging Face batch for the family's models."""
    return split(target(case.name).config, inputs)


def requests(name: str, kind: str | None = None, rows: int = 3) -> list[Request]:
    """Rows of a family's prompts of one kind, by default its first."""
    case = FAMILIES[name]
    return [Request(prompt) for prompt in prompts(case, case.inputs(kind or case.kinds[0], rows))]


def run(name: str, method: str, inputs: Inputs, n: int = MAX_NEW_TOKENS, **options: Any) -> list[Output]:
    """The engine's outputs for all rows of a Hugging Face batch."""
    rows = [Request(prompt) for prompt in prompts(FAMILIES[name], inputs)]
    return engine(name, method).generate(rows, max_new_tokens=n, **options)


def assert_equals_generate(
    method: Engine, name: str, kind: str | None = None, rows: int = 3, n: int = 24
) -> list[Output]:
    """Compare an engine's greedy answers with those of `generate`; return its outputs."""
    kind = kind or FAMILIES[name].kinds[0]
    outputs: list[Output] = method.generate(requests(name, kind, rows), max_new_tokens=n)
    assert tokens(outputs) == FAMILIES[name].reference(kind, rows, n=n)
    return outputs


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


def assert_partly_accepted(outputs: Sequence[Output]) -> None:
    """Without accepted and rejected drafts, equality would say nothing about the tree path."""
    for output in outputs:
        stats = output.stats
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert stats.target_passes < len(output.tokens) - 1


def course(output: Output) -> tuple[Any, ...]:
    """The answer's tokens, and which of them were drafted in which pass."""
    return output.tokens, output.marks, output.stats.accepted_histogram, output.stats.drafted_tokens
