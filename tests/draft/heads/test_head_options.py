"""What single kinds of heads are built from, what is refused, and the methods that draft with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints import picture, vlm
from heads_kit import AHEAD, random_head, target
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.kangaroo import Kangaroo
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head, save_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Request
from saccade.errors import MethodError, ModelError
from saccade.methods import build
from saccade.methods.compositions import Models
from saccade.methods.settings import TREES


def parts_of(kind: str, **options: Any) -> tuple[Models, list[Request], list[int]]:
    """Models with a head, a request, and plain decoding's answer to it."""
    owner = vlm("llava")
    head = build_head(HeadConfig.from_target(owner.target, kind, **options)).to(owner.target.dtype)
    parts = Models(owner.target, head=head)
    requests = [Request(owner.processor.prompt("What is it?", [picture(3)]))]
    (expected,) = build("plain", parts).generate(requests, max_new_tokens=12)
    return parts, requests, expected.tokens


@pytest.mark.parametrize("kind", AHEAD)
def test_a_tree_deeper_than_the_stacks_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"This {kind} head drafts 5 tokens ahead, but the tree has up to 6"):
        HeadDrafter(random_head("llava", kind), target("llava"), Chain(6))


def test_a_new_medusa_head_guesses_the_target_s_own_next_token_again() -> None:
    head = build_head(HeadConfig.from_target(target("llava"), "medusa", layers=2))
    x = torch.randn(1, 3, 64)
    for step in range(5):
        assert torch.equal(head(x, step=step), x)  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{}, *({"tree": tree} for tree in TREES)])
def test_default_lengths_are_at_most_a_head_s_stacks(options: dict[str, str]) -> None:
    parts, requests, _ = parts_of("medusa", steps=2)
    (output,) = build("medusa", parts, **options).generate(requests, max_new_tokens=12)
    assert output.stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", AHEAD)
def test_stacks_by_name(kind: str) -> None:
    parts, requests, expected = parts_of(kind)
    for options in ({}, {"tree": "dynamic"}, {"tree": "chain", "gamma": 3}):
        (output,) = build(kind, parts, **options).generate(requests, max_new_tokens=12)
        assert output.tokens == expected
        assert output.stats.drafted_tokens > 0
    for deep in ({"tree": "dynamic", "max_depth": 6}, {"tree": "chain", "gamma": 6}):
        with pytest.raises(MethodError, match="drafts 5 tokens ahead, but the tree has up to"):
            build(kind, parts, **deep)


def test_kangaroo_by_name() -> None:
    parts, requests, expected = parts_of("kangaroo")
    drafted = {}
    for threshold in (0.0, 0.6, 1.0):
        (output,) = build("kangaroo", parts, gamma=3, confidence=threshold).generate(requests, max_new_tokens=12)
        assert output.tokens == expected
        drafted[threshold] = output.stats.drafted_tokens / output.stats.target_passes
    assert drafted[0.0] > 2 > drafted[1.0] > 0
    with pytest.raises(MethodError, match="confidence of method kangaroo must be in the range 0 to 1, not 60"):
        build("kangaroo", parts, confidence=60.0)


@pytest.mark.parametrize(("layers", "left"), [(2, 1), (16, 1), (17, 2), (32, 2), (40, 3)])
def test_a_sixteenth_of_the_layers_drafts(layers: int, left: int) -> None:
    assert Kangaroo.reads(layers) == (left,)
    assert Kangaroo.reads(layers, exit=1) == (1,)


def test_an_exit_that_the_layers_contradict_is_refused(tmp_path: Any) -> None:
    head = random_head("gemma3", "kangaroo", exit=2)
    assert head.layers == (2,)
    save_head(head, tmp_path)
    changed = (tmp_path / "config.json").read_text().replace('"exit": 2', '"exit": 3')
    (tmp_path / "config.json").write_text(changed)
    with pytest.raises(ModelError, match="reads layer 2, not 3 as its exit says"):
        load_head(tmp_path, target("gemma3"))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("eagle9", {}, "no drafter head of the kind 'eagle9'"),
    ("hivis", {"colour": 1}, "The hivis head has no option colour"),
    ("hivis", {"after_image": "none"}, "after_image must be one of text, visual"),
    ("eagle2", {"blocks": 0}, "blocks must be a whole number from 1 to 256, not 0"),
    ("eagle2", {"mlp": 0}, "a whole number from 1, not 0"),
    *(
        ("eagle3", {"own_vocabulary": known}, "own_vocabulary must be a whole number from 0 to 192")
        for known in (-1, 193, True, "all")
    ),
    ("medusa", {"mlp": 8}, "has no option mlp"),
    ("medusa", {"layers": 0}, "layers must be a whole number from 1 to 256, not 0"),
    ("vispec", {"queries": 1}, "queries must be a whole number from 2 to 16777216, not 1"),
    *(
        ("kangaroo", {"exit": layer}, "exit must be a whole number below the target's 2 layers")
        for layer in (2, -1, 1.0, "1", True)
    ),
    ("dream", {"keep": 0}, "keep must be a share above 0 and up to 1, not 0"),
    ("dream", {"keep": "most"}, "keep must be a number, not 'most'"),
    ("dream", {"keep": 1.5}, "keep must be a share"),
    ("dream", {"gate": "sigmoid"}, "gate must be one of open, tanh, replace"),
    ("dream", {"cross": 1.0}, "cross must be one of 1, 0, 2"),
    ("dream", {"initial": 0}, "initial must be one of True, False"),
    ("dream", {"initial": False, "final": False}, "needs its initial or its final block"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_an_option_that_cannot_be_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        random_head("llava", kind, **options)


def test_a_configuration_that_cannot_be_is_refused() -> None:
    config = HeadConfig.from_target(target("llava"), "hivis")
    for changes, message in (
        ({"heads": 3}, "heads that are a multiple of its kv_heads"),
        ({"steps": 0}, "steps must be a whole number from 1 to 256, not 0"),
        ({"options": {}}, r"takes the options \['after_image', 'bias', 'norms', 'positions'\]"),
        ({"rope": {"rope_type": "wavy", "rope_theta": 1.0}}, "rope type 'wavy' is not known"),
    ):
        with pytest.raises(ModelError, match=message):
            build_head(replace(config, **changes))  # type: ignore[arg-type]
