"""A row ends where plain decoding would, wherever in a block that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine import Request, Row
from saccade.engine.row import RowPlan
from saccade.engine.slots import DraftedRow
from saccade.inputs.families.family import Prompt

PROMPT = [3, 1]
TOKENS = st.integers(0, 4)


def row(
    limit: int = 100, eos: Sequence[int] = (), criteria: Sequence[Callable[..., object]] = (), device: str = "cpu"
) -> Row:
    plan = RowPlan(limit, frozenset(eos), (), tuple(criteria))
    return Row(Request(Prompt(tuple(PROMPT))), plan, torch.device(device))


def emit(under_test: Row, block: Sequence[int]) -> list[int]:
    """Emit drafted tokens and the target's own, which is the last."""
    return under_test.emit(block, [*["draft"] * (len(block) - 1), "target"])  # type: ignore[list-item]


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


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=6),
    limit=st.integers(1, 12),
    eos=st.sets(TOKENS, max_size=1),
    stop=st.lists(TOKENS, max_size=3),
)
def test_the_output_is_cut_exactly_where_plain_decoding_ends(
    blocks: list[list[int]], limit: int, eos: set[int], stop: list[int]
) -> None:
    """The prompt's end of sequence ends nothing, a stop sequence may begin in it, and of several reasons an end of
    sequence is the strongest and the length the weakest.
    """

    def ends_with(ids: torch.Tensor, scores: None) -> torch.Tensor:  # ids of the whole row, as in `generate`
        return torch.tensor([ids[0, -len(stop) :].tolist() == stop])

    under_test = row(limit, eos, [ends_with] if stop else [])
    drafted = DraftedRow(under_test)
    emitted: list[int] = []
    taken: list[int] = []
    marks: list[str] = []
    for block in blocks:
        if not under_test.done:
            emitted += emit(under_test, block)
            taken += drafted.pop_new_tokens()
            marks += ["draft"] * (len(block) - 1) + ["target"]
    output = under_test.finish()
    expected, reason = naive([token for block in blocks for token in block], limit, eos, stop)
    assert under_test.remaining == (limit - len(expected) if reason == "interrupted" else 0)
    assert (output.tokens, output.finish_reason) == (expected, reason)
    assert emitted == taken == expected, "the drafter gets every token once"
    assert output.marks == marks[: len(expected)]
    assert under_test.ids == PROMPT + expected
    assert output.stats.new_tokens == len(expected)
    assert output.stats.accepted_tokens == output.marks.count("draft")


def test_a_histogram_counts_passes_by_what_was_accepted_in_them() -> None:
    under_test = row()
    stats = under_test.stats
    assert (stats.accepted_length, stats.block_efficiency, stats.acceptance_by_depth) == (0.0, 0.0, [])
    emit(under_test, [1])
    stats.prefill_tokens = 1
    for accepted in (0, 3, 1, 3):
        under_test.record_pass(accepted)
        emit(under_test, [1] * (accepted + 1))
    assert stats.accepted_histogram == [1, 1, 0, 2]
    assert stats.target_passes == 4
    assert stats.accepted_length == pytest.approx(7 / 4)
    assert stats.block_efficiency == pytest.approx(7 / 4 + 1)
    assert stats.acceptance_by_depth == pytest.approx([3 / 4, 2 / 3, 1.0])


def test_tokens_behind_the_end_do_not_count_for_their_pass() -> None:
    under_test = row(eos=[9])
    emit(under_test, [1])
    under_test.stats.prefill_tokens = 1
    for block in ([1, 1, 1, 1], [1, 9, 1, 1]):
        under_test.record_pass(3)
        emit(under_test, block)
    stats = under_test.finish().stats
    assert stats.accepted_histogram == [0, 0, 0, 2]
    assert (stats.block_efficiency, stats.accepted_length) == (3.0, 2.0)


def test_stopping_criteria_get_ids_on_the_device_of_the_model() -> None:
    devices: list[str] = []

    def criterion(ids: torch.Tensor, scores: None) -> bool:
        devices.append(ids.device.type)
        return False

    emit(row(criteria=[criterion], device="meta"), [2, 4])
    assert devices == ["meta", "meta"]


def test_a_drafter_that_joins_late_gets_the_prompts_last_token_and_all_of_the_answer() -> None:
    under_test = row()
    emit(under_test, [5, 6])
    drafted = DraftedRow(under_test, lacks_end=True)
    assert drafted.pop_new_tokens() == [*PROMPT[-1:], 5, 6]
    emit(under_test, [7])
    assert drafted.pop_new_tokens() == [7]
