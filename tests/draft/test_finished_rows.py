"""Rows of a batch that have ended decide nothing: how long the drafter runs, what is guessed, what is remembered."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES
from numerals import Numerals
from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.ensemble.views import Multimodal, TextOnly
from saccade.draft.ensemble.weights import Fixed
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import ConfidentChain
from saccade.draft.trees.sage import SageSession, SageTree
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target

NAME, NEW = "llama", 40
SHORT, LONG = Prompt((1, 20, 21, 22)), Prompt((1, 50, 61, 72, 33))
POLICIES = {"confident": ConfidentChain(6, 0.6), "sage": SageTree()}


@cache
def target() -> Target:
    return Target(FAMILIES[NAME].model())


@cache
def draft() -> Target:
    return Target(FAMILIES[NAME].draft_model())


class Counted:
    """A drafter whose policy is asked for every frontier that is run."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.frontiers: list[tuple[int, ...]] = []
        self.shaping: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def open(self, batch: int, device: torch.device) -> Any:
        self.shaping = self._policy.open(batch, device)
        return self

    def restart(self, row: int) -> None:
        self.shaping.restart(row)

    def observe(self, rows: Any, verdict: Any) -> None:
        self.shaping.observe(rows, verdict)

    def begin(self, rows: Any, roots: torch.Tensor, proposer: Any) -> Any:
        growth, frontiers = self.shaping.begin(rows, roots, proposer), self.frontiers

        class Growing:
            def expand(self, logits: torch.Tensor) -> Any:
                frontier = growth.expand(logits)
                if frontier is not None:
                    frontiers.append((frontier.depth, frontier.tokens.shape[1]))
                return frontier

            def tree(self) -> Any:
                return growth.tree()

        return Growing()


def drafter(kind: str, policy: Any) -> Any:
    if kind == "model":
        return ModelDrafter(draft(), policy)
    if kind == "ensemble":
        views = [Multimodal(), TextOnly(draft().config, Numerals())]
        return EnsembleDrafter(draft(), policy, views, Fixed())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return HeadDrafter(build_head(HeadConfig.from_target(target(), kind)), target(), policy)


@cache
def ending() -> int:
    """The token with which the first prompt's answer begins, and which the second one's does not have."""
    first, second = Engine(target()).generate([Request(SHORT), Request(LONG)], max_new_tokens=NEW)
    assert first.tokens[0] not in second.tokens
    return first.tokens[0]


@pytest.mark.parametrize("kind", ["model", "eagle2", "medusa", "ensemble"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_that_has_ended_lets_the_others_draft_as_if_they_were_alone(kind: str, name: str) -> None:
    ran = []
    for asked in ([LONG], [SHORT, LONG]):
        policy = Counted(POLICIES[name] if kind != "medusa" else _shallow(name))
        outputs = Engine(target(), drafter(kind, policy)).generate(
            [Request(prompt) for prompt in asked], max_new_tokens=NEW, eos_token_id=ending()
        )
        ran.append((policy.frontiers, outputs[-1].stats.drafted_tokens, outputs[-1].tokens))
        assert len(outputs[0].tokens) == (1 if len(asked) > 1 else NEW)
    assert ran[0] == ran[1]


def _shallow(name: str) -> Any:
    return ConfidentChain(5, 0.6) if name == "confident" else SageTree(d_max=5, ceiling=5)


def test_a_finished_row_s_next_turn_begins_where_its_last_one_ended() -> None:
    """The passes that only others take part in leave no trace in it."""

    def remembered(asked: list[Prompt]) -> list[Any]:
        policy = Counted(SageTree())
        Engine(target(), ModelDrafter(draft(), policy)).generate(
            [Request(prompt) for prompt in asked], max_new_tokens=NEW, eos_token_id=ending()
        )
        assert isinstance(policy.shaping, SageSession)
        for row in policy.shaping._rows:
            policy.shaping._catch_up(row)
        rows = policy.shaping._rows
        return [replace(row, confidence=pytest.approx(row.confidence, abs=1e-5)) for row in rows]

    ended, other = remembered([SHORT, LONG])
    assert [ended] == remembered([SHORT])
    assert len(ended.lengths) == 1
    assert len(other.lengths) > 1
