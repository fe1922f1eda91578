"""Every block's weights and guesses against the definition, by plain prefills of what each view has read so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from families import FAMILIES
from harness import draft, prompts, second_turn, target
from numerals import Numerals
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal, TextOnly
from saccade.draft.ensemble.weights import ERROR_FLOOR, TINY, Constant, Grid, InverseError, Weighting, simplex
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context

NAME, GAMMA, NEW = "llava", 3, 17
VIEWS = [Multimodal(), TextOnly(draft(NAME).config, Numerals())]
CLOSE = 1e-4
"""Sums over some 40 positions of distances, each a few roundings of float32."""


class InTurn:
    """All weight to one view and then to the other, so that each drafts after having been silent."""

    needs_history = False

    def open(self, batch: int, views: int, device: torch.device) -> Any:
        return _Turning(torch.eye(views), batch)


class _Turning(Constant):
    """One view after the other, row by row."""

    def __init__(self, weights: Tensor, rows: int) -> None:
        super().__init__(weights)
        self._turns = [0] * rows

    def choose(self, rows: Sequence[int]) -> Tensor:
        for row in rows:
            self._turns[row] += 1
        return self._weights[[self._turns[row] % len(self._weights) for row in rows]]


WEIGHTINGS: dict[str, Weighting] = {"grid": Grid(), "best": Grid(1), "inverse": InverseError(), "in-turn": InTurn()}


@cache
def after(model: Target, prompt: Prompt, tokens: tuple[int, ...]) -> Tensor:
    """``[V]`` the model's distribution after a prompt and these tokens."""
    whole = Prompt((*prompt.ids, *tokens), prompt.media)
    logits = Context(model, 1).load(0, whole).logits
    assert logits is not None
    return logits.softmax(-1).double()


def said(prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """``[m, V]`` by the views."""
    return torch.stack([after(draft(NAME), view.rewrite(prompt), tuple(tokens)) for view in VIEWS])


def errors(history: Sequence[tuple[Prompt, Sequence[int]]], points: Tensor) -> Tensor:
    """``[G]`` KL(p||q) of every point's mixture, summed over all tokens of the answers."""
    total = torch.zeros(len(points), dtype=torch.float64)
    for prompt, answer in history:
        for t in range(len(answer)):
            p = after(target(NAME), prompt, tuple(answer[:t]))
            mixed = (points.double() @ said(prompt, answer[:t])).clamp(min=TINY)
            total += (p * (p.clamp(min=TINY).log() - mixed.log())).sum(-1)
    return total


def assert_chosen(weights: Tensor, weighting: Weighting, history: Sequence[tuple[Prompt, Sequence[int]]]) -> None:
    if not any(answer for _, answer in history):
        assert weights.tolist() == [0.5, 0.5]
    elif isinstance(weighting, Grid):
        points = simplex(2, weighting.steps)
        (at,) = (points == weights).all(1).nonzero()[:, 0].tolist()
        found = errors(history, points)
        assert found[at] <= found.min() + CLOSE
    else:
        own = 1 / errors(history, torch.eye(2)).clamp(min=ERROR_FLOOR)
        assert torch.allclose(weights.double(), own.softmax(-1), atol=CLOSE)


def follow(engine: Engine, session: Any, asked: list[Prompt], before: list[list[Any]]) -> list[list[int]]:
    """Generate and check every block; answers of all rows.

    Args:
        before: earlier turns of every row as (prompt, what `follow` gave).
    """
    weighting = engine.drafter.weighting  # type: ignore[union-attr]
    run = engine.start([Request(p) for p in asked], plan(engine.target, asked, max_new_tokens=NEW), session, trace=True)
    answers: list[list[int]] = [[] for _ in asked]
    for step in run.steps:
        guessed = [(row, tree) for row, tree in enumerate(step.trees) if tree is not None]
        room = max(NEW - len(answers[row]) for row, _ in guessed)
        for (row, tree), weights in zip(guessed, session.drafting.weights, strict=True):
            if weighting.needs_history:
                assert_chosen(weights, weighting, [*before[row], (asked[row], answers[row])])
            guesses: list[int] = []
            for guess in tree.tokens[1:]:
                q = said(asked[row], [*answers[row], *guesses])
                assert guess == int((weights.double() @ q).argmax())
                guesses.append(guess)
            assert len(guesses) == min(GAMMA, room)
        for row, tokens in enumerate(step.tokens):
            answers[row] += tokens
    return answers


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_every_block_of_two_turns_is_weighed_and_guessed_by_the_definition(weighting: str, rows: int) -> None:
    case = FAMILIES[NAME]
    drafter = EnsembleDrafter(draft(NAME), Chain(GAMMA), VIEWS, WEIGHTINGS[weighting])
    engine = Engine(target(NAME), drafter)
    session = engine.open(rows)
    first = prompts(case, case.inputs("image", rows))
    answers = follow(engine, session, first, [[] for _ in range(rows)])
    assert answers == case.reference("image", rows, n=NEW)
    later = [prompts(case, second_turn(NAME, "image", row))[0] for row in range(rows)]
    before = [[(prompt, answer)] for prompt, answer in zip(first, answers, strict=True)]
    follow(engine, session, later, before)


@pytest.mark.parametrize("rows", [1, 2])
def test_views_without_weight_read_and_draft_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[int]] = []
    model = Target(FAMILIES[NAME].draft_model())
    forward = model.forward

    def counted(cache: Any, pieces: Any, *more: Any) -> Any:
        if all(piece.count <= GAMMA + 1 for piece in pieces):  # else a prompt is read
            ran.append([row for piece in pieces for row in piece.rows])
        return forward(cache, pieces, *more)

    monkeypatch.setattr(model, "forward", counted)
    case = FAMILIES[NAME]
    drafter = EnsembleDrafter(model, Chain(GAMMA), VIEWS, InTurn())
    asked = [Request(prompt) for prompt in prompts(case, case.inputs("image", rows))]
    Engine(target(NAME), drafter).generate(asked, max_new_tokens=NEW)
    going: list[int] = []
    turns: list[list[list[int]]] = [[] for _ in range(rows)]  # per row and block: views that ran its guesses
    for slots in ran:
        views: dict[int, list[int]] = {}
        for slot in slots:
            views.setdefault(slot % rows, []).append(slot // rows)
        if all(sorted(seen) == [0, 1] for seen in views.values()):  # what was emitted is read by both
            going = sorted(views)
            for row in going:
                turns[row].append([])
            continue
        assert sorted(views) == going
        for row, (view,) in views.items():
            turns[row][-1].append(view)
    for blocks in turns:
        assert len(blocks) > 2
        for number, seen in enumerate(blocks):
            assert set(seen) <= {(number + 1) % 2}
            assert number or len(seen) == GAMMA - 1, "towards the end there is less to guess"
