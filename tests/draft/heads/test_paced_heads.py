"""Heads that are not drafted with in every step (method `auto`): they read what they missed, and draft the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import ready
from families import FAMILIES
from heads_kit import LENGTH, Recording, prompts, random_head, recorded, target, trained_head
from saccade import VLM, load, resolution
from saccade.draft.heads.head import Head, HeadConfig, build_head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.costs import Pacer, Trials
from saccade.errors import MethodError
from saccade.output import Output


class Planned(Pacer):
    """A pacer of given lengths, which are asked for in turn."""

    def __init__(self, lengths: Sequence[int], admitted: Sequence[bool] = (True,)) -> None:
        super().__init__(8, 0.1)
        self._planned, self._admitted = cycle(lengths), cycle(admitted)

    def lengths(self, rows: Sequence[Trials], others: int = 0) -> list[int]:
        return [next(self._planned) for _ in rows]

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        return next(self._admitted)


def at_the_roots(head: Head, rows: int, pacer: Pacer | None) -> tuple[list[Output], dict[tuple[int, int], Tensor]]:
    """Answers, and the head's logits after roots by row and number of tokens emitted before."""
    case, recording = FAMILIES["llava"], Recording(Chain(1))
    asked = [prompts(case, case.row_inputs("image", row))[0] for row in range(rows)]
    engine = Engine(target("llava"), HeadDrafter(head, target("llava"), recording), pacer=pacer)
    outputs, steps = recorded("llava", head, recording, asked, LENGTH, engine.open(rows))
    assert [o.tokens for o in outputs] == case.reference("image", rows=rows, n=LENGTH)
    found = {}
    for step in steps:
        for place, row in enumerate(step.rows):
            found[row, len(step.emitted[row])] = step.levels[0][2][place, 0]
    return outputs, found


def worst(head: Head, rows: int, pacer: Pacer) -> float:
    """Largest difference between logits of paced drafts and of drafts in every step, in standard deviations."""
    _, expected = at_the_roots(head, rows, None)
    _, found = at_the_roots(head, rows, pacer)
    both = found.keys() & expected.keys()
    assert len(both) > 2 * rows
    assert len(found) < len(expected)
    scores = [(found[at], expected[at]) for at in both]
    assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in scores)  # DFlash 2 scores its candidates alone
    finite = [(a[b.isfinite()], b[b.isfinite()]) for a, b in scores]
    return max(float((a - b).abs().max() / b.std()) for a, b in finite)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_steps_without_drafts_change_no_draft(kind: str, rows: int) -> None:
    head = random_head("llava", kind)
    assert worst(head, rows, Planned((1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0))) < 1e-3


@pytest.mark.parametrize("kind", ["eagle2", "hivis", "eagle3", "dream", "medusa"])
def test_a_row_that_the_head_was_not_admitted_to_goes_on_with_it_in_the_next_turn(kind: str) -> None:
    case, recording = FAMILIES["llava"], Recording(Chain(2))
    head = random_head("llava", kind)
    (first,) = prompts(case, case.row_inputs("text", 0))
    engine = Engine(target("llava"), HeadDrafter(head, target("llava"), recording), pacer=Planned((2,), (False, True)))
    session = engine.open(1)
    (answer,), steps = recorded("llava", head, recording, [first], 8, session)
    assert not steps
    longer = type(first)((*first.ids, *answer.tokens, 7, 8, 9))
    (paced,), paced_steps = recorded("llava", head, recording, [longer], 8, session)
    fresh = Recording(Chain(2))
    (alone,), alone_steps = recorded("llava", head, fresh, [longer], 8)
    assert paced.tokens == alone.tokens
    assert paced.stats.reused_tokens > len(first.ids)
    for mine, other in zip(paced_steps, alone_steps, strict=True):
        torch.testing.assert_close(mine.levels[0][2], other.levels[0][2], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_auto_drafts_with_the_head_that_is_given(kind: str) -> None:
    plain = load(ready("llava"), None, "plain", dtype="float32")
    head = build_head(HeadConfig.from_target(plain.target, kind))
    vlm = VLM(plain.target.model, plain.processor, drafter=head, method="auto")
    assert vlm.head is head
    assert vlm.options["draft_with"] == kind
    pacer = vlm.engine.pacer
    assert pacer is not None
    assert pacer.max_length == min(8, head.reach or 8)
    assert 0 < pacer.times.draft[1] <= 2  # four blocks on a target of two layers
    for question in ("What is it?", "Why?"):
        assert vlm.generate(question, max_new_tokens=12).tokens == plain.generate(question, max_new_tokens=12).tokens


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_say_whether_one_pass_drafts_all_levels(kind: str) -> None:
    case, head, calls = FAMILIES["llava"], random_head("llava", kind), []
    head.register_forward_hook(lambda *given: calls.append(1))
    (prompt,) = prompts(case, case.row_inputs("text", 0))
    for levels in (1, 3):
        engine = Engine(target("llava"), HeadDrafter(head, target("llava"), Chain(levels)))
        engine.generate([Request(prompt)], max_new_tokens=LENGTH)
        calls.append(0)
    counts = calls.index(0), len(calls) - calls.index(0) - 2
    assert head.drafts_in_one_pass == (counts[1] <= counts[0])


class Timed(Pacer):
    """A pacer for which a level of drafting takes a twentieth of a forward."""

    def observe_step(self, tokens: int, forward: float, *given: Any, **named: Any) -> None:
        super().observe_step(tokens, 1 + 0.02 * tokens, *given, **{**named, "draft": 0.05 * named["levels"]})

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        super().observe_prefill(tokens, 0.1)

    def observe_prefill_step(self, seconds: float, rows: int) -> None:
        super().observe_prefill_step(2.0, rows)


def test_a_head_that_is_right_drafts_long_chains_and_a_random_one_hardly_any() -> None:
    case = FAMILIES["llava"]
    asked = [prompts(case, case.row_inputs("image", row))[0] for row in range(3)]
    drafted = []
    for head in (trained_head("llava", "eagle2"), random_head("llava", "eagle2")):
        drafter, pacer = HeadDrafter(head, target("llava"), Chain(8), in_training=True), Timed(8, 0.05)
        engine = Engine(target("llava"), drafter, pacer=pacer)
        outputs = [engine.generate([Request(p)], max_new_tokens=LENGTH)[0] for p in asked * 4]
        drafted.append(sum(output.stats.drafted_tokens for output in outputs))
    assert drafted[0] > 12 * LENGTH / 2
    assert drafted[1] < drafted[0] / 2


def test_which_drafter_auto_takes() -> None:
    kinds = {"mine": "hivis", "eagle2": "eagle2"}
    assert resolution.completed("auto", {}, None, kinds) == {"draft_with": "hivis"}
    assert resolution.completed("auto", {}, None, kinds, "eagle2") == {"draft_with": "eagle2"}
    assert resolution.completed("auto", {}, object(), kinds) == {}  # a draft model
    assert resolution.completed("auto", {}, object(), kinds, "mine") == {"draft_with": "hivis"}
    assert resolution.completed("auto", {"draft_with": "model"}, None, kinds) == {"draft_with": "model"}
    assert resolution.completed("chain", {}, None, kinds) == {}
    assert resolution.completed(None, {}, None, kinds) == {}
    with pytest.raises(MethodError, match="Unknown method"):
        resolution.completed("swift", {}, None, kinds)
