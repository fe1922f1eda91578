"""Merged drafters make room for the blocks of the deeper tree, whichever of them guessed it."""

from __future__ import annotations

from functools import cache

import pytest

from families import FAMILIES
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.lookup import LookupSession, PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target

NAME = "llama"
LONG, SHORT = Prompt((1, *range(10, 60))), Prompt((1, 20, 21, 22))


@cache
def target() -> Target:
    return Target(FAMILIES[NAME].model())


@cache
def texts(count: int) -> list[list[int]]:
    """Both prompts with what the target answers."""
    outputs = Engine(target()).generate([Request(LONG), Request(SHORT)], max_new_tokens=count)
    return [[*p.ids, *o.tokens] for p, o in zip((LONG, SHORT), outputs, strict=True)]


def quote(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], starts: list[int], most: list[int]) -> None:
    """Make lookup draft the true continuation, as it does of a text that is being quoted."""

    def draft(self: LookupSession, row: int) -> list[int]:
        ids, text = self._ids[row], texts[row]
        known = starts[row] <= len(ids) and ids == text[: len(ids)]
        return text[len(ids) : len(ids) + most[row]] if known else []

    monkeypatch.setattr(LookupSession, "_draft", draft)


@pytest.mark.parametrize(("gamma", "copied"), [(3, 10), (4, 10)])
def test_a_short_row_that_quotes_far_ahead_fits_beside_a_long_one(
    monkeypatch: pytest.MonkeyPatch, gamma: int, copied: int
) -> None:
    count = 40
    quote(monkeypatch, texts(count), [0, len(SHORT) + 22], [2, copied])
    model = ModelDrafter(Target(FAMILIES[NAME].draft_model()), Chain(gamma))
    drafter = MergedDrafter(model, PromptLookup(copied))
    outputs = Engine(target(), drafter).generate([Request(LONG), Request(SHORT)], max_new_tokens=count)
    assert [[*p.ids, *o.tokens] for p, o in zip((LONG, SHORT), outputs, strict=True)] == texts(count)


@pytest.mark.parametrize(("gamma", "copied", "count"), [(3, 10, 12), (3, 10, 23), (2, 20, 24)])
def test_a_head_goes_on_behind_a_block_deeper_than_its_own_tree(
    monkeypatch: pytest.MonkeyPatch, gamma: int, copied: int, count: int
) -> None:
    quote(monkeypatch, [texts(24)[1]], [len(SHORT) + 1], [copied])
    head = build_head(HeadConfig.from_target(target(), "eagle2"))
    engine = Engine(target(), MergedDrafter(HeadDrafter(head, target(), Chain(gamma)), PromptLookup(copied)))
    session = engine.open(1)
    (first,) = engine.generate([Request(SHORT)], max_new_tokens=count, session=session)
    assert len(first.stats.accepted_histogram) == copied + 1
    asked = Prompt((*SHORT.ids, *first.tokens, 30, 31, 32))
    (second,) = engine.generate([Request(asked)], max_new_tokens=8, session=session)
    assert second.tokens == Engine(target()).generate([Request(asked)], max_new_tokens=8)[0].tokens
