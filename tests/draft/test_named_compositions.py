"""Methods by name that join parts: a drafter without pictures, copies beside a draft model, trees under other rules."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from checkpoints import picture, ready, vlm
from families import FAMILIES
from harness import course
from saccade import InputError, MethodError, options
from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.trees.policy import Chain, branches_of
from saccade.draft.trees.sage import SageTree
from saccade.engine import Request
from saccade.hf import speculate
from saccade.methods import build
from saccade.methods.compositions import Models
from saccade.options import Checked, FLyOptions, LVSpecOptions, RandomOptions

IMAGES = [picture(3)]
QUESTION = "What is it, and what was it?"
PAIRS = [("llava", "llava-draft"), ("llava", "llama"), ("qwen", "qwen-draft")]


def plain(name: str) -> list[int]:
    answer: list[int] = vlm(name, method="plain").generate(QUESTION, IMAGES).tokens
    return answer


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_spd_drafts_what_the_draft_model_guesses_from_the_words(target: str, drafter: str) -> None:
    blind, chain = (vlm(target, drafter).using(m, gamma=4) for m in ("spd", "chain"))
    prompt = blind.processor.prompt(QUESTION, IMAGES)
    words = blind.processor.text_only(prompt)
    assert not words.media
    (expected,) = chain.engine.generate([Request(prompt, words)], max_new_tokens=24)
    assert course(blind.generate(QUESTION, IMAGES)) == course(expected)
    (direct,) = blind.engine.generate([Request(prompt)], max_new_tokens=24)  # the target's prompt for both
    assert course(direct) == course(expected)


def test_no_option_of_a_tree_is_one_of_a_rule() -> None:
    """They are given side by side, by name alone."""
    rules = (LVSpecOptions, FLyOptions, RandomOptions)
    trees = [
        kind
        for kind in vars(options).values()
        if isinstance(kind, type) and issubclass(kind, Checked) and kind is not Checked
    ]
    of_rules = {field.name for rule in rules for field in fields(rule)}
    assert of_rules.isdisjoint(field.name for tree in set(trees).difference(rules) for field in fields(tree))


def test_trees_are_put_where_the_options_say() -> None:
    parts: Models = vlm("llava", "llava-draft")._parts
    tabed: Any = build("tabed", parts, tree="sage").drafter
    assert isinstance(tabed, EnsembleDrafter)
    assert isinstance(tabed.policy, SageTree)
    assert build("lvspec", parts, tree="sage").drafter.policy == SageTree()  # type: ignore[union-attr]
    assert build("lvspec", parts, tree="branches", gamma=3).drafter.policy == branches_of(2, 3)  # type: ignore[union-attr]
    assert build("lvspec", parts, gamma=3).drafter.policy == Chain(3)  # type: ignore[union-attr]
    assert branches_of(2, 2).paths == [(0,), (0, 0), (1,), (1, 0)]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("tabed", {"tree": "oak"}, "tree of method tabed must be one of chain, branches"),
        ("tabed", {"tree": "sage", "width": 2}, "has the option width with tree=width only"),
        ("lookup-merge", {"merged_total": 0}, "merged_total of method lookup-merge must be at least 1"),
        ("sage", {"d_min": 9}, "depths must rise from d_min over d_max to ceiling"),
        ("tabed", {"views": "MM"}, "must be one or more letters of MTCPR, each at most once"),
        ("tabed", {"views": "mt"}, "must be one or more letters of MTCPR"),
    ],
)
def test_nonsense_is_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        build(method, vlm("llava", "llava-draft")._parts, **options)


@pytest.mark.parametrize("form", ["texts", "function"])
def test_captions_are_given_as_texts_or_by_a_function(form: str) -> None:
    loaded = vlm("llava", "llava-draft")
    prompt = loaded.processor.prompt(QUESTION, IMAGES)
    pictures: list[Any] = []
    captions: Any = (
        {prompt.media[0].digest: "a cup"} if form == "texts" else lambda image: pictures.append(image) or "a cup"
    )
    model = loaded.using("tabed", views="MC", captioner=captions)
    assert model.generate(QUESTION, IMAGES).tokens == plain("llava")
    view: Any = model.engine.drafter.views[1]  # type: ignore[union-attr]
    assert view.captions == {prompt.media[0].digest: "a cup"}
    assert len(pictures) == (form == "function")


def test_a_caption_that_is_missing_or_a_captioner_that_is_blind_is_refused() -> None:
    loaded = vlm("llava", "llava-draft")
    with pytest.raises(InputError, match="has no caption for the image with the digest"):
        loaded.using("tabed", views="MC", captioner={"other": "a cup"}).generate(QUESTION, IMAGES)
    with pytest.raises(MethodError, match="is a language model, which takes no images"):
        loaded.using("tabed", views="MC", captioner=str(ready("llama")))
    with pytest.raises(MethodError, match="captioner of method tabed must be text, not 3"):
        loaded.using("tabed", views="MC", captioner=3)
    with pytest.raises(MethodError, match="has no option captioner"):
        loaded.using("chain", captioner="blip")
    with pytest.raises(MethodError, match="the draft model is a language model, whose prompts have no pictures"):
        vlm("llava", "llama").using("tabed", views="TC", captioner=lambda image: "a cup")


def test_another_vlm_of_a_known_family_captions() -> None:
    model = vlm("llava", "llava-draft").using("tabed", views="MC", captioner=str(ready("qwen")))
    assert model.generate(QUESTION, IMAGES).tokens == plain("llava")
    view: Any = model.engine.drafter.views[1]  # type: ignore[union-attr]
    assert view.seconds > 0


def test_methods_that_rewrite_prompts_say_what_they_need() -> None:
    parts = vlm("llava", "llava-draft")._parts
    for method in ("spd", "tabed"):
        with pytest.raises(MethodError, match=f"{method} rewrites the draft model's prompt"):
            build(method, Models(parts.target, parts.draft_model))


def test_a_text_only_drafter_beside_copies_runs_in_generate() -> None:
    case = FAMILIES["qwen2_5_vl"]
    inputs = case.inputs("image", 2)
    blind = speculate(case.text_draft_model(), "lookup-merge", gamma=3)
    sequences = case.model().generate(**inputs, max_new_tokens=16, custom_generate=blind)
    assert sequences[:, inputs["input_ids"].shape[1] :].tolist() == case.reference("image", rows=2, n=16)
