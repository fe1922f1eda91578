"""Where a prompt has no picture all views are one: it is read and run once, and drafts as the draft model alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES
from numerals import Numerals
from saccade.draft.ensemble import EnsembleDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.static import Chain
from saccade.draft.views import Multimodal, Pruned, TextOnly
from saccade.engine import Engine
from saccade.inputs.batch import split
from saccade.inputs.prompt import Prompt
from saccade.output import Output
from saccade.engine import Request
from saccade.target.adapter import Target

NAME = "llava"


@cache
def target() -> Target:
    return Target(FAMILIES[NAME].model())


@cache
def draft() -> Target:
    return Target(FAMILIES[NAME].draft_model())


@cache
def ensemble() -> Engine:
    views = [Multimodal(), TextOnly(draft().config, Numerals()), Pruned()]
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
def widths(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Rows of every forward of the draft model, and its prefills."""
    seen: dict[str, list[int]] = {"forward": [], "prefill": []}
    forward, prefill = draft().forward, draft().prefill

    def counted_forward(cache: Any, tokens: torch.Tensor, *more: Any) -> Any:
        seen["forward"].append(tokens.shape[0])
        return forward(cache, tokens, *more)

    def counted_prefill(cache: Any, row: int, *more: Any) -> Any:
        seen["prefill"].append(row)
        return prefill(cache, row, *more)

    monkeypatch.setattr(draft(), "forward", counted_forward)
    monkeypatch.setattr(draft(), "prefill", counted_prefill)
    return seen


@pytest.mark.parametrize("rows", [1, 2])
def test_words_alone_are_read_and_run_once(rows: int, widths: dict[str, list[int]]) -> None:
    prompts = [asked("text", row) for row in range(rows)]
    outputs = ask(ensemble(), prompts)
    assert widths["prefill"] == list(range(rows))
    assert set(widths["forward"]) == {rows}
    assert [course(o) for o in outputs] == [course(o) for o in ask(alone(), prompts)]


@pytest.mark.parametrize("kinds", [("text", "image"), ("image", "text"), ("text", "text", "image")])
def test_a_picture_in_any_row_brings_the_views_back(
    kinds: tuple[str, ...], widths: dict[str, list[int]]
) -> None:
    prompts = [asked(kind, row) for row, kind in enumerate(kinds)]
    outputs = ask(ensemble(), prompts)
    assert [o.tokens for o in outputs] == [answer(kind, row) for row, kind in enumerate(kinds)]
    assert set(widths["forward"]) == {3 * len(kinds)}


def test_a_session_goes_to_and_fro() -> None:
    """Words, a picture, words, another picture: each is answered as in a session of its own."""
    session: Any = ensemble().open(1)
    drafting = session.drafting
    for kind, row in (("text", 0), ("image", 1), ("text", 2), ("image", 0), ("image", 0)):
        (output,) = ask(ensemble(), [asked(kind, row)], session)
        assert output.tokens == answer(kind, row)
        assert drafting._is_single == (kind == "text")
        if kind == "text":
            assert course(output) == course(ask(alone(), [asked(kind, row)])[0])


def test_words_teach_nothing_of_the_views() -> None:
    session: Any = ensemble().open(1)
    ask(ensemble(), [asked("text", 0)], session)
    assert session.drafting._weights.history.counts == [0]
    ask(ensemble(), [asked("image", 0)], session)
    assert session.drafting._weights.history.counts[0] > 0
