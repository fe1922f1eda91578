"""Parts of the training loop: learning rate, optimisers, and batches that worker processes make."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from workshop_kit import tiny_model

from saccade.pocket import draw
from tools.pocket.loop import batches, optimisers_for, train
from tools.pocket.recipe import Schedule

pytestmark = pytest.mark.formats


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device beside which two cores are free for workers."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return torch.device("cuda")


MAKE = partial(draw, task="chart")  # so that workers import the world and PyTorch alone


def test_workers_make_the_batches_of_this_process_and_end_when_no_more_are_wanted(gpu: torch.device) -> None:
    here, ahead = batches(MAKE, 5, 30, torch.device("cpu")), iter(batches(MAKE, 5, 10**9, gpu))
    for number, expected in enumerate(here, 5):
        made = next(ahead)
        assert made == expected == draw(number, "chart")
        assert made.image.tobytes() == expected.image.tobytes()
    del ahead  # would wait without end if the workers continued


class Toy(nn.Module):
    """A model with one matrix inside layers and weights outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](inputs).tanh()).square().mean()


def _numbered(number: int) -> tuple[int, torch.Tensor]:
    return number, torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def _toy_run(folder: Path, broken_at: int | None = None) -> dict[str, torch.Tensor]:
    model = Toy()

    def loss(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] == broken_at:
            raise KeyboardInterrupt
        return model(batch[1])

    schedule = Schedule(steps=6, batch=8, rate=0.01, warmup=2, parts=2)
    train("toy", model, _numbered, loss, schedule, folder, checkpoint_seconds=0.0)
    return model.state_dict()


def test_a_stage_resumes_exactly_from_checkpoints_in_the_format_of_earlier_runs(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        _toy_run(broken, broken_at=9)  # in the second batch of step 5
    checkpoint = torch.load(broken / "toy.checkpoint.pt", weights_only=True)
    assert checkpoint.keys() == {"model", "optimisers", "step", "seconds"}
    assert checkpoint["step"] == 4
    assert [part.keys() for part in checkpoint["optimisers"]] == [{"state", "param_groups"}] * 2
    assert not (broken / "toy.pt").exists()
    resumed, unbroken = _toy_run(broken), _toy_run(whole)
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    assert torch.load(broken / "toy.pt", weights_only=True).keys() == {"model", "step", "seconds"}
    assert sorted(path.name for path in broken.iterdir()) == ["toy.pt"]
