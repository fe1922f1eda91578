"""What a head computes in a tree, with cache and batch, is what every path gives as a sequence of its own.

For heads with one cache, whose entries are fed the target's state at one token (`HeadDraftSession`, and ViSpec's).
Other heads have slow paths, planted mistakes and files of their own: test_dream_drafting, test_ahead_drafting and
test_kangaroo_drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from heads_kit import (
    DRAFTING,
    POLICIES,
    Recording,
    answer_features_come_late,
    drafting,
    engine,
    kind_of_prompt,
    prompts,
    random_head,
    recorded,
    target,
    trained_head,
    worst_difference,
)
from torch import Tensor

from families import FAMILIES
from saccade.draft.heads import session as under_test
from saccade.draft.heads import vispec
from saccade.draft.heads.block import Placement
from saccade.draft.heads.head import Head
from saccade.engine import Request

CLOSE = 1e-3
"""Standard deviations of the logits: hundreds of roundings of float32. Planted mistakes move them by 0.1 and more."""
FAR = 0.05

NAMES = ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")


def difference(name: str, head: Head, policy: str = "dynamic", rows: int = 3, kind: str = "", n: int = 10) -> float:
    case, kind = FAMILIES[name], kind or kind_of_prompt(name)
    inputs = [case.row_inputs(kind, row) for row in range(rows)]
    asked = [prompts(case, one)[0] for one in inputs]
    outputs, steps = recorded(name, head, POLICIES[policy], asked, n)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=n)
    return worst_difference(name, head, inputs, outputs, steps)


@pytest.mark.some_families
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("name", NAMES)
def test_trees_of_ragged_rows(name: str, kind: str) -> None:
    assert difference(name, trained_head(name, kind)) < CLOSE


@pytest.mark.parametrize("policy", ["chain", "static", "sage"])
@pytest.mark.parametrize("kind", DRAFTING)
def test_every_policy(kind: str, policy: str) -> None:
    assert difference("llava", trained_head("llava", kind), policy) < CLOSE
    assert difference("llava", random_head("llava", kind), policy, rows=1, n=5) < CLOSE


@pytest.mark.parametrize("prompt_kind", ["images2", "video", "text"])
@pytest.mark.parametrize("after", ["text", "visual"])
def test_several_images_videos_and_words_alone(after: str, prompt_kind: str) -> None:
    name = "qwen2_5_vl"
    hivis, eagle = random_head(name, "hivis", after_image=after), random_head(name, "eagle2")
    blind = random_head(name, "eagle2", text_only=True, after_image=after)
    words_alone = random_head(name, "eagle2", text_only=True, features="none", after_image=after)
    deep = random_head(name, "eagle2", blocks=3)
    for head in (hivis, eagle, blind, words_alone, deep):
        assert difference(name, head, rows=2, kind=prompt_kind, n=5) < CLOSE


def test_a_prompt_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "CHUNK", 3)
    for kind in DRAFTING:
        assert difference("smolvlm", trained_head("smolvlm", kind), n=5) < CLOSE


# --------------------------------------------------------------------------- planted mistakes


def _siblings_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.HeadDraftSession._lay

    def blurred(self: Any, cache: Any, rows: Any, count: int, attention_mask: Tensor | None) -> None:
        right(self, cache, rows, count, None if attention_mask is None else torch.ones_like(attention_mask))

    monkeypatch.setattr(under_test.HeadDraftSession, "_lay", blurred)


def _prompt_features_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.read_at

    def late(states: Tensor, sources: Tensor) -> Tensor:
        return right(states, torch.where(sources < 0, sources, sources + 1))

    monkeypatch.setattr(under_test, "read_at", late)


def _answer_features_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_features_come_late(monkeypatch, under_test.HeadDraftSession)


def _nodes_fed_the_root_s_state(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.HeadDraftSession._run
    monkeypatch.setattr(
        under_test.HeadDraftSession,
        "_run",
        lambda self, rows, frontier, ran: right(self, rows, frontier, [ran[0].expand_as(level) for level in ran]),
    )


def _positions_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.HeadDraftSession._placed

    def counted(self: Any, cache: Any, rows: Any, count: int, gap: int | None) -> Placement:
        at = right(self, cache, rows, count, gap)
        assert at.last is not None
        return replace(at, positions=at.positions + torch.arange(count) * (gap is not None), last=at.last + count)

    monkeypatch.setattr(under_test.HeadDraftSession, "_placed", counted)


def _guesses_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: Any, rows: Any) -> None:
        self.commit(rows, [range(min(self.pending[row], 1)) for row in rows])

    monkeypatch.setattr(under_test.RowCache, "drop", kept)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _siblings_see_each_other,
    _prompt_features_one_late,
    _answer_features_one_late,
    _nodes_fed_the_root_s_state,
    _positions_by_node,
    _guesses_stay_in_the_cache,
]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", DRAFTING)
def test_a_planted_mistake_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    head = trained_head("llava", kind)
    target("llava")
    mistake(monkeypatch)
    assert difference("llava", head) > FAR


def test_a_planted_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of HiViS that belongs to another step."""
    head = random_head("llava", "hivis")
    right = under_test.HeadDraftSession._forward

    def later(
        self: Any, rows: Any, features: Tensor, tokens: Tensor, attention_mask: Any, offset: Any, step: int
    ) -> Tensor:
        return right(self, rows, features, tokens, attention_mask, offset, step + 1)

    monkeypatch.setattr(under_test.HeadDraftSession, "_forward", later)
    assert difference("llava", head) > FAR


def test_a_planted_feature_of_a_visual_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MSD's visual entries are fed none."""
    head = random_head("llava", "msd")
    monkeypatch.setattr(type(head), "entries", Head.entries)
    assert difference("llava", head, rows=1, n=5) > FAR


def test_a_planted_image_of_another_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ViSpec's rows are told of their images."""
    head = trained_head("llava", "vispec")
    right = vispec.ViSpecDraftSession._embed

    def swapped(self: Any, rows: Any, tokens: Tensor) -> Tensor:
        self._global = self._global.roll(1, 0)
        return right(self, rows, tokens)

    monkeypatch.setattr(vispec.ViSpecDraftSession, "_embed", swapped)
    assert difference("llava", head) > FAR


# --------------------------------------------------------------------------- what has entries


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm"])
def test_hidden_visual_tokens_have_no_entries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token has none either, and the first answer token has one after the first step."""
    monkeypatch.setattr("saccade.target_model.cache.QUANTUM", 1)
    case = FAMILIES[name]
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    words = len(prompt) - sum(m.n_tokens for m in prompt.media)
    for head, expected in (
        (random_head(name, "hivis"), words),
        (random_head(name, "eagle2", text_only=True), words),
        (random_head(name, "eagle2"), len(prompt)),
    ):
        under = engine(name, head, Recording(POLICIES["chain"]))
        session = under.open(1)
        under.generate([Request(prompt)], max_new_tokens=1, session=session)
        assert drafting(session).cache.lengths == [expected - 1]
        assert drafting(session).cache.capacity(0) < len(prompt) + 20 - (len(prompt) - expected)
