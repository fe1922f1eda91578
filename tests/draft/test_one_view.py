"""Where a prompt has no picture all views are one: it is read and run once, and drafts as the draft model alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from families import FAMILIES
from numerals import Numerals
from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.ensemble.views import Multimodal, Pruned, TextOnly
from saccade.draft.model import ModelDrafter
from saccade.draft.pruning import Pruning
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.target_model.adapter import Target

NAME = "llava"


@cache
def target() -> Target:
    return Target(FAMILIES[NAME].model())


@cache
def draft() -> Target:
    return Target(FAMILIES[NAME].draft_model())


@cache
def ensemble(select: Any = "uniform") -> Engine:
    views = [Multimodal(), TextOnly(draft().config, Numerals()), Pruned(Pruning(select))]
    return Engine(target(), EnsembleDrafter(draft(), Chain(4), views))


@cache
def alone() -> Engine:
    return Engine(target(), ModelDrafter(draft(), Chain(4)))


def asked(kind: str, row: int) -> Prompt:
    return split(target().config, FAMILIES[NAME].row_inputs(kind, row))[0]


def answer(kind: str, row: int, n: int = 20) -> list[int]:
    return FAMILIES[NAME].reference(kind, rows=row + 1, n=n)[row]


def ask(engine: Engine, prompts: list[Prompt], session: Any = None) -> list[Output]:
    return engine.generate([Request(p) for p in prompts], max_new_tokens=20, session=session)


def course(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.marks, output.stats.accepted_histogram, output.stats.drafted_tokens


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Rows of the draft model's context that took part in each of its forwards."""
    seen: list[set[int]] = []
    forward = draft().forward

    def counted(cache: Any, pieces: Any, *more: Any) -> Any:
        seen.append({row for piece in pieces for row in piece.rows})
        return forward(cache, pieces, *more)

    monkeypatch.setattr(draft(), "forward", counted)
    return seen


@pytest.mark.parametrize("rows", [1, 2])
def test_words_alone_are_read_and_run_once(rows: int, ran: list[set[int]]) -> None:
    prompts = [asked("text", row) for row in range(rows)]
    outputs = ask(ensemble(), prompts)
    assert set().union(*ran) == set(range(rows))
    assert [course(o) for o in outputs] == [course(o) for o in ask(alone(), prompts)]


@pytest.mark.parametrize("kinds", [("text", "image"), ("image", "text"), ("text", "text", "image")])
def test_a_picture_in_one_row_leaves_the_others_their_one_view(kinds: tuple[str, ...], ran: list[set[int]]) -> None:
    prompts = [asked(kind, row) for row, kind in enumerate(kinds)]
    session: Any = ensemble().open(4)
    outputs = ask(ensemble(), prompts, session)
    assert [o.tokens for o in outputs] == [answer(kind, row) for row, kind in enumerate(kinds)]
    views = {row: {slot // 4 for rows in ran for slot in rows if slot % 4 == row} for row in range(len(kinds))}
    assert views == {row: {0} if kind == "text" else {0, 1, 2} for row, kind in enumerate(kinds)}
    for row, kind in enumerate(kinds):
        if kind == "text":
            (single,) = ask(ensemble(), [prompts[row]])
            assert course(outputs[row]) == course(single)


@pytest.mark.parametrize("select", ["uniform", "attention"])
def test_a_session_goes_to_and_fro(select: str) -> None:
    """Words, a picture, words, another picture, the same again: each is answered as in a session of its own."""
    engine = ensemble(select)
    session: Any = engine.open(1)
    for kind, row in (("text", 0), ("image", 1), ("text", 2), ("image", 0), ("image", 0)):
        (output,) = ask(engine, [asked(kind, row)], session)
        assert output.tokens == answer(kind, row)
        assert course(output) == course(ask(engine, [asked(kind, row)])[0])


def test_words_teach_nothing_of_the_views() -> None:
    session: Any = ensemble().open(1)
    ask(ensemble(), [asked("text", 0)], session)
    assert session.drafting._weights.history.counts([0]) == [0]
    ask(ensemble(), [asked("image", 0)], session)
    assert session.drafting._weights.history.counts([0])[0] > 0
