"""Any drafter with any tree, rule and pruning: greedy answers are plain decoding's wherever the rule is lossless."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from checkpoints import picture, vlm
from families import reference_greedy
from heads_kit import EVERY, POLICIES, random_head, recorded, worst_difference
from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.engine import Request
from saccade.inputs.families.family import Prompt
from saccade.methods import METHODS, build, get, is_lossless, options
from saccade.methods.compositions import Models
from saccade.methods.settings import RULES, TREES
from saccade.target_model.adapter import Target

SHAPES = [tree for tree in TREES if tree != "paced"]
"""Trees that go with every drafter and rule; a paced chain goes with a draft model (tests/engine/test_pacing.py)."""
TREE_OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {"gamma": 3},
    "branches": {"branches": 2, "gamma": 3},
    "confident": {"gamma": 4, "confidence": 0.2},
    "static": {},
    "dynamic": {"top": 3, "max_depth": 3, "total": 8},
    "width": {"width": 2, "max_depth": 3},
    "oneshot": {"total": 8, "max_depth": 3},
    "sage": {"d_max": 4, "ceiling": 5, "total": 20, "alpha_of": "accepted"},
}
PRUNING: list[dict[str, Any]] = [
    {},
    {"keep_images": 0.25},
    {"keep_images": 0.5, "keep_by": "uniform"},
    {"keep_images": 0.5, "keep_by": "attention"},
]
VIEWS: list[dict[str, Any]] = [{"views": "T"}, {"views": "MT"}, {"views": "MR", "keep_images": 0.5}]
STRICT: dict[str, dict[str, Any]] = {
    "lvspec": {"loose_share": 0.0, "shift": False},
    "fly": {"entropy": 1.0},
    "random": {"loose_share": 0.0},
}
"""Settings with which a lossy rule lets nothing pass that greedy decoding would not have said."""


@cache
def parts(kind: str | None = None) -> Models:
    loaded = vlm("llava", "llava-draft")
    own: Models = loaded._parts
    if kind is None:
        return own
    head = build_head(HeadConfig.from_target(own.target, kind)).to(own.target.dtype)
    return Models(own.target, own.draft_model, own.vocab_size, own.special_ids, own.draft_processor, head)


@cache
def prompt() -> Any:
    return vlm("llava", "llava-draft").processor.prompt("What is it, and what was it?", [picture(3)])


def answer(**given: Any) -> Any:
    drafts = given.get("draft_with", "model")
    engine = build("chain", parts(drafts if drafts in HEAD_KINDS else None), **given)
    (output,) = engine.generate([Request(prompt())], max_new_tokens=20)
    return output


@cache
def plain() -> tuple[int, ...]:
    (output,) = build("plain", parts()).generate([Request(prompt())], max_new_tokens=20)
    return tuple(output.tokens)


def combined(place: int, drafts: str, tree: str) -> dict[str, Any]:
    """The options of a drafter and a tree; pruning, copies and views take turns, so that every pair meets."""
    given = {"draft_with": drafts, "tree": tree, **TREE_OPTIONS[tree]}
    if drafts in ("model", "self"):
        given |= PRUNING[place % len(PRUNING)]
    if place % 3 == 2 and given.get("alpha_of") != "accepted":
        given |= {"lookup_tokens": 4}
    return given


PAIRS = list(product(("model", "self", *HEAD_KINDS), SHAPES))


@pytest.mark.parametrize(("drafts", "tree"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_any_drafter_with_any_tree_gives_the_target_s_tokens(drafts: str, tree: str) -> None:
    given = combined(PAIRS.index((drafts, tree)), drafts, tree)
    output = answer(**given)
    assert tuple(output.tokens) == plain()
    assert output.lossless
    assert output.stats.drafted_tokens > 0
    if drafts in ("model", "self") and "lookup_tokens" not in given:
        drafter: Any = build("chain", parts(), **given).drafter
        assert isinstance(drafter, EnsembleDrafter) == ("keep_images" in given)
        assert drafter.facts.model is (parts().target if drafts == "self" else parts().draft_model)


@pytest.mark.parametrize("views", VIEWS, ids=str)
@pytest.mark.parametrize("tree", SHAPES)
def test_any_views_with_any_tree_give_the_target_s_tokens(tree: str, views: dict[str, Any]) -> None:
    assert tuple(answer(tree=tree, **TREE_OPTIONS[tree], **views).tokens) == plain()


@pytest.mark.parametrize("rule", STRICT)
@pytest.mark.parametrize("tree", SHAPES)
def test_a_loose_rule_that_lets_nothing_pass_gives_the_target_s_tokens_but_is_labelled_lossy(
    tree: str, rule: str
) -> None:
    given = {"tree": tree, **TREE_OPTIONS[tree], "rule": rule, **STRICT[rule]}
    for more in ({}, {"draft_with": "self", "keep_images": 0.25}, {"draft_with": "eagle2"}):
        output = answer(**given, **more)
        assert tuple(output.tokens) == plain()
        assert not output.lossless
        assert not is_lossless(options("chain", {**given, **more}))


@pytest.mark.parametrize("tree", SHAPES)
def test_the_comparison_notices_a_rule_that_lets_everything_pass(tree: str) -> None:
    """The planted mistake: one guess too many changes the answer, and it is marked."""
    for rule, loosest in (
        ("lvspec", {"loose_share": 1.0}),
        ("random", {"loose_share": 1.0}),
        ("fly", {"entropy": 0.0, "deferred": 0}),
    ):
        output = answer(tree=tree, **TREE_OPTIONS[tree], rule=rule, **loosest)
        assert tuple(output.tokens) != plain()
        assert output.stats.loosened_tokens > 0
    assert set(RULES) == {"exact", *STRICT}


@pytest.mark.parametrize("rule", ["exact", "lvspec"])
def test_prompt_lookup_takes_any_rule(rule: str) -> None:
    output = answer(draft_with="lookup", gamma=4, rule=rule, **STRICT.get(rule, {}))
    assert tuple(output.tokens) == plain()
    assert output.lossless == (rule == "exact")


# --------------------------------------------------------------------------- short prompts


WORDS = [Prompt(ids) for ids in ((35,), (35, 71), (35, 71, 52))]
LENGTH = 12


@cache
def parts_of(method: str) -> Models:
    if method == "assistant":
        return vlm("gemma4", "gemma4-assistant")._parts
    drafts = get(method).options.get("draft_with")
    if drafts == "mtp":
        return vlm("predicting")._parts
    own = parts(drafts if drafts in HEAD_KINDS else None)
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
    return reference_greedy(parts_of(method).target.model, inputs, LENGTH)[0]


def compare(method: str, prompts: list[Prompt]) -> None:
    options: dict[str, Any] = STRICT.get(get(method).options.get("rule", ""), {}) if method in METHODS else {}
    engine = build(method if method in METHODS else "chain", parts_of(method), **options)
    for rows in (prompts, *([prompt] for prompt in prompts)):
        outputs = engine.generate([Request(prompt) for prompt in rows], max_new_tokens=LENGTH)
        assert [output.tokens for output in outputs] == [expected(method, prompt) for prompt in rows]


@pytest.mark.parametrize("method", [*METHODS, "assistant"])
def test_a_prompt_of_one_two_or_three_tokens_is_answered_alone_and_in_a_batch(method: str) -> None:
    compare(method, WORDS)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mtp"])
def test_a_picture_with_one_word_or_none_is_answered_alone_and_in_a_batch(method: str) -> None:
    seen = vlm("llava", "llava-draft").processor.prompt("", [picture(3)])
    token = parts_of(method).target.config.image_token_id
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
