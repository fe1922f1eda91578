"""Rows of a drafting batch: one view without a picture, a fresh start with every new prompt, no part after the end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES
from harness import answers, course, draft, prompt, target
from numerals import Numerals
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal, Pruned, TextOnly
from saccade.draft.ensemble.weights import Fixed
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.model import ModelDrafter, is_later_turn
from saccade.draft.pruning import Pruning
from saccade.draft.trees.policy import Chain, ConfidentChain
from saccade.draft.trees.sage import SageSession, SageTree
from saccade.engine import Engine
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt

NAME = "llava"
EVEN = Pruning(keep_by="uniform", keep_images=0.5)


def drafter(kind: str, policy: Any) -> Any:
    model = draft(NAME)
    if kind == "model":
        return ModelDrafter(model, policy)
    if kind == "pruned":
        return EnsembleDrafter(model, policy, [Pruned(EVEN)])
    return EnsembleDrafter(model, policy, [Pruned(EVEN), TextOnly(model.config, Numerals()), Multimodal()])


# --------------------------------------------------------------------------- one view


@cache
def ensemble(select: Any = "uniform") -> Engine:
    views = [Multimodal(), TextOnly(draft(NAME).config, Numerals()), Pruned(Pruning(0.2, 0.1, select))]
    return Engine(target(NAME), EnsembleDrafter(draft(NAME), Chain(4), views))


def answer(kind: str, row: int) -> list[int]:
    return FAMILIES[NAME].reference(kind, rows=row + 1)[row]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Rows of the draft model's context that took part in each of its forwards."""
    seen: list[set[int]] = []
    for model in (draft(NAME), draft("llama")):

        def counted(cache: Any, pieces: Any, *more: Any, forward: Any = model.forward) -> Any:
            seen.append({row for piece in pieces for row in piece.rows})
            return forward(cache, pieces, *more)

        monkeypatch.setattr(model, "forward", counted)
    return seen


@pytest.mark.parametrize("rows", [1, 2])
def test_words_alone_are_read_and_run_once(rows: int, ran: list[set[int]]) -> None:
    prompts = [prompt(NAME, "text", row) for row in range(rows)]
    outputs = answers(ensemble(), prompts)
    assert set().union(*ran) == set(range(rows))
    alone = answers(Engine(target(NAME), ModelDrafter(draft(NAME), Chain(4))), prompts)
    assert [course(o) for o in outputs] == [course(o) for o in alone]


@pytest.mark.parametrize("kinds", [("text", "image"), ("image", "text"), ("text", "text", "image")])
def test_a_picture_in_one_row_leaves_the_others_their_one_view(kinds: tuple[str, ...], ran: list[set[int]]) -> None:
    prompts = [prompt(NAME, kind, row) for row, kind in enumerate(kinds)]
    session: Any = ensemble().open(4)
    outputs = answers(ensemble(), prompts, session=session)
    assert [o.tokens for o in outputs] == [answer(kind, row) for row, kind in enumerate(kinds)]
    views = {row: {slot // 4 for rows in ran for slot in rows if slot % 4 == row} for row in range(len(kinds))}
    assert views == {row: {0} if kind == "text" else {0, 1, 2} for row, kind in enumerate(kinds)}
    for row, kind in enumerate(kinds):
        if kind == "text":
            (single,) = answers(ensemble(), [prompts[row]])
            assert course(outputs[row]) == course(single)


@pytest.mark.parametrize("select", ["uniform", "attention"])
def test_a_session_goes_to_and_fro(select: str) -> None:
    """Words, a picture, words, another picture, the same again: each is answered as in a session of its own."""
    engine = ensemble(select)
    session: Any = engine.open(1)
    for kind, row in (("text", 0), ("image", 1), ("text", 2), ("image", 0), ("image", 0)):
        (output,) = answers(engine, [prompt(NAME, kind, row)], session=session)
        assert output.tokens == answer(kind, row)
        assert course(output) == course(answers(engine, [prompt(NAME, kind, row)])[0])


def test_words_teach_nothing_of_the_views() -> None:
    session: Any = ensemble().open(1)
    answers(ensemble(), [prompt(NAME, "text", 0)], session=session)
    assert session.drafting._weights.history.counts([0]).item() == 0
    answers(ensemble(), [prompt(NAME, "image", 0)], session=session)
    assert session.drafting._weights.history.counts([0]).item() > 0


# --------------------------------------------------------------------------- new prompts


def next_turn(row: int, answer: list[int]) -> Prompt:
    return split(target(NAME).config, FAMILIES[NAME].continued("image", row, answer, follow_up="text"))[0]


def test_a_later_turn_begins_with_all_of_the_earlier_one() -> None:
    (seen,) = prompt(NAME, row=0).media
    (other,) = prompt(NAME, row=1).media
    earlier = Prompt((1, 5, 6, 7), (seen,))
    assert is_later_turn(earlier, Prompt((1, 5, 6, 7, 8), (seen,)))
    assert is_later_turn(earlier, Prompt((1, 5, 6, 7, 8), (seen, other)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 9, 8), (seen,)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 7), (seen,)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 7, 8), (other, seen)))
    assert not is_later_turn(earlier, Prompt((1, 5, 6, 7, 8)))


@pytest.mark.parametrize("kind", ["model", "pruned", "ensemble"])
def test_sage_drafts_for_a_new_prompt_as_if_it_were_the_first(kind: str) -> None:
    engine = Engine(target(NAME), drafter(kind, SageTree(window=2, ceiling=9)))
    session: Any = engine.open(1)
    (answer,) = answers(engine, [prompt(NAME, row=0)], 12, session=session)
    (again,) = answers(engine, [prompt(NAME, row=1)], 12, session=session)
    (fresh,) = answers(engine, [prompt(NAME, row=1)], 12, session=engine.open(1))
    assert course(again) == course(fresh)
    session = engine.open(1)
    answers(engine, [prompt(NAME, row=0)], 12, session=session)
    shaping = getattr(session.drafting, "_session", session.drafting)._shaping
    shaping = getattr(shaping, "_shaping", shaping)
    shaping._catch_up(shaping._rows[0])
    before = shaping._rows[0]
    assert not before.starting
    session.drafting.load(0, next_turn(0, answer.tokens), None)
    assert shaping._rows[0] is before
    session.drafting.load(0, prompt(NAME, row=2), None)
    assert shaping._rows[0].starting
    assert not shaping._rows[0].lengths


# --------------------------------------------------------------------------- rows that have ended

NEW = 40
SHORT, LONG = Prompt((1, 20, 21, 22)), Prompt((1, 50, 61, 72, 33))
POLICIES = {"confident": ConfidentChain(6, 0.6), "sage": SageTree()}
SHALLOW = {"confident": ConfidentChain(5, 0.6), "sage": SageTree(d_max=5, ceiling=5)}


def of_words(kind: str, policy: Any) -> Any:
    model = draft("llama")
    if kind == "model":
        return ModelDrafter(model, policy)
    if kind == "ensemble":
        return EnsembleDrafter(model, policy, [Multimodal(), TextOnly(model.config, Numerals())], Fixed())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return HeadDrafter(build_head(HeadConfig.from_target(target("llama"), kind)), target("llama"), policy)


@cache
def ending() -> int:
    """The token with which the first prompt's answer begins, and which the second one's does not have."""
    first, second = answers(Engine(target("llama")), [SHORT, LONG], NEW)
    assert first.tokens[0] not in second.tokens
    return first.tokens[0]


@pytest.mark.parametrize("kind", ["model", "eagle2", "medusa", "ensemble"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_that_has_ended_lets_the_others_draft_as_if_they_were_alone(kind: str, name: str) -> None:
    engine = Engine(target("llama"), of_words(kind, (SHALLOW if kind == "medusa" else POLICIES)[name]))
    (alone,) = answers(engine, [LONG], NEW, eos_token_id=ending())
    ended, other = answers(engine, [SHORT, LONG], NEW, eos_token_id=ending())
    assert len(ended.tokens) == 1
    assert len(other.tokens) == NEW
    assert course(other) == course(alone)


def test_a_row_that_has_ended_is_drafted_for_no_more(ran: list[set[int]]) -> None:
    engine = Engine(target("llama"), ModelDrafter(draft("llama"), Chain(3)))
    answers(engine, [SHORT, LONG], NEW, eos_token_id=ending())
    last = max(number for number, rows in enumerate(ran) if 0 in rows)
    assert last < len(ran) / 3


def test_a_finished_row_s_next_turn_begins_where_its_last_one_ended() -> None:
    """The passes that only others take part in leave no trace in it."""

    def remembered(prompts: list[Prompt]) -> list[Any]:
        engine = Engine(target("llama"), of_words("model", SageTree()))
        session: Any = engine.open(len(prompts))
        answers(engine, prompts, NEW, session=session, eos_token_id=ending())
        shaping = session.drafting._shaping
        assert isinstance(shaping, SageSession)
        for row in shaping._rows:
            shaping._catch_up(row)
        return [replace(row, confidence=pytest.approx(row.confidence, abs=1e-5)) for row in shaping._rows]

    ended, other = remembered([SHORT, LONG])
    assert [ended] == remembered([SHORT])
    assert len(ended.lengths) == 1
    assert len(other.lengths) > 1
