"""All drafts of a text at once equal one draft after another, run as in drafting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from train_kit import head, samples, target

from saccade.draft.heads.block import Placement
from saccade.draft.heads.head import Head
from saccade.train.features import read_features
from saccade.train.objectives import losses as module
from saccade.train.objectives.entries import Entries, entries_of
from saccade.train.objectives.losses import Window, unroll

STEPS = 4
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""fp32 sums in another order; heads' outputs are of size 1 and more."""


def made(kind: str, **options: Any) -> tuple[Head, Entries]:
    own = head("llava", kind, **options)
    return own, entries_of(own, read_features(target("llava"), samples("llava", 3), own.layers))


def one_draft(own: Head, entries: Entries, row: int, begin: int, steps: int) -> list[Tensor]:
    """Entry after entry as `HeadDraftSession` runs them, without a cache: true features up to ``begin``."""
    features = own.fuse(entries.features[row : row + 1, : begin + 1])
    out: list[Tensor] = []
    for _ in range(steps):
        count = features.shape[1]
        depths = (torch.arange(count) - begin).clamp(min=0)[None]
        attention_mask = torch.ones(1, count, count, dtype=torch.bool).tril()
        hidden = own(
            features,
            entries.embeddings[row : row + 1, :count],
            Placement(torch.arange(count)[None], attention_mask),
            step=depths,
        )
        out.append(hidden[0, -1])
        features = torch.cat([features, hidden[:, -1:]], 1)
    return out


def compare(own: Head, entries: Entries) -> None:
    window = Window.of(entries.supervised)
    guesses = list(unroll(own, entries, window, STEPS))
    compared = 0
    for row, supervised in enumerate(entries.supervised):
        first, count = int(supervised.int().argmax()), int(supervised.sum())
        for start in range(count):
            expected = one_draft(own, entries, row, first + start, min(STEPS, count - start))
            for step, hidden in enumerate(expected):
                torch.testing.assert_close(guesses[step][row, start + step], hidden, **CLOSE)
                compared += 1
    assert compared > 40


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "msd", "vispec", "hivis"])
def test_every_step_of_every_draft_is_what_drafting_gives(kind: str) -> None:
    compare(*made(kind))


def test_drafts_of_several_blocks_too() -> None:
    compare(*made("eagle2", blocks=3))


def test_seeing_the_neighbour_instead_of_the_own_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module.with_guesses

    def neighbours(true: torch.Tensor, step: int) -> torch.Tensor:
        return torch.cat([true, plain(true, step)[..., true.shape[-1] :].roll(-1, -1)], -1)

    monkeypatch.setattr(module, "with_guesses", neighbours)
    with pytest.raises(AssertionError):
        compare(*made("eagle2"))


def test_one_true_entry_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own, entries = made("eagle2")
    plain = own.forward

    def leaking(f: Tensor, e: Tensor, at: Placement, step: Any = 0) -> Tensor:
        assert at.attention_mask is not None
        attention_mask = at.attention_mask.clone()
        if isinstance(step, int) and step:
            true = entries.supervised.shape[1]
            attention_mask[..., 1:true] |= attention_mask[..., : true - 1].clone()
        return plain(f, e, replace(at, attention_mask=attention_mask), step)

    monkeypatch.setattr(own, "forward", leaking)
    with pytest.raises(AssertionError):
        compare(own, entries)


def test_a_window_holds_the_learnt_entries_of_ragged_rows() -> None:
    supervised = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    window = Window.of(supervised)
    assert window.supervised.tolist() == [[True, True], [True, False], [False, False]]
    values = torch.arange(12).view(3, 4)
    assert window.take(values)[window.supervised].tolist() == [1, 2, 7]
    assert torch.equal(window.take(values[:, :, None])[..., 0], window.take(values))


def test_gradients_flow_back_through_every_step() -> None:
    own, entries = made("hivis")
    *_, last = unroll(own, entries, Window.of(entries.supervised), STEPS)
    last[0, STEPS - 1 :].square().sum().backward()
    per_step = own.residuals.grad.abs().sum(1)
    assert (per_step > 0).all()
