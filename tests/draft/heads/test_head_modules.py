"""Heads as modules: the block is the stock one, one forward serves training and drafting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from heads_kit import KINDS, random_head, target
from saccade.draft.heads import head as heads
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Block, HeadConfig, Placement, build_head

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
STOCK: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig(**SHAPE), LlamaDecoderLayer),
    "llama3 rope": (LlamaConfig(**SHAPE, rope_parameters=LLAMA3), LlamaDecoderLayer),
    "linear rope": (
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        LlamaDecoderLayer,
    ),
    "yarn rope": (
        LlamaConfig(
            **SHAPE,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        LlamaDecoderLayer,
    ),
    "qwen2": (Qwen2Config(**SHAPE), Qwen2DecoderLayer),
    "qwen3": (Qwen3Config(**SHAPE), Qwen3DecoderLayer),
}


@pytest.mark.parametrize("name", STOCK)
def test_the_block_is_the_stock_decoder_layer(name: str) -> None:
    config, layer_class = STOCK[name]
    torch.manual_seed(0)
    stock = layer_class(config, 0).eval()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rope = {**config.rope_parameters, "max_position_embeddings": config.max_position_embeddings}
    shape = HeadConfig(
        kind="hivis",
        hidden_size=64,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=10,
        layers=(2,),
        target_class="",
        target_layers=2,
        rope=rope,
        norm_eps=config.rms_norm_eps,
        qk_norm=name == "qwen3",
        qkv_bias=name == "qwen2",
    )
    ours = Block(shape)
    ours.load_state_dict(stock.state_dict())
    x, positions = torch.randn(2, 9, 64), torch.tensor([[0, 1, 2, 3, 4, 5, 30, 31, 47], [3, *range(8)]])
    angles = LlamaRotaryEmbedding(config)(x, positions)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = stock(x, attention_mask=causal[None, None], position_embeddings=angles)
        got = ours(x, Placement(positions, causal[None]))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)  # tens of roundings at magnitude 10


def inputs(count: int = 7, batch: int = 2, width: int = 64) -> tuple[Tensor, Tensor, Placement]:
    generator = torch.Generator().manual_seed(3)
    features, embeddings = (torch.randn(batch, count, width, generator=generator) for _ in range(2))
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    return features, embeddings, Placement(torch.arange(count)[None], causal)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns_and_nothing_looks_ahead(kind: str) -> None:
    head = random_head("llava", kind)
    _, embeddings, at = inputs()
    features = torch.randn(2, 7, 64 * len(head.layers)).requires_grad_()
    embeddings.requires_grad_()
    steps = torch.tensor([0, 0, 0, 0, 1, 2, 3])
    out = head(head.fuse(features), embeddings, at, step=steps)
    head.logits(out, lambda h: h)[:, 4].square().sum().backward()
    for fed in (features, embeddings):
        assert fed.grad is not None
        assert (fed.grad[:, :5] != 0).any(-1).all()
        assert not fed.grad[:, 5:].any()
    assert [n for n, p in head.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_lower_precision_gives_about_the_same_under_autocast_and_when_cast(kind: str) -> None:
    head, given = random_head("llava", kind), inputs()
    with torch.no_grad():
        exact = head(*given)
        with torch.autocast("cpu", torch.bfloat16):
            cast_inside = head(*given)
        features, embeddings, at = given
        cast = random_head("llava", kind).bfloat16()(features.bfloat16(), embeddings.bfloat16(), at)
    for rough in (cast_inside, cast):
        error = (rough.float() - exact).norm() / exact.norm()
        assert 0 < error < 0.03  # a few roundings of 2 ** -9


def test_positions_stay_exact_in_lower_precision() -> None:
    """A frequency rounded to bfloat16 turns by whole radians a few hundred positions on."""
    block = random_head("llava", "hivis").bfloat16().block
    assert isinstance(block, Block)
    assert block.self_attn._rotary is not None
    cos, _ = block.self_attn._rotary(torch.tensor([[997]]))
    expected = torch.cos(997.0 * 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    torch.testing.assert_close(cos[0, 0, 0, :8].double(), expected, atol=1e-3, rtol=0)


def test_steps_beyond_the_trained_ones_reuse_the_last_residual() -> None:
    head, given = random_head("llava", "hivis"), inputs()
    with torch.no_grad():
        of = [head(*given, step=step) for step in range(6)]
        assert all(not torch.allclose(of[a], of[b]) for a in range(4) for b in range(a))
        torch.testing.assert_close(of[5], of[3])
        torch.testing.assert_close(head(*given, step=torch.tensor(5)), of[3])


@pytest.mark.parametrize(
    ("kind", "options", "tokens", "sources"),
    [
        ("eagle2", {}, [1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6]),
        ("eagle2", {"text_only": True}, [3, 4, 7], [0, 3, 4]),
        ("eagle2", {"text_only": True, "after_image": "visual"}, [3, 4, 7], [2, 3, 6]),
        ("hivis", {}, [3, 4, 7], [0, 3, 4]),
        ("msd", {}, [1, 2, 3, 4, 5, 6, 7], [-1, -1, 2, 3, -1, -1, 6]),
        ("hivis", {"after_image": "visual"}, [3, 4, 7], [2, 3, 6]),
    ],
)
def test_which_tokens_have_entries(kind: str, options: Any, tokens: list[int], sources: list[int]) -> None:
    visual = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    head = random_head("llava", kind, **options)
    assert [part.tolist() for part in head.entries(visual)] == [tokens, sources]


def test_a_prompt_that_begins_with_its_image() -> None:
    visual = torch.tensor([1, 1, 0, 0], dtype=torch.bool)
    assert [part.tolist() for part in random_head("llava", "hivis").entries(visual)] == [[3], [2]]


def test_the_target_is_no_part_of_the_head() -> None:
    for kind in KINDS:
        shared = target("llava").model.get_output_embeddings().weight.shape
        assert all(p.shape != shared for p in random_head("llava", kind).parameters())


def test_a_narrower_mlp_makes_a_lighter_head() -> None:
    light, usual = (build_head(HeadConfig.from_target(target("llava"), "eagle2", mlp=width)) for width in (8, None))
    shapes = [head.state_dict()["stack.0.mlp.up_proj.weight"].shape[0] for head in (light, usual)]
    assert shapes == [8, target("llava").text_config.intermediate_size]


@pytest.mark.parametrize(
    ("layers", "read"),
    [(2, (0, 1, 2)), (3, (1, 2)), (4, (1, 2, 3)), (6, (2, 3, 4)), (7, (2, 3, 4)), (28, (2, 14, 25))],
)
def test_eagle3_reads_low_middle_and_high_layers(layers: int, read: tuple[int, ...]) -> None:
    assert Eagle3.reads(layers) == read


@pytest.mark.parametrize("masked", [True, False])
def test_training_in_bfloat16_has_the_gradients_of_the_fused_attention(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 8, dtype=torch.bfloat16, requires_grad=True) for n in (5, 9, 9))
    seen = torch.ones(2, 5, 9, dtype=torch.bool).tril(3) if masked else None
    over, gradients = Placement(torch.zeros(1, 9), seen), []
    for most in (heads._MAX_SCORES, 0):
        monkeypatch.setattr(heads, "_MAX_SCORES", most)
        mixed = heads._attend(q, k, v, over, 0, "all")
        gradients.append(torch.autograd.grad(mixed.float().square().sum(), (q, k, v)))
    for ours, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, fused, rtol=0.05, atol=0.02)
