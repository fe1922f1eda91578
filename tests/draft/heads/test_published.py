"""EAGLE-3 heads in the released layout are loaded as they were meant, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_kit import random_head, target
from published_kit import KNOWN, drop, edit, original, released, reweigh, same
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from saccade.draft.heads.block import Placement
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.errors import ModelError, TrainingError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return released(original(), tmp_path / "head", target("llava"))


# --------------------------------------------------------------------------- what is loaded


def by_hand(folder: Path, states: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[N, d]`` and logits ``[N, V]`` of a text, as the released code computes them, from the files alone.

    Args:
        states: ``[N, 3 * d]`` of the target before every entry's token.
        embeddings: ``[N, d]``.
    """
    values, weights = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    heads, kv, dim = (values[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def normed(x: Tensor, name: str) -> Tensor:
        return weights[name] * x / (x.square().mean(-1, keepdim=True) + values["rms_norm_eps"]).sqrt()

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def turned(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(x)), values["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)).repeat(
            1, 2
        )[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    feature = linear(states, "fc")
    both = torch.cat(
        [
            normed(embeddings, "midlayer.input_layernorm.weight"),
            normed(feature, "midlayer.hidden_norm.weight"),
        ],
        -1,
    )
    q, k, v = (
        linear(both, f"midlayer.self_attn.{p}_proj").view(len(both), n, dim)
        for p, n in (("q", heads), ("k", kv), ("v", kv))
    )
    q, k, v = turned(q), turned(k).repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(q), -1)
    x = feature + linear(mixed, "midlayer.self_attn.o_proj")
    after = normed(x, "midlayer.post_attention_layernorm.weight")
    x = x + linear(
        F.silu(linear(after, "midlayer.mlp.gate_proj")) * linear(after, "midlayer.mlp.up_proj"),
        "midlayer.mlp.down_proj",
    )
    logits = torch.full((len(x), values["vocab_size"]), -torch.inf)
    for draft, shift in enumerate(weights["d2t"].tolist()):
        logits[:, draft + shift] = (normed(x, "norm.weight") @ weights["lm_head.weight"].T)[:, draft]
    return x, logits


@torch.no_grad()
def test_a_released_head_computes_what_its_files_say(folder: Path) -> None:
    head = load_head(folder, target("llava"))
    same(original(), head)
    torch.manual_seed(3)
    states, embeddings = torch.randn(9, 3 * 64), torch.randn(9, 64)
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    hidden = head(head.fuse(states)[None], embeddings[None], Placement(torch.arange(9)[None], causal))
    expected, logits = by_hand(folder, states, embeddings)
    torch.testing.assert_close(hidden[0], expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(head.logits(hidden, torch.nn.Identity())[0], logits, atol=2e-4, rtol=2e-4)
    assert (logits.isneginf().sum(-1) == logits.shape[1] - KNOWN).all()


@pytest.mark.parametrize("block", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_the_block_goes_by_several_names(block: str, tmp_path: Path) -> None:
    same(original(), load_head(released(original(), tmp_path, target("llava"), block), target("llava")))


def test_pytorch_s_own_files_are_read(tmp_path: Path) -> None:
    released(original(), tmp_path, target("llava"), binary=True)
    same(original(), load_head(tmp_path, target("llava")))
    torch.save({"step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds more than weights"):
        load_head(tmp_path, target("llava"))
    torch.save({"bias": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"carries code \(pathlib\.\w+\), which is never run; give .* safetensors"):
        load_head(tmp_path, target("llava"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 40)
    with pytest.raises(ModelError, match="is damaged"):
        load_head(tmp_path, target("llava"))


def test_a_head_of_the_whole_vocabulary(tmp_path: Path) -> None:
    whole = random_head("llava", "eagle3", own_vocabulary=target("llava").vocab_size)
    assert isinstance(whole, Eagle3)
    released(whole, tmp_path, target("llava"))
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    same(whole, load_head(tmp_path, target("llava")))
    drop(tmp_path, "draft_vocab_size")
    same(whole, load_head(tmp_path, target("llava")))
    reweigh(tmp_path, lambda w: w.pop("lm_head.weight"))
    shared = load_head(tmp_path, target("llava"))
    assert shared.config.options == {**Eagle3.defaults, "own_vocabulary": 0}
    assert not shared.has_lm_head


def test_what_config_json_may_say_otherwise(folder: Path) -> None:
    edit(folder, architectures=["LlamaForCausalLM"])
    drop(folder, "head_dim", "rope_theta", "rms_norm_eps")
    config = load_head(folder, target("llava")).config
    assert (config.head_dim, config.norm_eps) == (16, 1e-6)
    assert config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    edit(folder, rope_theta=5e5, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    assert load_head(folder, target("llava")).config.rope == {"rope_type": "default", "rope_theta": 5e5}
    edit(folder, rope_scaling={"type": "linear", "factor": 2.0})
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "max_position_embeddings": 2048}
    assert load_head(folder, target("llava")).config.rope == stretched
    edit(folder, rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 2e4})
    assert load_head(folder, target("llava")).config.rope == {"rope_type": "default", "rope_theta": 2e4}
    edit(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 0, -1]})  # by the layers that they leave
    assert load_head(folder, target("llava")).layers == (2, 1, 0)
    edit(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 0])  # by the layers that they enter
    assert load_head(folder, target("llava")).layers == (1, 2, 0)


def test_biases_are_seen_in_the_weights(folder: Path) -> None:
    sizes = {"q": 64, "k": 32, "v": 32}
    biases = {f"midlayer.self_attn.{part}_proj.bias": torch.randn(size) for part, size in sizes.items()}
    reweigh(folder, lambda w: w.update(biases))
    assert load_head(folder, target("llava")).config.qkv_bias


def test_it_comes_back_when_it_is_saved_as_ours(folder: Path, tmp_path: Path) -> None:
    save_head(load_head(folder, target("llava")), tmp_path / "ours")
    same(original(), load_head(tmp_path / "ours", target("llava")))


# --------------------------------------------------------------------------- what is refused

DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (
        lambda d: edit(d, architectures=["Eagle3DeepseekV2ForCausalLM"]),
        "has the architecture Eagle3DeepseekV2ForCausalLM, which is not known; expected LlamaForCausalLMEagle3",
    ),
    "two layers": (lambda d: edit(d, num_hidden_layers=2), "has num_hidden_layers 2, .*; expected 1"),
    "logits without a norm": (lambda d: edit(d, norm_output=False), "has norm_output False"),
    "no size": (lambda d: drop(d, "hidden_size"), "has hidden_size None in its config.json"),
    "hidden size": (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    "target's size": (lambda d: edit(d, target_hidden_size=96), "hidden size is 96 but this target's is 64"),
    "vocabulary": (lambda d: edit(d, vocab_size=191), "vocabulary is 191 but this target's is 192"),
    "draft vocabulary": (lambda d: edit(d, draft_vocab_size=41), "d2t that does not name 41 different ones"),
    "rope": (
        lambda d: edit(d, rope_scaling={"rope_type": "su", "factor": 2.0}),
        "The rope type 'su' is not known",
    ),
    "half a rope": (
        lambda d: edit(d, rope_scaling={"rope_type": "yarn"}),
        "has an incomplete rope_scaling: .*'factor'",
    ),
    "layers": (
        lambda d: edit(d, eagle_aux_hidden_state_layer_ids=[1]),
        "reads 1 layers of its target; expected 3",
    ),
    "no such layer": (
        lambda d: edit(d, eagle_aux_hidden_state_layer_ids=[0, 1, 9]),
        "reads layer 9 of its target, which has states 0 to 2",
    ),
    "last layer alone": (
        lambda d: edit(d, eagle_config={"use_aux_hidden_state": False}),
        "reads the last layer alone, which is not supported",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "has no model.safetensors or pytorch_model.bin",
    ),
    "weight missing": (
        lambda d: reweigh(d, lambda w: w.pop("midlayer.hidden_norm.weight")),
        "lacks the weight midlayer.hidden_norm.weight; copy the whole folder again",
    ),
    "no LM head": (
        lambda d: reweigh(d, lambda w: w.pop("lm_head.weight")),
        "lacks the weight lm_head.weight",
    ),
    "no d2t": (
        lambda d: reweigh(d, lambda w: w.pop("d2t")),
        "lacks the weight d2t, which maps its 40 tokens",
    ),
    "d2t beyond": (
        lambda d: reweigh(d, lambda w: w["d2t"].add_(192)),
        "does not name 40 different ones of 192 tokens",
    ),
    "d2t twice": (
        lambda d: reweigh(d, lambda w: w["d2t"].copy_(-torch.arange(40))),
        "does not name 40 different ones",
    ),
    "weight too many": (
        lambda d: reweigh(d, lambda w: w.update({"fc_norm.0.weight": torch.ones(64)})),
        "has the weight fc_norm.0.weight, which is not known",
    ),
    "weight's shape": (
        lambda d: reweigh(d, lambda w: w.update({"fc.weight": torch.ones(64, 128)})),
        r"fc.weight .* is \(64, 128\), not \(64, 192\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_known_is_refused(damage: str, folder: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(folder)
    assert kind_in(folder) == "eagle3"
    with pytest.raises(ModelError, match=message):
        load_head(folder, target("llava"))


@pytest.mark.parametrize("known", [-1, 193, True, "all"])
def test_sizes_of_vocabularies(known: Any) -> None:
    with pytest.raises(ModelError, match="own_vocabulary must be a whole number from 0 to 192"):
        random_head("llava", "eagle3", own_vocabulary=known)


def test_a_llama_is_no_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    assert kind_in(tmp_path) is None
    with pytest.raises(ModelError, match="has no 'saccade_head'"):
        kind_at(tmp_path)


@pytest.mark.parametrize("option", [{"residual": "normed"}, {"state_norms": "each"}, {"feeds": "normed"}])
def test_forms_of_others_are_not_trained(option: dict[str, str]) -> None:
    from saccade.train.recipe import read_recipe
    from saccade.train.warm_start import new_head

    (name,) = option
    with pytest.raises(TrainingError, match=rf"not trained here; leave out head\.{name}"):
        new_head(target("llava"), replace(read_recipe("eagle3"), head=option))
