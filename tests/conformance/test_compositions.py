"""Any drafter with any tree, rule and pruning: greedy answers are plain decoding's wherever the rule is lossless."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from checkpoints import picture, vlm
from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.engine import Request
from saccade.methods import build, is_lossless, options
from saccade.methods.compositions import Models
from saccade.methods.settings import RULES, TREES

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
