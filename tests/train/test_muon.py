"""Muon in float32: the update of PyTorch's own, which rounds its products to bfloat16."""

import pytest
import torch
from torch import nn

from saccade import cpu
from saccade.train import optimiser
from saccade.train.optimiser import WideMuon

pytestmark = pytest.mark.formats

SETTINGS = {"lr": 1e-2, "weight_decay": 0.02, "adjust_lr_fn": "match_rms_adamw"}


def _matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(0.1 * torch.randn(shape)) for shape in ((16, 40), (40, 16), (24, 24))]


def test_it_moves_matrices_as_pytorchs_own_does_but_for_rounding() -> None:
    before, theirs, ours = _matrices(), _matrices(), _matrices()
    made = torch.optim.Muon(theirs, **SETTINGS), WideMuon(ours, **SETTINGS)
    for step in range(5):
        for one, other in zip(theirs, ours, strict=True):
            one.grad, other.grad = None, None  # which leaves a matrix as it is
            if step < 4:
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
        for muon in made:
            muon.step()
    for old, one, other in zip(before, theirs, ours, strict=True):
        moved = (one - old).norm()
        assert moved > 0.1
        assert (one - other).norm() < 0.03 * moved
    theirs_state, ours_state = (muon.state_dict() for muon in made)
    assert theirs_state["param_groups"] == ours_state["param_groups"]
    for key, state in theirs_state["state"].items():
        torch.testing.assert_close(state["momentum_buffer"], ours_state["state"][key]["momentum_buffer"])


@pytest.mark.parametrize(("multiplies", "kind"), [(True, torch.optim.Muon), (False, WideMuon)])
def test_a_processor_without_bfloat16_turns_and_trains_in_float32(
    monkeypatch: pytest.MonkeyPatch, multiplies: bool, kind: type
) -> None:
    monkeypatch.setenv(cpu.SWITCH, str(int(multiplies)))
    arguments = (_matrices(), [nn.Parameter(torch.ones(3))], 0.1, 0.0, (0.9, 0.95))
    assert type(optimiser.muon_and_adamw(*arguments)[0]) is kind
    assert type(optimiser.muon_and_adamw(*arguments, precision="fp32")[0]) is WideMuon
    here = torch.device("cpu")
    with optimiser.fast_products(here):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if multiplies else torch.float32)
    threads = torch.get_num_threads()
    count = f"{threads} CPU thread{'' if threads == 1 else 's'}"
    assert optimiser.description(here) == f"{count}, {'bfloat16 autocast' if multiplies else 'float32'}"
    assert optimiser.precision_on(here, "auto") == ("bf16" if multiplies else "fp32")
    assert optimiser.precision_on(here, "bf16") == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: multiplies)
    assert optimiser.dtype_for(torch.device("cuda")) == optimiser.dtype_for(here)
