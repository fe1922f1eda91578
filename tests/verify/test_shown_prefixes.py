"""Processors that look at the prefix are shown those alone that plain decoding can come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, trees
from torch import Tensor

from families import FAMILIES
from saccade import hf
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.verify.rule import Processing

VOCAB = 5
PREFIXES = [[1, 2, 3, 1], [4]]  # up to and including the root


class Forbidding:
    """Forbids some tokens everywhere, and notes what it was shown."""

    def __init__(self, forbidden: set[int]) -> None:
        self.forbidden = forbidden
        self.shown: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.shown += ids.tolist()
        return scores.index_fill(1, torch.tensor(sorted(self.forbidden), dtype=torch.long), -torch.inf)


TOKENS = st.sets(st.integers(0, VOCAB - 1), max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    trees(rows=2, vocab=VOCAB),
    st.lists(TOKENS, min_size=2, max_size=2),
    st.lists(TOKENS, min_size=2, max_size=2),
    st.lists(st.integers(0, 4), min_size=2, max_size=2),
)
def test_no_prefix_behind_a_forbidden_token_an_end_or_without_room_is_shown(
    rows: list[NaiveTree], forbidden: list[set[int]], ends: list[set[int]], room: list[int]
) -> None:
    processors = [Forbidding(tokens) for tokens in forbidden]
    tree = draft_tree(rows)
    Processing([[p] for p in processors], ends)(tree, torch.zeros(2, tree.size, VOCAB), PREFIXES, room)
    for row, naive_tree in enumerate(rows):
        said = [naive_tree.below_root(node) for node, valid in enumerate(naive_tree.valid) if valid]
        reached = [
            PREFIXES[row] + text
            for text in said
            if len(text) < room[row] and not (forbidden[row] | ends[row]) & {*text}
        ]
        assert sorted(processors[row].shown) == sorted(reached)


# --------------------------------------------------------------------------- constraints that end

CASE = FAMILIES["llama"]
WORDS = [
    [20, 30, 40, 50, 60, 70, 80, 90],
    [20, 31, 41, 51, 61, 71, 81, 91],
    [25, 35, 45, 55, 65, 75, 85, 95],
]
"""All that may be said; the same token never stands in two places, and all words end together."""


@cache
def target() -> Target:
    return Target(CASE.model())


@cache
def prompts() -> list[Prompt]:
    return split(target().config, CASE.inputs("text", rows=3))


def may_follow(said: Sequence[int], words: Sequence[Sequence[int]]) -> list[int]:
    follow = sorted({w[len(said)] for w in words if w[: len(said)] == [*said] and len(w) > len(said)})
    assert follow, f"plain decoding never asks what follows {said}"
    return follow


@cache
def engine(method: str) -> Engine:
    if method == "lookup":
        return Engine(target(), PromptLookup(gamma=4))
    draft = Target(CASE.draft_model())
    policy = Chain(4) if method == "chain" else StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    return Engine(target(), ModelDrafter(draft, policy))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["chain", "static", "lookup"])
def test_a_constraint_is_only_asked_what_it_can_answer(method: str, do_sample: bool) -> None:
    """Words of as many tokens as may be said, and shorter ones behind which the row ends."""
    lengths = {len(p) for p in prompts()}
    assert len(lengths) > 1
    for words, n, eos in (
        (WORDS, 8, None),
        ([[*w[: 3 + 2 * i], 7] for i, w in enumerate(WORDS)], 20, 7),
    ):

        def allowed(row: int, ids: Tensor, words: Any = words) -> list[int]:
            return may_follow(ids[len(prompts()[row]) :].tolist(), words)

        options = {"do_sample": do_sample, "eos_token_id": eos, "max_new_tokens": n}
        requests = [Request(p, seed=3) for p in prompts()]
        outputs = engine(method).generate(requests, prefix_allowed_tokens_fn=allowed, **options)
        for row, (prompt, output) in enumerate(zip(prompts(), outputs, strict=True)):
            assert output.tokens in words
            if do_sample:
                continue
            ids = torch.tensor([prompt.ids])
            expected = CASE.model().generate(
                ids, prefix_allowed_tokens_fn=lambda _, ids, r=row: allowed(r, ids), **options
            )
            assert output.tokens == expected[0, len(prompt) :].tolist()


def test_a_constraint_holds_in_generate_of_transformers() -> None:
    model, (prompt, *_) = CASE.model(), prompts()
    ids = torch.tensor([prompt.ids])

    def allowed(_: int, ids: Tensor) -> list[int]:
        return may_follow(ids[len(prompt) :].tolist(), WORDS)

    options: dict[str, Any] = {"max_new_tokens": 8, "prefix_allowed_tokens_fn": allowed}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=hf.speculate(CASE.draft_model()), **options), expected)


def test_an_id_that_the_target_cannot_emit_is_passed_over() -> None:
    """Placeholders may have ids behind the last row of the output layer."""
    tree = draft_tree([NaiveTree((0, 0, 0), (1, VOCAB + 2, 2), (True,) * 3)])
    processor = Forbidding(set())
    Processing([[processor]])(tree, torch.zeros(1, 3, VOCAB), [[3, 1]])
    assert processor.shown == [[3, 1], [3, 1, 2]]
