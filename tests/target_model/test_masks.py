"""Masks are, entry by entry, those of plain Python; positions end with the model's context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, trees
from transformers import LlamaConfig

from saccade.errors import InputError
from saccade.target_model.token_blocks import MaskPlan, ModelLimits
from saccade.tree import DraftTree

LENGTHS = st.lists(st.integers(0, 6), min_size=3, max_size=3)
HERE = torch.device("cpu")


def naive_visible(tree: NaiveTree, length: int, node: int, entry: int, window: int | None, chunk: int | None) -> bool:
    """Whether a node sees a row's entry: committed ones count up, the tree's nodes stand after them by depth."""
    if entry >= length and entry - length not in tree.path(node):
        return False
    position, own = entry if entry < length else length + tree.depth(entry - length), length + tree.depth(node)
    in_chunk = chunk is None or position // chunk == own // chunk
    return in_chunk and (window is None or position > own - window)


def naive(row: NaiveTree, length: int, new: int, window: int | None, chunk: int | None) -> torch.Tensor:
    """``[new, K]`` for the last ``new`` nodes of a row, over its own entries."""
    count = len(row.parents)
    entries = range(length + count)
    return torch.tensor(
        [
            [naive_visible(row, length, node, entry, window, chunk) for entry in entries]
            for node in range(count - new, count)
        ]
    ).view(new, length + count)


def assert_right(
    mask: torch.Tensor | None,
    rows: list[NaiveTree],
    lengths: list[int],
    new: int,
    window: int | None,
    chunk: int | None = None,
) -> None:
    """Each row takes as many of the last columns as it has entries."""
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        expected = naive(row, length, new, window, chunk)
        if mask is None:
            assert expected.all()
            continue
        own = mask[place if mask.shape[0] > 1 else 0]
        assert torch.equal(own[:, own.shape[1] - expected.shape[1] :] == 0, expected)


def build(plan: MaskPlan, tree: DraftTree, lengths: list[int], new: int) -> dict[str, torch.Tensor | None]:
    count = tree.size
    allow = tree.ancestors[:, count - new :]
    return plan.build(
        lengths,
        new,
        dtype=torch.float32,
        device=HERE,
        pending=count - new,
        attention_mask=allow,
        depth=tree.depth,
    )


@settings(max_examples=60, deadline=None)
@given(trees(rows=3, max_nodes=6), LENGTHS, st.data())
def test_masks_equal_naive_ones(rows: list[NaiveTree], lengths: list[int], data: st.DataObject) -> None:
    """Also for the last nodes alone, with the earlier ones pending. Padding nodes see themselves, or softmax is NaN."""
    tree, new = draft_tree(rows), data.draw(st.integers(1, len(rows[0].parents)))
    for window in (None, data.draw(st.integers(1, 8))):
        built = build(MaskPlan(window, ()), tree, lengths, new)
        assert list(built) == ["all"]
        assert_right(built["all"], rows, lengths, new, window)


@settings(max_examples=60, deadline=None)
@given(trees(rows=3, max_nodes=6), LENGTHS, st.integers(1, 5))
def test_chunks_are_counted_from_the_beginning_of_each_row(
    rows: list[NaiveTree], lengths: list[int], chunk: int
) -> None:
    tree, new = draft_tree(rows), len(rows[0].parents)
    kinds = "full_attention", "chunked_attention"
    built = build(MaskPlan(None, kinds, chunk=chunk), tree, lengths, new)
    for kind, each in zip(kinds, (None, chunk), strict=True):
        assert_right(built[kind], rows, lengths, new, None, each)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), LENGTHS, st.one_of(st.none(), st.integers(1, 8)))
def test_a_chain_needs_no_tree(count: int, pending: int, lengths: list[int], window: int | None) -> None:
    """Without ``allow`` and ``depth`` every token sees all before it and itself."""
    total = pending + count
    chain = NaiveTree(tuple(max(n - 1, 0) for n in range(total)), (0,) * total, (True,) * total)
    built = MaskPlan(window, ()).build(lengths, count, dtype=torch.float32, device=HERE, pending=pending)["all"]
    assert_right(built, [chain] * 3, lengths, count, window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kinds", [(), ("full_attention", "sliding_attention")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_gives_each_kind_of_layer_its_mask(
    window: int | None, kinds: tuple[str, ...], dtype: torch.dtype
) -> None:
    row, lengths = NaiveTree((0, 0, 0, 1), (0, 0, 0, 0), (True,) * 4), [4, 2]
    tree = draft_tree([row])
    entries = {"attention_mask": tree.ancestors, "depth": tree.depth}
    built = MaskPlan(window, kinds).build(lengths, 4, dtype=dtype, device=HERE, **entries)
    wanted = {kind: window if kind == "sliding_attention" else None for kind in kinds} or {"all": window}
    assert set(built) == set(wanted)
    for kind, mask in built.items():
        assert mask is not None
        assert mask.dtype == dtype
        assert set(mask.flatten().tolist()) == {0.0, torch.finfo(dtype).min}
        assert_right(mask, [row, row], lengths, 4, wanted[kind])


POSITIONS = torch.tensor([[7, 8, 9, 10, 11]])


def test_positions_end_with_the_context_and_at_a_longrope_s_turn_before_it() -> None:
    assert ModelLimits(10, None).clamp_positions(POSITIONS, [7]).tolist() == [[7, 8, 9, 9, 9]]
    assert torch.equal(ModelLimits(None, None).clamp_positions(POSITIONS, [7]), POSITIONS)
    limits = ModelLimits(100, 10)
    assert limits.clamp_positions(POSITIONS, [7, 3]).tolist() == [[7, 8, 9, 9, 9]]
    assert torch.equal(limits.clamp_positions(POSITIONS, [3, 10]), POSITIONS)


def test_m_rope_positions_that_are_ahead_of_the_tokens_are_left_alone() -> None:
    """A video's positions follow its seconds, which may be more than its tokens."""
    both, ahead = POSITIONS.expand(2, -1), torch.tensor([[2], [-4]])
    clamped = ModelLimits(10, None).clamp_positions(both, [7, 7], ahead)
    assert clamped.tolist() == [[7, 8, 9, 10, 11], [7, 8, 9, 9, 9]]


def test_a_longrope_is_found_also_where_layer_types_have_embeddings_of_their_own() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    default = {"rope_type": "default", "rope_theta": 1e4}
    config = LlamaConfig()
    assert ModelLimits.of(config).longrope_threshold is None
    config.rope_parameters = {"full_attention": rope, "sliding_attention": default}
    assert ModelLimits.of(config).longrope_threshold == 40


def test_a_row_of_a_batch_that_is_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="needs 12 tokens but this model's context is 10"):
        ModelLimits(10, None).check_rows([3, 7], [7, 5])
