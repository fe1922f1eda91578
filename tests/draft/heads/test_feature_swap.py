"""Every kind of head learns to use the target's features: another sample's cost it at least 15 points."""

from __future__ import annotations

from typing import Any

import pytest
from feature_swap import STEPS, Recurrent, agreement, cost, head_for, train
from torch import Tensor

from saccade.draft.heads.registry import HEAD_KINDS

LEAST = 0.15
LONGER = {"medusa": 120}
"""Training steps of kinds that learn slowly."""
QUICKLY = ("eagle2", "dream", "hydra")
"""Kinds of different architectures, which the fast tests train."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICKLY else [pytest.mark.slow]) for kind in HEAD_KINDS]
)
def test_another_sample_s_features_cost_what_features_are_for(kind: str) -> None:
    target = Recurrent()
    head = train(head_for(kind), target, LONGER.get(kind, STEPS))
    found = cost(head, target)
    assert found >= LEAST, f"{kind}: {agreement(head, target, False):.3f}, swapped {-found:+.3f}"


def blind(head: Any) -> Any:
    """A head to which a planted mistake gives no feature."""
    name = "finish" if head.kind == "dream" else "forward"
    plain, place = getattr(head, name), int(head.kind == "dream")

    def without(*given: Any, **more: Any) -> Tensor:
        features = given[place] * 0
        out: Tensor = plain(*given[:place], features, *given[place + 1 :], **more)
        return out

    setattr(head, name, without)
    return head


@pytest.mark.parametrize(
    "kind", ["eagle2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hivis", "dream", "medusa"))]
)
def test_a_head_that_ignores_its_features_is_noticed(kind: str) -> None:
    target = Recurrent()
    assert cost(train(blind(head_for(kind)), target), target) < LEAST


@pytest.mark.slow
def test_dream_as_released_learns_little_of_its_features() -> None:
    """The reason for the defaults: without positions or a direct path the latest feature is not found."""
    target = Recurrent()
    released = train(head_for("dream", gate="tanh", rotary=False, direct=False), target, 2 * STEPS)
    chosen = train(head_for("dream"), target, 2 * STEPS)
    assert cost(chosen, target) > 2 * cost(released, target)


def test_a_head_of_text_alone_gets_nothing_of_the_picture() -> None:
    """HiViS's control, Table 1 (a): neither visual tokens nor states of the target, which saw them.

    Hiding the visual tokens alone is not enough: the states still tell what the picture told the target.
    """
    target = Recurrent()
    text_alone = train(head_for("eagle2", text_only=True, features="none"), target)
    hidden = train(head_for("eagle2", text_only=True), target)
    assert text_alone.hides_visual
    assert not text_alone.is_shown_visual
    assert cost(text_alone, target) == 0
    assert cost(hidden, target) >= LEAST
    assert agreement(hidden, target, False) > agreement(text_alone, target, False) + LEAST
