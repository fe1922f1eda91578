"""Every node's scores are what the processors give for that node's own prefix, which plain decoding must come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import METHODS, engine, prompts
from random_trees import NaiveTree, draft_tree, trees
from torch import Tensor
from transformers.generation import logits_process as hf

from families import FAMILIES
from saccade.engine import Request
from saccade.errors import InputError
from saccade.processors import PREFIX_FREE, stateless
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


def of_rows(rows: Sequence[Sequence[Any]], ends: Sequence[set[int]] | None = None) -> Processing:
    """Processors of new rows, and the tokens that end them."""
    return Processing([RowProcessing(row, end) for row, end in zip(rows, ends or [set()] * len(rows), strict=True)])


def naive(tree: NaiveTree, node: int, prefix: list[int], logits: Tensor, processors: list[Any]) -> Tensor:
    scores, ids = logits.clone()[None], torch.tensor([prefix + tree.below_root(node)])
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def plain_decoding_comes_to(
    tree: NaiveTree, node: int, prefix: list[int], logits: Tensor, processors: list[Any]
) -> bool:
    """Whether no token on the way to the node is forbidden after what stands before it; ``logits`` ``[N, V]``."""
    for above, below in pairwise(tree.path(node)):
        scores = naive(tree, above, prefix, logits[above], processors)
        if scores[tree.tokens[below]].isneginf() and not scores.isneginf().all():
            return False
    return True


@settings(max_examples=40, deadline=None)
@given(
    trees(rows=3, vocab=VOCAB),
    st.lists(st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=3), min_size=3, max_size=3),
    st.integers(0, 99),
)
def test_scores_equal_those_of_each_prefix_on_its_own(rows: list[NaiveTree], names: list[list[str]], seed: int) -> None:
    """Rows have processors of their own, in their own order."""
    processors = [[PROCESSORS[n]() for n in row] for row in names]
    processing = of_rows(processors)
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


def test_a_drafter_applies_the_prefix_free_processors_only() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    processing = of_rows([[PROCESSORS["repetition"](), PROCESSORS["temperature"](), PROCESSORS["top_k"]()]])
    expected = hf.TopKLogitsWarper(3)(None, logits.float() / 0.6)
    torch.testing.assert_close(processing.warp(logits), expected, rtol=0.0, atol=0.0)
    assert processing.needs_prefix
    assert not of_rows([[PROCESSORS["temperature"]()]]).needs_prefix


def test_rows_with_settings_of_their_own_are_warped_each_by_its_own() -> None:
    """Also what a drafter draws from, of which every row has as many lines."""
    rows = [[hf.TemperatureLogitsWarper(t), hf.TopKLogitsWarper(k)] for t, k in ((0.5, 2), (2.0, 3), (0.5, 2))]
    logits = torch.randn(3, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    warped = of_rows(rows).warp(logits.flatten(0, 1)).view(3, 4, VOCAB)
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


def test_a_token_that_a_state_has_taken_in_is_not_taken_in_again_where_a_later_one_raised() -> None:
    """The row's processors are called again alone, after they raised among others."""

    class Fails:
        failed = False

        def start(self, prompt: Sequence[int]) -> tuple[int, ...]:
            return ()

        def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
            if token == 3 and not self.failed:
                self.failed = True
                raise ZeroDivisionError
            return *state, token

        def scores(self, state: tuple[int, ...], scores: Tensor) -> Tensor:
            return scores

    row = RowProcessing([Fails()])
    row.states_after([7])
    with pytest.raises(ZeroDivisionError):
        row.states_after([7, 1, 2, 3, 4])
    assert row.states_after([7, 1, 2, 3, 4]) == {0: (1, 2, 3, 4)}


class Forbidding:
    """Forbids some tokens everywhere, and notes what it was shown."""

    def __init__(self, forbidden: set[int]) -> None:
        self.forbidden = forbidden
        self.shown: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.shown += ids.tolist()
        return scores.index_fill(1, torch.tensor(sorted(self.forbidden), dtype=torch.long), -torch.inf)


TOKENS = st.sets(st.integers(0, VOCAB - 1), max_size=2)


@settings(max_examples=40, deadline=None)
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
    of_rows([[p] for p in processors], ends)(tree, torch.zeros(2, tree.size, VOCAB), PREFIXES, room)
    for row, naive_tree in enumerate(rows):
        emitted = [naive_tree.below_root(node) for node, valid in enumerate(naive_tree.valid) if valid]
        reached = [
            PREFIXES[row] + text
            for text in emitted
            if len(text) < room[row] and not (forbidden[row] | ends[row]) & {*text}
        ]
        assert sorted(processors[row].shown) == sorted(reached)


# --------------------------------------------------------------------------- constraints that end

WORDS = [[20, 30, 40, 50, 60, 70, 80, 90], [20, 31, 41, 51, 61, 71, 81, 91], [25, 35, 45, 55, 65, 75, 85, 95]]
"""All that may be said; the same token never stands in two places, and all words end together."""


def may_follow(emitted: Sequence[int], words: Sequence[Sequence[int]]) -> list[int]:
    follow = sorted({w[len(emitted)] for w in words if w[: len(emitted)] == [*emitted] and len(w) > len(emitted)})
    assert follow, f"plain decoding never asks what follows {emitted}"
    return follow


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS[1:])
def test_a_constraint_is_only_asked_what_it_can_answer(method: str, do_sample: bool) -> None:
    """Words of as many tokens as may be said, and shorter ones after which the row ends."""
    lengths = {len(p) for p in prompts()}
    assert len(lengths) > 1
    for words, n, eos in ((WORDS, 8, None), ([[*w[: 3 + 2 * i], 7] for i, w in enumerate(WORDS)], 20, 7)):

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
            expected = (
                FAMILIES["llama"]
                .model()
                .generate(ids, prefix_allowed_tokens_fn=lambda _, ids, r=row: allowed(r, ids), **options)
            )
            assert output.tokens == expected[0, len(prompt) :].tolist()


def test_an_id_that_the_target_cannot_emit_is_passed_over() -> None:
    """Placeholders may have ids after the last row of the output layer."""
    tree = draft_tree([NaiveTree((0, 0, 0), (1, VOCAB + 2, 2), (True,) * 3)])
    processor = Forbidding(set())
    of_rows([[processor]])(tree, torch.zeros(1, 3, VOCAB), [[3, 1]])
    assert processor.shown == [[3, 1], [3, 1, 2]]


# --------------------------------------------------------------------------- nothing to sample from


def spoiling(at: int, value: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that gives every token this score once a prefix has ``at`` tokens."""

    def spoil(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, value) if ids.shape[1] == at else scores

    return stateless(spoil)


def sample(method: str, new: int = 12, **options: Any) -> list[list[int]]:
    requests = [Request(prompt, seed=row) for row, prompt in enumerate(prompts()[:2])]
    return [o.tokens for o in engine(method).generate(requests, max_new_tokens=new, do_sample=True, **options)]


METHOD = pytest.mark.parametrize("method", METHODS)


@METHOD
@pytest.mark.parametrize(("after", "value"), [(0, float("nan")), (1, float("-inf")), (5, float("inf"))])
def test_scores_without_a_finite_maximum_are_refused_with_the_processors_names(
    method: str, value: float, after: int
) -> None:
    processor = spoiling(len(prompts()[1]) + after, value)
    message = rf"processors of the row \(spoil, .*\) leave nothing to sample from after {after} new tokens"
    with pytest.raises(InputError, match=message):
        sample(method, logits_processor=[processor], top_k=20)


@METHOD
def test_scores_behind_a_rows_end_do_not_matter(method: str) -> None:
    longest = max(len(p) for p in prompts()[:2])
    assert sample(method, 6, logits_processor=[spoiling(longest + 6, float("-inf"))]) == sample(method, 6)


@METHOD
def test_one_token_that_is_left_is_taken(method: str) -> None:
    def only(ids: Tensor, scores: Tensor) -> Tensor:
        left = torch.full_like(scores, float("-inf"))
        left[:, 77] = scores[:, 77]
        return left

    assert sample(method, 5, logits_processor=[stateless(only)]) == [[77] * 5] * 2
