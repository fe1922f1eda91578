"""What a tree policy has seen of a row counts for the turns of one conversation, and for no other prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES
from numerals import Numerals
from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.ensemble.views import Multimodal, Pruned, TextOnly
from saccade.draft.model import ModelDrafter, is_later_turn
from saccade.draft.pruning import PrunedDrafter, Pruning
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.policy import Chain, Growth, Proposer, StaticTree
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.target_model.adapter import Target
from saccade.verify.rule import Verdict

NAME = "llava"
EVEN = Pruning("uniform", keep_images=0.5)


@dataclass(frozen=True)
class Watched(Chain):
    """A chain that notes which rows were started anew."""

    restarted: list[int] = field(default_factory=list)

    def open(self, batch: int, device: torch.device) -> Any:
        return _Noting(self)


class _Noting:
    def __init__(self, policy: Watched) -> None:
        self._policy = policy

    def begin(self, rows: Sequence[int], roots: torch.Tensor, proposer: Proposer) -> Growth:
        return self._policy.begin(rows, roots, proposer)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        pass

    def restart(self, row: int) -> None:
        self._policy.restarted.append(row)


@cache
def target() -> Target:
    return Target(FAMILIES[NAME].model())


@cache
def draft() -> Target:
    return Target(FAMILIES[NAME].draft_model())


def drafter(kind: str, policy: Any) -> Any:
    if kind == "model":
        return ModelDrafter(draft(), policy)
    if kind == "pruned":
        return PrunedDrafter(draft(), policy, pruning=EVEN)
    views = [Pruned(EVEN), TextOnly(draft().config, Numerals()), Multimodal()]
    return EnsembleDrafter(draft(), policy, views)


def asked(row: int, kind: str = "image") -> Prompt:
    return split(target().config, FAMILIES[NAME].row_inputs(kind, row))[0]


def next_turn(row: int, answer: list[int]) -> Prompt:
    return split(target().config, FAMILIES[NAME].continued("image", row, answer, follow_up="text"))[0]


def ask(engine: Engine, session: Any, prompts: list[Prompt]) -> list[Output]:
    return engine.generate([Request(p) for p in prompts], max_new_tokens=12, session=session)


@pytest.mark.parametrize("kind", ["model", "pruned", "ensemble"])
def test_only_rows_with_a_new_prompt_start_anew(kind: str) -> None:
    policy = Watched(3)
    engine = Engine(target(), drafter(kind, policy))
    session = engine.open(2)
    answers = ask(engine, session, [asked(0), asked(1)])
    policy.restarted.clear()
    ask(engine, session, [next_turn(0, answers[0].tokens), next_turn(1, answers[1].tokens)])
    assert policy.restarted == []
    first_ids = asked(1).ids[:2]
    ask(engine, session, [next_turn(0, answers[0].tokens), Prompt((*first_ids, *asked(0).ids[-4:]))])
    assert set(policy.restarted) == {0, 1}, "the same turn again, and the same beginning only, are new prompts"


def test_the_same_words_about_another_picture_are_a_new_prompt() -> None:
    policy = Watched(3)
    engine = Engine(target(), drafter("ensemble", policy))
    session = engine.open(1)
    inputs = FAMILIES[NAME].row_inputs("image", 0)
    other = split(target().config, {**inputs, "pixel_values": inputs["pixel_values"].neg()})[0]
    ask(engine, session, [asked(0)])
    policy.restarted.clear()
    ask(engine, session, [other])
    assert set(policy.restarted) == {0}


def test_a_later_turn_begins_with_all_of_the_earlier_one() -> None:
    (seen,) = asked(0).media
    (other,) = asked(1).media
    earlier = Prompt((1, 5, 6, 7), (seen,))
    assert is_later_turn(earlier, Prompt((1, 5, 6, 7, 8), (seen,)))
    assert is_later_turn(earlier, Prompt((1, 5, 6, 7, 8), (seen, other)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 9, 8), (seen,)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 7), (seen,)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 7, 8), (other, seen)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 7, 8)))


def course(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.marks, output.stats.accepted_histogram, output.stats.drafted_tokens


@pytest.mark.parametrize("kind", ["model", "pruned", "ensemble"])
def test_sage_drafts_for_a_new_prompt_as_if_it_were_the_first(kind: str) -> None:
    engine = Engine(target(), drafter(kind, SageTree(window=2, ceiling=9)))
    session: Any = engine.open(1)
    (answer,) = ask(engine, session, [asked(0)])
    (again,) = ask(engine, session, [asked(1)])
    (fresh,) = ask(engine, engine.open(1), [asked(1)])
    assert course(again) == course(fresh)
    session = engine.open(1)
    ask(engine, session, [asked(0)])
    shaping = getattr(session.drafting, "_session", session.drafting)._shaping
    shaping = getattr(shaping, "_shaping", shaping)
    shaping._catch_up(shaping._rows[0])
    before = shaping._rows[0]
    assert not before.starting
    session.drafting.load(0, next_turn(0, answer.tokens), None)
    assert shaping._rows[0] is before
    session.drafting.load(0, asked(2), None)
    assert shaping._rows[0].starting
    assert not shaping._rows[0].lengths


@pytest.mark.parametrize("policy", [Chain(2), StaticTree(), DynamicTree(), WidthTree(), SageTree()])
def test_every_policy_can_start_a_row_anew(policy: Any) -> None:
    shaping = policy.open(2, torch.device("cpu"))
    shaping.restart(1)
