"""A row ends where plain decoding would, wherever in a block that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine import Request, Row
from saccade.engine.row import RowPlan
from saccade.inputs.families.family import Prompt
from saccade.output import Mark

PROMPT = [3, 1]


def block_marks(drafted: int, own: int) -> list[Mark]:
    return [*["draft"] * drafted, *["target"] * own]


class EndsWith:
    """A stopping criterion, called as `generate` calls it: ids of the whole row, prompt included."""

    def __init__(self, sequence: Sequence[int]) -> None:
        self.sequence = list(sequence)

    def __call__(self, ids: torch.Tensor, scores: None) -> torch.Tensor:
        return torch.tensor([ids[0, -len(self.sequence) :].tolist() == self.sequence])


def row(limit: int = 100, eos: Sequence[int] = (), criteria: Sequence[Callable[..., object]] = ()) -> Row:
    return on("cpu", RowPlan(limit, frozenset(eos), (), tuple(criteria)))


def on(device: str, plan: RowPlan) -> Row:
    return Row(Request(Prompt(tuple(PROMPT))), plan, False, torch.device(device))


def naive(text: list[int], limit: int, eos: set[int], stop: list[int]) -> tuple[list[int], str]:
    """Plain decoding: one token at a time, then the checks."""
    for count, token in enumerate(text, 1):
        if token in eos:
            return text[:count], "eos"
        if stop and (PROMPT + text[:count])[-len(stop) :] == stop:
            return text[:count], "stop"
        if count == limit:
            return text[:count], "length"
    return text, "interrupted"


TOKENS = st.integers(0, 4)


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.integers(0, 4)), min_size=1, max_size=6),
    limit=st.integers(1, 12),
    eos=st.sets(TOKENS, max_size=1),
    stop=st.lists(TOKENS, max_size=3),
)
def test_the_output_is_cut_exactly_where_plain_decoding_ends(
    blocks: list[tuple[list[int], int]], limit: int, eos: set[int], stop: list[int]
) -> None:
    """Blocks end with the target's own token; the ones before it were drafted.

    The prompt's own end of sequence ends nothing, a stop sequence may begin in it, and of several reasons an end of
    sequence is the strongest and the length the weakest.
    """
    under_test = row(limit, eos, [EndsWith(stop)] if stop else [])
    assert under_test.remaining == limit
    text = [token for block, _ in blocks for token in block]
    emitted: list[int] = []
    marks: list[str] = []
    for block, _ in blocks:
        if under_test.done:
            break
        emitted += under_test.emit(block, block_marks(len(block) - 1, 1))
        marks += ["draft"] * (len(block) - 1) + ["target"]
    output = under_test.finish()
    expected, reason = naive(text, limit, eos, stop)
    assert under_test.remaining == (limit - len(expected) if reason == "interrupted" else 0)
    assert (output.tokens, output.finish_reason) == (expected, reason)
    assert emitted == expected
    assert output.marks == marks[: len(expected)]
    assert under_test.ids == PROMPT + expected
    assert output.stats.new_tokens == len(expected)
    assert output.stats.accepted_tokens == output.marks.count("draft")


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=5))
def test_the_drafter_gets_every_token_once(blocks: list[list[int]]) -> None:
    under_test, taken = row(), list[int]()
    for block in blocks:
        under_test.emit(block, block_marks(0, len(block)))
        taken += under_test.pop_new_tokens()
    assert taken == under_test.output


def test_a_histogram_counts_passes_by_what_was_accepted_in_them() -> None:
    under_test = row()
    stats = under_test.stats
    assert (stats.accepted_length, stats.block_efficiency, stats.acceptance_by_depth) == (0.0, 0.0, [])
    under_test.emit([1], block_marks(0, 1))  # prefill
    under_test.stats.prefill_tokens = 1
    for accepted in (0, 3, 1, 3):
        under_test.record_pass(accepted)
        under_test.emit([1] * (accepted + 1), block_marks(accepted, 1))
    stats = under_test.stats
    assert stats.accepted_histogram == [1, 1, 0, 2]
    assert stats.target_passes == 4
    assert stats.accepted_length == pytest.approx(7 / 4)
    assert stats.block_efficiency == pytest.approx(7 / 4 + 1)
    assert stats.acceptance_by_depth == pytest.approx([3 / 4, 2 / 3, 1.0])


def test_tokens_behind_the_end_are_not_counted_as_what_a_pass_gave() -> None:
    under_test = row(eos=[9])
    under_test.emit([1], block_marks(0, 1))
    under_test.stats.prefill_tokens = 1
    for block in ([1, 1, 1, 1], [1, 9, 1, 1]):
        under_test.record_pass(3)
        under_test.emit(block, block_marks(3, 1))
    stats = under_test.finish().stats
    assert stats.accepted_histogram == [0, 0, 0, 2]
    assert (stats.block_efficiency, stats.accepted_length) == (3.0, 2.0)


def test_stopping_criteria_are_given_ids_on_the_device_of_the_model() -> None:
    devices: list[str] = []

    def criterion(ids: torch.Tensor, scores: None) -> bool:
        devices.append(ids.device.type)
        return False

    under_test = on("meta", RowPlan(9, frozenset(), (), (criterion,)))
    under_test.emit([2, 4], block_marks(1, 1))
    assert devices == ["meta", "meta"]


def test_a_drafter_that_joins_late_gets_the_prompts_last_token_and_all_of_the_answer() -> None:
    under_test = row()
    under_test.emit([5, 6], ["target", "target"])
    under_test.drafter_lacks_end = True
    assert under_test.pop_new_tokens() == [*PROMPT[-1:], 5, 6]
    under_test.emit([7], ["target"])
    assert under_test.pop_new_tokens() == [7]
