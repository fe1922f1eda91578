"""Parts of the training loop: learning rate, optimisers, and batches that worker processes make."""

from functools import partial
from random import Random

import pytest
import torch
from workshop_kit import tiny_model

from tools.pocket.batches import training_samples
from tools.pocket.loop import optimisers_for, prefetch
from tools.pocket.recipe import Schedule


def test_the_rate_warms_up_stays_and_falls() -> None:
    schedule = Schedule(steps=100, batch=1, rate=1.0, warmup=10, final=0.1, decay=0.5)
    assert schedule.rate_at(0) == pytest.approx(0.1)
    assert schedule.rate_at(9) == schedule.rate_at(50) == 1.0
    assert schedule.rate_at(75) == pytest.approx(0.55)
    assert schedule.rate_at(100) == pytest.approx(0.1)


def test_optimisers_are_those_whose_states_checkpoints_hold() -> None:
    named = list(tiny_model().named_parameters())
    turned = [p for name, p in named if p.ndim == 2 and "layers." in name]
    others = [p for name, p in named if p.ndim != 2 or "layers." not in name]
    expected: list[torch.optim.Optimizer] = [
        torch.optim.Muon(turned, lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.02, fused=True),
    ]
    made = optimisers_for(named, 0.01)
    assert [o.state_dict() for o in made] == [o.state_dict() for o in expected]
    for one, other in zip(made, expected, strict=True):
        pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
        assert all(p is q for p, q in pairs)


def _answers(count: int, number: int) -> list[str]:
    return [sample.answer for sample in training_samples(Random(number), count, 0.2)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device beside which two cores are free for workers."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return torch.device("cuda")


def test_workers_make_the_batches_of_this_process(gpu: torch.device) -> None:
    make = partial(_answers, 3)
    here, ahead = prefetch(make, 5, 30, torch.device("cpu")), prefetch(make, 5, 30, gpu)
    assert [ahead.take((n,)) for n in range(5, 30)] == [here.take((n,)) for n in range(5, 30)]
    ahead.close()


def test_a_consumer_that_stops_early_leaves_no_worker_behind(gpu: torch.device) -> None:
    batches = prefetch(partial(_answers, 1), 0, 10**9, gpu)
    assert batches.take((0,)) == _answers(1, 0)
    batches.close()  # would wait for ever if the workers continued
