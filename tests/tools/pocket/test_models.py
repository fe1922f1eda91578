"""Models: growth keeps the function, and training computes what the class itself computes."""

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from workshop_kit import KINDS, batch_of_tasks, tiny_model

from saccade.inputs.processor import InputProcessor
from saccade.pocket import draw
from tools.pocket import models
from tools.pocket.batches import IGNORED, IMAGE, Batch, batch_of, prompt_ids
from tools.pocket.models import PocketModel, build, choose_attention, embed, grow, loss_of
from tools.pocket.recipe import LanguageShape, TowerShape
from tools.pocket.tower import align_projector


@torch.no_grad()
def _trained_on(model: PocketModel, batch: Batch) -> torch.Tensor:
    hidden = model.model.language_model(inputs_embeds=embed(model, batch)).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden)
    return logits


@torch.no_grad()
def test_growth_leaves_the_logits_bitwise_alone(tokenizer: Tokenizer) -> None:
    shallow = tiny_model()
    deep = grow(shallow, 6).eval()
    batch = batch_of_tasks(tokenizer, "scene")
    assert deep.config.text_config.num_hidden_layers == 6
    assert torch.equal(_trained_on(shallow, batch), _trained_on(deep, batch))


@torch.no_grad()
@pytest.mark.parametrize("task", KINDS)
def test_training_forward_equals_the_models_own_on_processed_inputs(
    tokenizer: Tokenizer, processor: InputProcessor, task: str
) -> None:
    model, sample = tiny_model(), draw(3, task)
    prompt = processor.prompt(sample.messages())
    ids, _ = prompt_ids(tokenizer, sample)
    assert list(prompt.ids) == ids
    batch = batch_of(tokenizer, [sample], [[]])
    tensors: dict[str, torch.Tensor] = {}
    for media in prompt.media:
        for name, tensor in media.tensors.items():
            tensors[name] = torch.cat([tensors[name], tensor]) if name in tensors else tensor
    if sample.images:
        tensors["batch_num_images"] = torch.tensor([len(sample.images)])
    theirs = model(input_ids=batch.ids[:, : len(ids)], **tensors).logits
    torch.testing.assert_close(_trained_on(model, batch)[:, : len(ids)], theirs)


@torch.no_grad()
def test_an_aligned_projector_speaks_at_the_volume_of_words(tokenizer: Tokenizer) -> None:
    # A random tower has little to tell: its patches must still come in as loud as words, not fifty times so.
    model = tiny_model()
    align_projector(model, tokenizer, seed=0)
    batch = batch_of_tasks(tokenizer, "chart")
    patches = embed(model, batch)[batch.ids == IMAGE].norm(dim=-1).mean()
    words = model.get_input_embeddings().weight.norm(dim=-1).mean()
    assert 0.2 < patches / words < 2


@pytest.mark.parametrize("longest", [8, 450])
def test_chosen_attention_gives_the_same_loss_and_gradients(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LONG", longest)  # both forms
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
