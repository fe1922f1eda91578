"""DREAM drafts what it computes path by path, shows itself part of the visual tokens, and never changes an answer.

The questions of test_head_against_slow_paths, test_head_lossless and test_head_turns, asked of a head with a session
and a slow path of its own: its entries attend to a second cache, the features of all tokens before theirs. Its planted
mistakes are in that session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dream_kit import drafting, dream, dropped_of, trained_head, worst_difference
from heads_kit import (
    LENGTH,
    POLICIES,
    Recording,
    answer_features_come_late,
    engine,
    kind_of_prompt,
    prompts,
    recorded,
    target,
)
from torch import Tensor

from families import FAMILIES, Inputs, pristine, reference_greedy
from saccade.draft.heads import dream as under_test
from saccade.draft.heads import session as heads_session
from saccade.draft.heads.block import Placement
from saccade.draft.heads.dream import Dream
from saccade.engine import Request

CLOSE, FAR = 1e-4, 1e-3
"""Standard deviations of the logits: a hundred roundings of float32 (1e-6 is seen), and what planted mistakes exceed
(0.1 and more, but 0.004 for states of an answer that came out of order: attention has no positions there)."""

NAMES = ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
VARIANTS: list[dict[str, Any]] = [
    {"keep": 1.0},
    {"keep": 0.5},
    {"keep": 0.25, "cross": 2},
    {"gate": "replace"},
    {"initial": False},
    {"final": False},
]


def difference(name: str, head: Dream, policy: str = "dynamic", rows: int = 3, kind: str = "", n: int = 9) -> float:
    case, kind = FAMILIES[name], kind or kind_of_prompt(name)
    inputs = [case.row_inputs(kind, row) for row in range(rows)]
    asked = [prompts(case, one)[0] for one in inputs]
    outputs, steps = recorded(name, head, POLICIES[policy], asked, n)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=n)
    dropped = [dropped_of(name, one, head) for one in inputs]
    return worst_difference(name, head, inputs, dropped, outputs, steps)


@pytest.mark.some_families
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_taught_head_is_partly_right_and_never_changes_the_answer(name: str, rows: int) -> None:
    case, kind = FAMILIES[name], kind_of_prompt(name)
    requests = [Request(prompt) for prompt in prompts(case, case.inputs(kind, rows=rows))]
    outputs = engine(name, trained_head(name), POLICIES["dynamic"]).generate(requests, max_new_tokens=LENGTH + 6)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=LENGTH + 6)
    for output in outputs:
        assert LENGTH // 3 < output.stats.accepted_tokens < output.stats.drafted_tokens


@pytest.mark.some_families
@pytest.mark.parametrize("name", NAMES)
def test_trees_of_ragged_rows(name: str) -> None:
    assert difference(name, trained_head(name)) < CLOSE


@pytest.mark.parametrize("policy", ["chain", "static", "sage"])
def test_every_policy(policy: str) -> None:
    assert difference("llava", trained_head("llava"), policy) < CLOSE


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_variant(options: dict[str, Any]) -> None:
    assert difference("qwen2_5_vl", dream("qwen2_5_vl", **options), rows=2, n=5) < CLOSE


@pytest.mark.parametrize("kind", ["images2", "video", "text"])
def test_several_images_videos_and_words_alone(kind: str) -> None:
    assert difference("qwen2_5_vl", dream("qwen2_5_vl", keep=0.5), rows=2, kind=kind, n=5) < CLOSE


def test_without_cross_attention_the_features_are_not_looked_at() -> None:
    head = dream("llava", cross=0)
    given = torch.randn(1, 5, head.config.hidden_size)
    causal = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    at = Placement(torch.arange(5)[None], causal)
    assert torch.equal(head(given, given, at), head(given.flip(1), given, at))
    assert difference("llava", head, rows=2, n=5) < CLOSE


def test_a_prompt_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_session, "CHUNK", 4)
    assert difference("smolvlm", trained_head("smolvlm"), n=5) < CLOSE


# --------------------------------------------------------------------------- compression


@pytest.mark.parametrize("keep", [1.0, 0.75, 0.5, 0.25])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3", "smolvlm"])
def test_visual_tokens_without_entries_are_not_run(name: str, keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token has no entry, and the first answer token gets its own in the first step."""
    monkeypatch.setattr("saccade.target_model.cache.QUANTUM", 1)
    case, head, ran = FAMILIES[name], dream(name, keep=keep), []
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    words = len(prompt) - sum(m.n_tokens for m in prompt.media)
    kept = sum(max(1, int(keep * m.n_tokens + 0.5)) for m in prompt.media)
    assert head.first is not None
    head.first.register_forward_pre_hook(lambda _, given: ran.append(given[0].shape[1]))
    under = engine(name, head, POLICIES["chain"])
    session = under.open(1)
    under.generate([Request(prompt)], max_new_tokens=2, session=session)
    assert ran[0] == words + kept - 1
    own = drafting(session)
    assert own.cache.lengths == [words + kept]
    assert own.memory.lengths == [len(prompt)]
    assert own.cache.capacity(0) == own.memory.capacity(0) - (len(prompt) - words - kept)


def test_what_the_memory_holds_of_a_dropped_token_is_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an entry, a visual token is still attended to: blinding its features changes the drafts."""
    head = dream("llava", keep=0.25)
    right = under_test.DreamDraftSession._read

    def blind(self: Any, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        self._features[row][self._dropped[row]] = 0
        right(self, row, tokens, sources, embedded)

    monkeypatch.setattr(under_test.DreamDraftSession, "_read", blind)
    assert difference("llava", head, rows=1, n=3) > FAR


# --------------------------------------------------------------------------- turns


def difference_in_second_turn(name: str, head: Dream, kind: str, follow_up: str, rows: int = 3) -> float:
    """Rows end their first answers inside accepted paths."""
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    first: list[Inputs] = [case.row_inputs(kind, row) for row in range(rows)]
    session = engine(name, head, recording).open(rows)
    answers, _ = recorded(name, head, recording, [prompts(case, one)[0] for one in first], 11, session)
    second = [case.continued(kind, row, a.tokens, follow_up=follow_up) for row, a in enumerate(answers)]
    outputs, steps = recorded(name, head, recording, [prompts(case, one)[0] for one in second], 7, session)
    dropped = []
    for output, one, before in zip(outputs, second, first, strict=True):
        assert output.tokens == reference_greedy(pristine(name), one, 7)[0]
        start = output.stats.reused_tokens
        assert start == before["input_ids"].shape[1] + 10
        dropped.append(dropped_of(name, before, head) | dropped_of(name, one, head, start))
    return worst_difference(name, head, second, dropped, outputs, steps)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma3")), "llava", "qwen2_5_vl"]
)
def test_ragged_rows_go_on_with_another_image(name: str) -> None:
    kind = kind_of_prompt(name)
    assert difference_in_second_turn(name, trained_head(name), kind, kind) < CLOSE


def test_words_after_an_image_and_an_image_after_words() -> None:
    head = dream("llava", keep=0.5)
    assert difference_in_second_turn("llava", head, "image", "text") < CLOSE
    assert difference_in_second_turn("llava", head, "text", "image") < CLOSE


def test_other_prompts_in_the_same_session() -> None:
    """The same question again, another image under the same words, words alone, and back."""
    name, head = "llava", trained_head("llava")
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    image = case.row_inputs("image", 0)
    other = {**image, "pixel_values": image["pixel_values"].flip(0).neg()}
    session = engine(name, head, recording).open(1)
    for inputs in (image, image, other, case.row_inputs("text", 1), image):
        outputs, steps = recorded(name, head, recording, [prompts(case, inputs)[0]], 6, session)
        assert outputs[0].tokens == reference_greedy(pristine(name), inputs, 6)[0]
        dropped = dropped_of(name, inputs, head)
        if outputs[0].stats.reused_tokens > inputs["input_ids"].shape[1] // 2:  # the image, too, stays as it was read
            dropped = dropped_of(name, image, head)
        assert worst_difference(name, head, [inputs], [dropped], outputs, steps) < CLOSE


# --------------------------------------------------------------------------- planted mistakes


def _siblings_features_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """As released: in the cross-attention, every node sees the features that all others of its step bring."""
    right = under_test.DreamDraftSession._lay

    def leaking(self: Any, cache: Any, rows: Any, count: int, attention_mask: Tensor | None) -> None:
        if cache is self.memory and attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        right(self, cache, rows, count, attention_mask)

    monkeypatch.setattr(under_test.DreamDraftSession, "_lay", leaking)


def _own_feature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tokens attend to the target's state at themselves."""
    right = under_test.DreamDraftSession._read

    def late(self: Any, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        kept = self._features[row].clone()
        self._features[row][:-1] = kept[1:]
        right(self, row, tokens, sources, embedded)
        self._features[row] = kept

    monkeypatch.setattr(under_test.DreamDraftSession, "_read", late)


def _positions_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Dream.begin

    def closed(self: Any, embeddings: Tensor, at: Placement) -> Tensor:
        held = at.positions - at.positions[:, :1]
        places = torch.arange(held.shape[1])[None] + 0 * held
        return right(self, embeddings, replace(at, positions=places))

    monkeypatch.setattr(Dream, "begin", closed)


def _answer_features_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_features_come_late(monkeypatch, under_test.DreamDraftSession)


def _guesses_stay_in_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.DreamDraftSession.propose

    def stay(self: Any, rows: Any, *given: Any) -> Any:
        tree = right(self, rows, *given)
        self.memory.commit(rows, [range(1)] * len(rows))
        return tree

    monkeypatch.setattr(under_test.DreamDraftSession, "propose", stay)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _siblings_features_leak,
    _own_feature_is_seen,
    _positions_without_gaps,
    _answer_features_one_late,
    _guesses_stay_in_the_memory,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    head = trained_head("llava")
    target("llava")
    mistake(monkeypatch)
    assert difference("llava", head) > FAR
