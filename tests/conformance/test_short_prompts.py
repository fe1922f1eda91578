"""Prompts of one to three tokens, or of a picture and little else: every method answers as `generate` does."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from test_compositions import STRICT
from test_compositions import parts as parts_of

from checkpoints import picture, vlm
from families import reference_greedy
from heads_kit import EVERY, POLICIES, random_head, recorded, worst_difference
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.engine import Request
from saccade.inputs.families.family import Prompt
from saccade.methods import METHODS, build, get
from saccade.methods.compositions import Models
from saccade.target_model.adapter import Target

WORDS = [Prompt(ids) for ids in ((35,), (35, 71), (35, 71, 52))]
LENGTH = 12


@cache
def parts(method: str) -> Models:
    if method == "assistant":
        return vlm("gemma4", "gemma4-assistant")._parts
    drafts = get(method).options.get("draft_with")
    if drafts == "mtp":
        return vlm("predicting")._parts
    own = parts_of(drafts if drafts in HEAD_KINDS else None)
    if drafts != "pard":
        return own
    assert own.draft_model is not None
    masked = copy.deepcopy(own.draft_model.model)
    masked.config.pard_token = 7
    return replace(own, draft_model=Target(masked))


@cache
def expected(method: str, prompt: Prompt) -> list[int]:
    inputs = {"input_ids": torch.tensor([prompt.ids])}
    for medium in prompt.media:
        inputs |= medium.tensors
    return reference_greedy(parts(method).target.model, inputs, LENGTH)[0]


def compare(method: str, prompts: list[Prompt]) -> None:
    options: dict[str, Any] = STRICT.get(get(method).options.get("rule", ""), {}) if method in METHODS else {}
    engine = build(method if method in METHODS else "chain", parts(method), **options)
    for rows in (prompts, *([prompt] for prompt in prompts)):
        outputs = engine.generate([Request(prompt) for prompt in rows], max_new_tokens=LENGTH)
        assert [output.tokens for output in outputs] == [expected(method, prompt) for prompt in rows]


@pytest.mark.parametrize("method", [*METHODS, "assistant"])
def test_a_prompt_of_one_two_or_three_tokens_is_answered_alone_and_in_a_batch(method: str) -> None:
    compare(method, WORDS)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mtp"])
def test_a_picture_with_one_word_or_none_is_answered_alone_and_in_a_batch(method: str) -> None:
    seen = vlm("llava", "llava-draft").processor.prompt("", [picture(3)])
    token = parts(method).target.config.image_token_id
    first, last = seen.ids.index(token), len(seen.ids) - seen.ids[::-1].index(token)
    compare(
        method,
        [
            replace(seen, ids=ids)
            for ids in (seen.ids[first:last], seen.ids[first : last + 1], (35, *seen.ids[first:last]))
        ],
    )


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_a_head_drafts_behind_one_token_what_it_computes_over_the_whole_text(name: str, kind: str) -> None:
    head = random_head(name, kind)
    outputs, steps = recorded(name, head, POLICIES["static"], WORDS)
    rows = [{"input_ids": torch.tensor([prompt.ids])} for prompt in WORDS]
    assert worst_difference(name, head, rows, outputs, steps) < 1e-4
