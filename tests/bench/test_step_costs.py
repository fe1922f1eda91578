"""Step times where a model's context is short, and the size of a run that is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_kit import suite

import saccade
from saccade.bench import cost
from saccade.bench.preparing import prepare


@pytest.mark.parametrize("room", [-30, 0, 5, 100])
def test_a_drafter_whose_context_is_shorter_than_the_targets_prompt_is_timed_behind_what_fits(
    vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    draft = vlm.draft_model
    assert draft is not None
    question = next(iter(prepare(suite(), vlm).questions.values()))[0]
    prompt = vlm.processor.prompt(question.turns[0].messages)
    context = len(prompt) + room
    monkeypatch.setattr(draft, "traits", replace(draft.traits, limits=replace(draft.traits.limits, context=context)))
    costs = cost.measure(vlm.target, prompt, draft, vlm.processor.text_only(prompt), [6])
    assert list(costs.draft) == [1, 2, 4, 6, 8]
    assert costs.kv == len(prompt)  # the target's prompt stays whole


def test_conversations_of_several_lengths_are_counted_turn_by_turn(vlm: saccade.VLM, tmp_path: Path) -> None:
    rows = [{"turns": ["Say one."]}, {"turns": ["Say two.", "Say three."]}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepared = prepare(suite(tasks=[{"name": "mine", "file": str(tmp_path / "mine.jsonl")}], trace=2), vlm)
    expected = cost.estimate(prepared)
    assert (expected.answers, expected.traced) == (prepared.answers, 6)
