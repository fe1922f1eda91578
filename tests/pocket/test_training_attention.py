"""The attention that training on a CPU chooses computes what the class's own does."""

import pytest
import torch
from torch import Tensor

from tools.pocket import attention
from tools.pocket.attention import choose_attention
from tools.pocket.batches import IGNORED, Batch
from tools.pocket.models import build, loss_of
from tools.pocket.recipe import LanguageShape, TowerShape


@pytest.mark.parametrize("longest", [8, 450])
def test_chosen_attention_gives_the_same_loss_and_gradients(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LONG", longest)  # both forms
    torch.manual_seed(0)
    model = build(LanguageShape(2, 64, 96), TowerShape(1, 32, 64, 2), 256)
    ids = torch.randint(20, 200, (2, 16))
    targets = ids.clone()
    targets[0, 10:] = IGNORED  # a row padded on the right
    batch = Batch(ids, targets)

    def learnt() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.model.language_model.layers.parameters()]

    usual, gradients = learnt()
    choose_attention(model)
    assert model.model.language_model.config._attn_implementation != "sdpa"
    chosen, others = learnt()
    torch.testing.assert_close(chosen, usual)
    torch.testing.assert_close(others, gradients)
    ids[:, 12] += 1  # nobody looks ahead
    with torch.no_grad():
        moved = model.model.language_model(input_ids=ids).last_hidden_state
        ids[:, 12] -= 1
        still = model.model.language_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(moved[:, :12], still[:, :12])
    assert not torch.equal(moved[:, 12:], still[:, 12:])
