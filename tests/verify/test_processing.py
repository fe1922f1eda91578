"""Every node's scores are what the processors give for that node's own prefix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, trees
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.processors import PREFIX_FREE
from saccade.verify.rule import Processing, RowProcessing

VOCAB = 5
PREFIXES = [[1, 2, 3, 1], [4], [0, 0, 3, 2, 2, 1, 4]]  # up to and including the root


def allowed(_: int, ids: Tensor) -> list[int]:
    """A constraint that looks at the whole prefix."""
    total = int(ids.sum())
    return [total % VOCAB, (total + len(ids)) % VOCAB]


PROCESSORS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: hf.TemperatureLogitsWarper(0.6),
    "top_p": lambda: hf.TopPLogitsWarper(0.7),
    "top_k": lambda: hf.TopKLogitsWarper(3),
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "ngram": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "min_length": lambda: hf.MinLengthLogitsProcessor(6, eos_token_id=0, device="cpu"),
    "forced_end": lambda: hf.ForcedEOSTokenLogitsProcessor(7, eos_token_id=0, device="cpu"),
    "constraint": lambda: hf.PrefixConstrainedLogitsProcessor(allowed, 1),
    "bad_words": lambda: hf.NoBadWordsLogitsProcessor([[2], [1, 3]], eos_token_id=0),
}


def naive(tree: NaiveTree, node: int, prefix: list[int], logits: Tensor, processors: list[Any]) -> Tensor:
    scores, ids = logits.clone()[None], torch.tensor([prefix + tree.below_root(node)])
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def plain_decoding_comes_to(
    tree: NaiveTree, node: int, prefix: list[int], logits: Tensor, processors: list[Any]
) -> bool:
    """Whether no token on the way to the node is forbidden behind what stands before it; ``logits`` ``[N, V]``."""
    for above, below in pairwise(tree.path(node)):
        scores = naive(tree, above, prefix, logits[above], processors)
        if scores[tree.tokens[below]].isneginf() and not scores.isneginf().all():
            return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    trees(rows=3, vocab=VOCAB),
    st.lists(st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=3), min_size=3, max_size=3),
    st.integers(0, 99),
)
def test_scores_equal_those_of_each_prefix_on_its_own(rows: list[NaiveTree], names: list[list[str]], seed: int) -> None:
    """Rows have processors of their own, in their own order."""
    processors = [[PROCESSORS[n]() for n in row] for row in names]
    processing = Processing(processors)
    tree = draft_tree(rows)
    logits = torch.randn(3, tree.size, VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    scores = processing(tree, logits, PREFIXES)
    assert torch.equal(logits, before)
    for row, naive_tree in enumerate(rows):
        for node in (n for n, valid in enumerate(naive_tree.valid) if valid):
            given_ = PREFIXES[row], logits[row], processors[row]
            looks = any(type(p) not in PREFIX_FREE for p in processors[row])
            if looks and not plain_decoding_comes_to(naive_tree, node, *given_):
                assert torch.equal(scores[row, node], logits[row, node])
                continue
            expected = naive(naive_tree, node, PREFIXES[row], logits[row, node], processors[row])
            torch.testing.assert_close(scores[row, node], expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("name", "prefix"), [("repetition", [3, 1]), ("ngram", [2, 3, 4, 0, 1]), ("constraint", [3, 1])]
)
def test_processors_that_look_at_the_prefix_tell_siblings_apart(name: str, prefix: list[int]) -> None:
    """Otherwise the comparison above would not need trees."""
    tree = draft_tree([NaiveTree((0, 0, 0), (1, 2, 4), (True,) * 3)])
    scores = Processing([[PROCESSORS[name]()]])(tree, torch.ones(1, 3, VOCAB), [prefix])
    assert not torch.equal(scores[0, 1], scores[0, 2])


def test_without_processors_the_logits_pass_through_as_they_are() -> None:
    logits = torch.randn(1, 1, VOCAB, dtype=torch.bfloat16)
    tree = draft_tree([NaiveTree((0,), (1,), (True,))])
    assert Processing([[]])(tree, logits, [[1]]) is logits


def test_a_drafter_applies_the_prefix_free_processors_only() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    processing = Processing([[PROCESSORS["repetition"](), PROCESSORS["temperature"](), PROCESSORS["top_k"]()]])
    expected = hf.TopKLogitsWarper(3)(None, logits.float() / 0.6)
    torch.testing.assert_close(processing.warp(logits), expected, rtol=0.0, atol=0.0)
    assert processing.needs_prefix
    assert not Processing([[PROCESSORS["temperature"]()]]).needs_prefix


def test_an_unknown_processor_is_taken_to_look_at_the_prefix() -> None:
    assert Processing([[lambda ids, scores: scores + ids[:, -1:]]]).needs_prefix


def test_rows_with_settings_of_their_own_are_warped_each_by_its_own() -> None:
    """Also what a drafter draws from, of which every row has as many lines."""
    rows = [[hf.TemperatureLogitsWarper(t), hf.TopKLogitsWarper(k)] for t, k in ((0.5, 2), (2.0, 3), (0.5, 2))]
    logits = torch.randn(3, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    warped = Processing(rows).warp(logits.flatten(0, 1)).view(3, 4, VOCAB)
    for row, (temperature, top) in enumerate(rows):
        expected = top(None, temperature(None, logits[row]))
        torch.testing.assert_close(warped[row], expected, rtol=0.0, atol=0.0)


def test_rows_may_join_and_leave_between_two_forwards() -> None:
    """What stateful processors have read stays with the row, not with its place."""

    class Said:
        def start(self, prompt: list[int]) -> int:
            return 0

        def advance(self, state: int, token: int) -> int:
            return state + token

        def scores(self, state: int, scores: Tensor) -> Tensor:
            return scores + state

    first, second = RowProcessing([Said()]), RowProcessing([Said()])
    tree = draft_tree([NaiveTree((0, 0), (2, 3), (True, True))])
    assert Processing([first])(tree, torch.zeros(1, 2, VOCAB), [[1, 2]])[0, :, 0].tolist() == [0, 3]
    both = draft_tree([NaiveTree((0, 0), (4, 1), (True, True))] * 2)
    scores = Processing([second, first])(both, torch.zeros(2, 2, VOCAB), [[4], [1, 2, 3, 4]])
    assert scores[..., 0].tolist() == [[0, 1], [7, 8]]
