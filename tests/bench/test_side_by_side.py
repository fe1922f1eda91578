"""Ratios of `python -m benchmarks.side_by_side`."""

from __future__ import annotations

from benchmarks.side_by_side import Measured, ratio


def test_repeats_of_a_prompt_do_not_narrow_the_interval() -> None:
    slow, fast = ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    tokens = [[7]] * 5
    once = ratio(Measured(slow, tokens), Measured(fast, tokens))
    often = ratio(Measured(slow * 8, tokens * 8), Measured(fast * 8, tokens * 8), 8)
    assert often == once == (3.0, 1.0, 5.0)
