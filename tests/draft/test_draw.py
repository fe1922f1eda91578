"""Children are drawn without replacement from the drafter's warped distribution."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from saccade.draft.trees.policy import DrawProposer, TopProposer
from saccade.verify.rule import Processing, Uniforms, draw

ROWS = 20_000


def uniforms(count: int, rows: int = ROWS) -> Uniforms:
    generators = [torch.Generator().manual_seed(7 + i) for i in range(rows)]
    return Uniforms(generators, (1, 1), count, torch.device("cpu"))


def test_ordered_children_have_the_distribution_of_draws_without_replacement() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5])
    processing = Processing([[TemperatureLogitsWarper(0.7)]])
    children, q = DrawProposer(processing.warp, uniforms(2)).children(logits.expand(ROWS, 1, 4), 2)
    expected_q = (logits / 0.7).softmax(-1)
    assert q is not None
    torch.testing.assert_close(q[0, 0], expected_q)
    counts = Counter(map(tuple, children[:, 0].tolist()))
    p = expected_q.tolist()
    chi_square = 0.0
    for first, second in permutations(range(4), 2):
        expected = ROWS * p[first] * p[second] / (1 - p[first])
        chi_square += (counts[first, second] - expected) ** 2 / expected
    assert counts.total() == sum(counts[pair] for pair in permutations(range(4), 2))  # never the same token twice
    assert chi_square < 40  # 11 degrees of freedom; 40 has a probability of 4e-5


def test_tokens_of_probability_zero_are_drawn_only_when_no_others_are_left() -> None:
    """The rest of a fan that is wider than q are not draws at all, which the rule tells by their q of zero."""
    processing = Processing([[TopKLogitsWarper(2)]])
    logits = torch.tensor([3.0, 1.0, 0.0, 2.0]).expand(200, 1, 4)
    children, q = DrawProposer(processing.warp, uniforms(3, 200)).children(logits, 3)
    assert q is not None
    assert {tuple(sorted(c[:2])) for c in children[:, 0].tolist()} == {(0, 3)}
    assert q[0, 0, [1, 2]].tolist() == [0, 0]


def test_every_parent_draws_from_its_own_distribution() -> None:
    logits = torch.full((50, 3, 3), -1e9)
    for parent in range(3):
        logits[:, parent, parent] = 0
    children, _ = DrawProposer(Processing([[]]).warp, uniforms(3, 50)).children(logits, 1)
    assert children[..., 0].tolist() == [[0, 1, 2]] * 50


@pytest.mark.parametrize("width", [1, 3])
def test_deterministic_children_are_the_likeliest_tokens(width: int) -> None:
    logits = torch.tensor([[[1.0, 4.0, 2.0, 3.0]]])
    children, q = TopProposer().children(logits, width)
    assert children[0, 0].tolist() == [1, 3, 2][:width]
    assert q is None


def test_a_draw_never_gives_a_token_of_weight_zero() -> None:
    """The extremes of the uniform numbers fall on the first and the last token that have weight."""
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    almost_one = 1 - 2**-24
    assert draw(weights, torch.tensor([0.0, 0.3, almost_one])).tolist() in ([1, 1, 3], [1, 3, 3])


def test_a_row_draws_the_same_numbers_whatever_rows_are_beside_it() -> None:
    def numbers(seeds: list[int], taken: int) -> torch.Tensor:
        """``[B, 2, 6]`` of two steps: what the rule is given, and the first of what the proposer takes."""
        generators, steps = [torch.Generator().manual_seed(s) for s in seeds], []
        for _ in range(2):
            step = Uniforms(generators, (2, 2), 4, torch.device("cpu"))
            drafted = step.take(taken)[:, :2]
            steps.append(torch.cat([step.judging.flatten(1), drafted], 1))
        return torch.stack(steps, 1)

    alone, beside = numbers([3], taken=2), numbers([1, 3, 2], taken=4)
    assert torch.equal(alone[0], beside[1])
    assert not torch.equal(beside[0], beside[1])
    assert len(alone.unique()) == alone.numel()  # no number decides on two things
    assert alone.max() < 1


def test_more_numbers_than_planned_are_an_error_not_a_repetition() -> None:
    numbers = uniforms(3, 1)
    numbers.take(2)
    with pytest.raises(IndexError, match="Only 3 uniform numbers per row"):
        numbers.take(2)
