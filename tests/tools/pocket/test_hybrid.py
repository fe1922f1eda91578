"""A hybrid begins with the target's function in the layers that attend, and learns from the target's outputs."""

import math

import torch
from tokenizers import Tokenizer
from torch import nn
from workshop_kit import batch_of_tasks, tiny_model

from tools.pocket.hybrid import Distiller, hybrid_of


@torch.no_grad()
def test_without_its_norms_an_attending_layer_of_a_new_hybrid_computes_what_the_targets_does() -> None:
    target, inputs = tiny_model(), torch.randn(2, 9, 64)
    text, own = (model.model.language_model for model in (target, hybrid_of(target)))
    own.layers[0].self_attn.q_norm = own.layers[0].self_attn.k_norm = nn.Identity()
    places = torch.arange(9).expand(2, -1)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    wanted, _ = text.layers[0].self_attn(text.layers[0].input_layernorm(inputs), text.rotary_emb(inputs, places), mask)
    normed = own.layers[0].input_layernorm(inputs)
    made, _ = own.layers[0].self_attn(normed, own.rotary_emb(inputs, places.expand(3, -1, -1)), mask)
    torch.testing.assert_close(made, wanted, atol=1e-6, rtol=1e-5)


def test_both_stages_reach_every_mixer_and_only_the_second_the_rest(tokenizer: Tokenizer) -> None:
    target = tiny_model()
    hybrid, batch = hybrid_of(target), batch_of_tasks(tokenizer, "scene", "chart")
    distiller = Distiller(target, hybrid)
    for stage in (distiller.align, distiller.distil):
        hybrid.zero_grad()
        stage(batch).backward()
        names = {name for name, weight in hybrid.named_parameters() if weight.grad is not None}
        mixers = {name for name, _ in hybrid.named_parameters() if "_attn" in name and ".language_model." in name}
        assert mixers <= names
        assert ("lm_head.weight" in names) == (stage == distiller.distil)


def test_a_model_is_at_no_distance_from_itself(tokenizer: Tokenizer) -> None:
    target = tiny_model()
    same = Distiller(target, target).distil(batch_of_tasks(tokenizer, "scene", "video"))
    assert math.isclose(float(same), 0, abs_tol=1e-5)
