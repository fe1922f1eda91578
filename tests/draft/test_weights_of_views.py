"""Ensemble weights against the definitions, written out position by position in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from saccade.draft.ensemble.weights import (
    ERROR_FLOOR,
    AdaBoost,
    Fixed,
    Grid,
    InverseError,
    Random,
    Verified,
    Weighting,
    make_weighting,
    simplex,
)

BATCH, POSITIONS, VOCAB, BLOCKS = 3, 4, 7, 9
CPU = torch.device("cpu")
CLOSE = 1e-5  # a few float32 roundings of sums of at most 36 positions

Position = tuple[Any, Any, int]  # p [V], q [m, V], label
Reference = Callable[[list[Position], int], Any]


def distribution(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return (2 * torch.randn(*shape, VOCAB, generator=generator)).softmax(-1)


def blocks(views: int, seed: int = 0) -> list[Verified]:
    """Rows with 0 to all positions labelled; every other target distribution has zeros, as top-k leaves them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for block in range(BLOCKS):
        p = distribution(generator, BATCH, POSITIONS)
        if block % 2:
            p = torch.where(p >= p.topk(2).values[..., -1:], p, 0.0)
            p = p / p.sum(-1, keepdim=True)
        label = torch.randint(0, VOCAB, (BATCH, POSITIONS), generator=generator).tolist()
        counts = torch.randint(0, POSITIONS + 1, (BATCH,), generator=generator).tolist()
        if block == 3:
            counts = [POSITIONS] * BATCH
        emitted = [row[:count] for row, count in zip(label, counts, strict=True)]
        made.append(Verified(p, distribution(generator, views, BATCH, POSITIONS), emitted))
    return made


def kl(p: Any, q: Any) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def tv(p: Any, q: Any) -> float:
    return 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))


def grid_points(views: int, steps: int) -> list[Any]:
    every = product(range(steps + 1), repeat=views)
    return [np.array(k) / steps for k in every if sum(k) == steps]


def best_point(distance: str, steps: int) -> Reference:
    def choose(history: list[Position], views: int) -> Any:
        scores = []
        for point in grid_points(views, steps):
            mixed = [(p, sum(w * v for w, v in zip(point, q, strict=True)), y) for p, q, y in history]
            error = sum((tv if distance == "tv" else kl)(p, q) for p, q, _ in mixed)
            hits = sum(int(np.argmax(q)) == y for _, q, y in mixed)
            scores.append(((-hits if distance == "match" else 0), error, tuple(point)))
        return np.array(min(scores)[2])

    return choose


def inverse_errors(temperature: float) -> Reference:
    def choose(history: list[Position], views: int) -> Any:
        errors = [sum(kl(p, q[i]) for p, q, _ in history) for i in range(views)]
        logits = np.array([1 / max(e, ERROR_FLOOR) / temperature for e in errors])
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    return choose


def boosted(constant: float) -> Reference:
    def choose(history: list[Position], views: int) -> Any:
        wrong = [sum(int(np.argmax(q[i])) != y for _, q, y in history) for i in range(views)]
        eps = [(w + 0.5) / (len(history) + 1) for w in wrong]
        stage = np.array([max(0.0, math.log(1 / e - 1) + constant * math.log(VOCAB - 1)) for e in eps])
        return stage / stage.sum() if stage.sum() > 0 else np.full(views, 1 / views)

    return choose


CASES: dict[str, tuple[Callable[[int | None], Weighting], Reference]] = {
    "grid-kl": (lambda h: Grid(window=h), best_point("kl", 10)),
    "grid-tv": (lambda h: Grid(distance="tv", window=h), best_point("tv", 10)),
    "grid-match": (lambda h: Grid(distance="match", window=h), best_point("match", 10)),
    "inverse": (lambda h: InverseError(window=h), inverse_errors(1.0)),
    "inverse-warmer": (lambda h: InverseError(20.0, window=h), inverse_errors(20.0)),
    "adaboost": (lambda h: AdaBoost(window=h), boosted(1.0)),
    "adaboost-0": (lambda h: AdaBoost(0.0, window=h), boosted(0.0)),
}


@pytest.mark.parametrize("window", [1, 4, None])
@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_definition(name: str, views: int, window: int | None) -> None:
    make, reference = CASES[name]
    weights = make(window).open(BATCH, views, CPU)
    histories: list[list[Position]] = [[] for _ in range(BATCH)]
    for seen in blocks(views):
        chosen = weights.choose(range(BATCH))
        for row, history in enumerate(histories):
            expected = np.full(views, 1 / views)
            if history:
                expected = reference(history[-window:] if window else history, views)
            np.testing.assert_allclose(chosen[row].numpy(), expected, atol=CLOSE)
        weights.observe(range(BATCH), seen)
        for row, history in enumerate(histories):
            for t, label in enumerate(seen.emitted[row]):
                p, q = seen.p[row, t].double().numpy(), seen.q[:, row, t].double().numpy()
                history.append((p, q, label))


def certain(token: int, others: float = 0.0) -> torch.Tensor:
    q = torch.full((VOCAB,), others / (VOCAB - 1))
    q[token] = 1 - others
    return q


@pytest.mark.parametrize("name", CASES)
def test_a_view_that_is_never_wrong_or_always_impossible_breaks_nothing(name: str) -> None:
    """Errors of zero, and of probability zero for what the target says."""
    weights = CASES[name][0](None).open(1, 2, CPU)
    right = torch.stack([certain(3), certain(5)])[:, None, None]  # [2, 1, 1, V]
    seen = Verified(certain(3)[None, None], right, [[3]])
    for _ in range(20):
        weights.observe([0], seen)
        (chosen,) = weights.choose([0])
        assert torch.isfinite(chosen).all()
        assert chosen.sum() == pytest.approx(1)
        assert chosen[0] > chosen[1]


@pytest.mark.parametrize("window", [2, None])
def test_a_forgotten_row_starts_anew_and_the_others_go_on(window: int | None) -> None:
    weights = InverseError(20.0, window=window).open(BATCH, 2, CPU)
    for seen in blocks(2)[:3]:
        weights.observe(range(BATCH), seen)
    before = weights.choose(range(BATCH)).clone()
    weights.forget(1)
    after = weights.choose(range(BATCH))
    assert torch.equal(after[1], torch.full((2,), 0.5))
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("window", [2, None])
@pytest.mark.parametrize("name", CASES)
def test_rows_learn_and_choose_by_their_place_whoever_is_named_beside_them(name: str, window: int | None) -> None:
    every, some = (CASES[name][0](window).open(BATCH, 2, CPU) for _ in range(2))
    for seen in blocks(2)[:5]:
        every.observe(range(BATCH), seen)
        for row in (2, 0):
            alone = Verified(seen.p[[row]], seen.q[:, [row]], [seen.emitted[row]])
            some.observe([row], alone)
    expected = every.choose(range(BATCH))
    np.testing.assert_allclose(some.choose([2, 0]), expected[[2, 0]], atol=CLOSE)
    assert torch.equal(some.choose([1]), torch.full((1, 2), 0.5))


def test_candidates_measured_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (Grid(distance="match").open(BATCH, 3, CPU) for _ in range(2))
    for seen in blocks(3)[:3]:
        whole.observe(range(BATCH), seen)
        with monkeypatch.context() as patch:
            patch.setattr("saccade.draft.ensemble.weights._MOST_VALUES", 5 * BATCH * POSITIONS * VOCAB)
            parts.observe(range(BATCH), seen)
        assert torch.equal(whole.choose(range(BATCH)), parts.choose(range(BATCH)))


def test_two_views_have_the_paper_s_eleven_points() -> None:
    expected = torch.tensor([[1 - j / 10, j / 10] for j in range(11)])
    assert torch.allclose(simplex(2, 10), expected)
    assert sorted(map(tuple, simplex(4, 3).tolist())) == sorted(
        tuple(torch.tensor(p).float().tolist()) for p in grid_points(4, 3)
    )
    assert torch.equal(simplex(1, 10), torch.ones(1, 1))


def test_random_weights_fill_the_simplex_and_follow_the_prompt_alone() -> None:
    one, two = Random(3).open(1, 3, CPU), Random(3).open(2, 3, CPU)
    one.load(0, [4, 5, 6])
    two.load(0, [9])
    two.load(1, [4, 5, 6])
    drawn = torch.stack([one.choose([0])[0] for _ in range(2000)])
    assert torch.equal(drawn[:5], torch.stack([two.choose([1])[0] for _ in range(5)]))
    assert torch.allclose(drawn.sum(1), torch.ones(2000))
    assert drawn.min() >= 0
    # Every coordinate of the flat Dirichlet distribution is Beta(1, 2): mean 1/3, variance 1/18.
    assert torch.allclose(drawn.mean(0), torch.full((3,), 1 / 3), atol=0.02)
    assert torch.allclose(drawn.var(0), torch.full((3,), 1 / 18), atol=0.01)


def test_fixed_weights_are_equal_or_those_of_the_user() -> None:
    assert torch.allclose(make_weighting("static", 3).open(2, 3, CPU).choose([1, 0]), torch.full((2, 3), 1 / 3))
    assert torch.allclose(Fixed((3, 1)).open(1, 2, CPU).choose([0]), torch.tensor([[0.75, 0.25]]))


def test_names_lead_to_weightings() -> None:
    assert isinstance(make_weighting("auto", 2), Grid)
    assert isinstance(make_weighting("auto", 4), InverseError)
    assert make_weighting("grid", 2, distance="tv", window=4) == Grid(distance="tv", window=4)
    assert make_weighting("best", 3, window=4) == Grid(1, window=4)
