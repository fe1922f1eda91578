"""DREAM's head as a module: its blocks, its gate, its options, and its files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kit import POLICIES, random_head, target
from saccade import methods
from saccade.draft.heads.dream import CrossBlock, Dream
from saccade.draft.heads.head import HeadConfig, Placement, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.errors import MethodError, ModelError
from saccade.methods.compositions import Models
from saccade.target_model.context import Context


def dream(name: str, **options: Any) -> Dream:
    head = random_head(name, "dream", **options)
    assert isinstance(head, Dream)
    return head


def fresh(**options: Any) -> Dream:
    head = build_head(HeadConfig.from_target(target("llava"), "dream", **options))
    assert isinstance(head, Dream)
    return head


def given(count: int = 6) -> tuple[Tensor, Tensor, Placement]:
    generator, width = torch.Generator().manual_seed(0), target("llava").text_config.hidden_size
    features, embeddings = torch.randn(2, 1, count, width, generator=generator)
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    return features, embeddings, Placement(torch.arange(count)[None], causal)


@torch.no_grad()
def test_cross_attention_is_its_equation_written_out() -> None:
    """Head by head and entry by entry (Eq. 1), with normed queries and keys."""
    config = HeadConfig.from_target(target("qwen3_vl"), "dream")
    torch.manual_seed(0)
    block = CrossBlock(config, "tanh", 0)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    attention, dim, shared = block.cross_attn, config.head_dim, config.heads // config.kv_heads
    assert shared > 1
    x, features = torch.randn(1, 3, config.hidden_size), torch.randn(1, 4, config.hidden_size)
    reach = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)
    normed, memory = block.input_layernorm(x)[0], block.feature_norm(features)[0]
    rows = []
    for place in range(3):
        mixed = []
        for h in range(config.heads):
            own, kept = slice(h * dim, (h + 1) * dim), slice(h // shared * dim, (h // shared + 1) * dim)
            q = attention.q_norm(attention.q_proj(normed[place])[own])
            k = attention.k_norm(attention.k_proj(memory)[:, kept])[reach[place]]
            v = attention.v_proj(memory)[:, kept][reach[place]]
            mixed.append((k @ q / dim**0.5).softmax(0) @ v)
        rows.append(attention.o_proj(torch.cat(mixed)))
    assert block.gates is not None
    expected = x + block.gates.tanh()[0] * torch.stack(rows)[None]
    expected = expected + block.gates.tanh()[1] * block.mlp(block.post_attention_layernorm(expected))
    at = Placement(torch.zeros(1, 3))
    torch.testing.assert_close(
        block(x, features, at, Placement(at.positions, reach[None])), expected, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_a_new_gate_lets_nothing_pass_but_can_open() -> None:
    features, *rest = given()
    gated, replacing = fresh(gate="tanh", direct=False), fresh(gate="replace", direct=False)
    assert torch.equal(gated(features, *rest), gated(-features, *rest))
    assert not torch.allclose(replacing(features, *rest), replacing(-features, *rest))
    with torch.enable_grad():
        gated(features, *rest).square().sum().backward()
    gates = gated.cross[0].gates
    assert isinstance(gates, Tensor)
    assert gates.grad is not None
    assert gates.grad.all()


@torch.no_grad()
def test_replacing_forgets_the_entry_but_for_what_it_asks() -> None:
    """With one feature in reach, the answer does not depend on the question."""
    block = fresh(gate="replace", rotary=False).cross[0]
    features, x, at = given(1)
    torch.testing.assert_close(block(x, features, at, at), block(-3 * x, features, at, at))


@pytest.mark.parametrize(
    ("options", "decoder", "cross"),
    [
        ({}, 2, 1),
        ({"initial": False}, 1, 1),
        ({"final": False}, 1, 1),
        ({"cross": 0}, 2, 0),
        ({"cross": 2}, 2, 2),
    ],
)
def test_blocks_of_every_ablation(options: dict[str, Any], decoder: int, cross: int) -> None:
    head = fresh(**options)
    assert head.blocks == len(head.new_caches(1)[0].layers) == decoder
    assert len(head.cross) == cross
    assert all(target("llava").vocab_size not in weight.shape for weight in head.parameters())


@torch.no_grad()
def test_the_direct_path_and_the_attention_are_left_out_each_by_itself() -> None:
    features, embeddings, at = given()
    for cross, direct in ((0, False), (0, True), (1, False)):
        head = dream("llava", cross=cross, direct=direct)
        assert (head.direct is not None, len(head.cross)) == (direct, cross)
        moved = head(features + 1, embeddings, at) - head(features, embeddings, at)
        assert bool(moved.any()) == (direct or cross > 0)  # with neither, nothing of the target reaches the head


@torch.no_grad()
def test_only_rotary_positions_tell_where_a_feature_stands() -> None:
    features, embeddings, at = given()
    for rotary in (True, False):
        head = dream("llava", direct=False, rotary=rotary)
        begun = head.begin(embeddings, at)
        places = (at.positions, at.positions.flip(1))
        outs = [head.finish(begun, features, at, Placement(p, at.attention_mask)) for p in places]
        assert torch.equal(*outs) != rotary


def test_the_method_grows_the_paper_s_tree() -> None:
    under = methods.build("dream", Models(target("llava"), head=dream("llava")))
    assert isinstance(under.drafter, HeadDrafter)
    assert under.drafter.policy == DynamicTree(top=4, max_depth=6, total=32)
    with pytest.raises(MethodError, match="needs a trained eagle2 head, but only the head dream is given"):
        methods.build("eagle2", Models(target("llava"), head=dream("llava")))


@pytest.mark.parametrize(("keep", "reads"), [(1.0, False), (0.5, True)])
def test_the_target_s_attention_is_read_only_to_compress(keep: float, reads: bool) -> None:
    drafter = HeadDrafter(dream("llava", keep=keep), target("llava"), POLICIES["chain"])
    context = Context(target("llava"), 1)
    drafter.open(1, context)
    assert context.requirements.attention == ((-1,) if reads else None)
    assert not reads or context.requirements.queries == "all"
    other = Context(target("llava"), 1)
    other.requirements.add_attention((-1,), "words")
    if reads:
        with pytest.raises(ModelError, match="choose the same for all that read it"):
            drafter.open(1, other)
