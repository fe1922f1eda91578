"""EAGLE, EAGLE-2 and MSD heads in the released layout are loaded as they were meant, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_kit import random_head, target
from published_eagle_kit import CASES, by_hand, original, released
from published_kit import drop, edit, randomised, reweigh, same
from safetensors.torch import load_file

from families import FAMILIES
from saccade.draft.heads import store
from saccade.draft.heads.block import Placement
from saccade.draft.heads.head import build_head
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.errors import ModelError, TrainingError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return released(original("msd"), tmp_path / "head", target("llava"))


# --------------------------------------------------------------------------- what is loaded


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_released_head_computes_what_its_files_say(case: str, tmp_path: Path) -> None:
    name, kind, norms, bias = CASES[case]
    released(original(case), tmp_path, target(name))
    stored = load_file(tmp_path / "model.safetensors")
    assert ("fc.bias" in stored, "layers.0.input_layernorm.weight" in stored) == (bias, norms == "block")
    assert ("layers.0.self_attn.q_proj.bias" in stored) == name.startswith("qwen2")
    assert kind_in(tmp_path) == kind_in(str(tmp_path)) == kind_at(tmp_path) == kind
    head = load_head(tmp_path, target(name))
    same(original(case), head)
    torch.manual_seed(3)
    features, embeddings = torch.randn(9, 64), torch.randn(9, 64)
    alone = torch.zeros(9, dtype=torch.bool)
    if kind == "msd":
        alone[2:5] = True
        features[alone] = 0
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    out = head(head.fuse(features)[None], embeddings[None], Placement(torch.arange(9)[None], causal))
    torch.testing.assert_close(out[0], by_hand(tmp_path, features, embeddings, alone), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(head.logits(out, torch.nn.Identity()), out)  # no norm before the LM head


@pytest.mark.parametrize("case", ["eagle", "msd-qwen2-vl"])
def test_pytorch_s_own_files_and_longer_names(case: str, tmp_path: Path) -> None:
    released(original(case), tmp_path, target(CASES[case][0]), prefix="model.", binary=True)
    assert not (tmp_path / "model.safetensors").exists()
    assert kind_in(tmp_path) == CASES[case][1]
    same(original(case), load_head(tmp_path, target(CASES[case][0])))
    torch.save({"step": 3}, tmp_path / "pytorch_model.bin")
    assert kind_in(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 40)
    assert kind_in(tmp_path) is None


def test_what_config_json_may_say_otherwise(folder: Path, tmp_path: Path) -> None:
    edit(folder, vocab_size=150)  # which is not the head's
    reweigh(folder, lambda w: w.update({"embed_tokens.weight": torch.ones(150, 64)}))
    drop(folder, "head_dim", "rope_theta", "rms_norm_eps", "architectures", "mm_vision_tower")
    config = load_head(folder, target("llava")).config
    assert (config.vocab_size, config.head_dim, config.norm_eps) == (192, 16, 1e-6)
    assert config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    edit(folder, model_type="llava_llama")
    assert kind_in(folder) == "msd"

    values = json.loads((folder / "config.json").read_text())
    values.pop("model_type")
    nested = {"model_type": "llava", "text_config": {**values, "model_type": "llama", "rope_theta": 5e5}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert kind_in(folder) == "msd"
    assert load_head(folder, target("llava")).config.rope["rope_theta"] == 5e5

    every = randomised(build_head(replace(original("eagle").config, kv_heads=4)))
    released(every, tmp_path / "no-groups", target("llama"))  # type: ignore[arg-type]
    drop(tmp_path / "no-groups", "num_key_value_heads", "model_type")
    same(every, load_head(tmp_path / "no-groups", target("llama")))


def test_it_comes_back_when_it_is_saved_as_ours(folder: Path, tmp_path: Path) -> None:
    save_head(load_head(folder, target("llava")), tmp_path / "ours")
    assert kind_in(tmp_path / "ours") == "msd"
    same(original("msd"), load_head(tmp_path / "ours", target("llava")))


@pytest.mark.parametrize("kind", ["eagle2", "msd"])
def test_heads_from_before_there_were_others_are_as_they_were(kind: str, tmp_path: Path) -> None:
    ours = random_head("llava", kind)
    save_head(ours, tmp_path)
    options = {k: v for k, v in ours.config.options.items() if k not in ("norms", "bias")}
    edit(tmp_path, options=options)
    same(ours, load_head(tmp_path, target("llava")))


# --------------------------------------------------------------------------- what is refused

QUERY = "layers.0.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "activation": (lambda d: edit(d, hidden_act="gelu"), "has hidden_act 'gelu', which is not supported"),
    "window": (lambda d: edit(d, use_sliding_window=True), "has use_sliding_window True"),
    "no size": (lambda d: drop(d, "intermediate_size"), "has intermediate_size None in its config.json"),
    "hidden size": (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    "rope": (
        lambda d: edit(d, rope_scaling={"type": "su", "factor": 2.0}),
        "The rope type 'su' is not known",
    ),
    "half a rope": (
        lambda d: edit(d, rope_scaling={"rope_type": "yarn"}),
        "has an incomplete rope_scaling: .*'factor'",
    ),
    "second layer": (
        lambda d: reweigh(d, lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.ones(96, 64)})),
        "has the weight layers.1.mlp.up_proj.weight, which is not known",
    ),
    "LM head": (
        lambda d: reweigh(d, lambda w: w.update({"lm_head.weight": torch.ones(192, 64)})),
        "has the weight lm_head.weight, which is not known",
    ),
    "weight missing": (
        lambda d: reweigh(d, lambda w: w.pop(QUERY)),
        f"lacks the weight {QUERY}; copy the whole folder again",
    ),
    "one bias": (
        lambda d: reweigh(d, lambda w: w.update({"layers.0.self_attn.v_proj.bias": torch.ones(32)})),
        r"lacks the weight stack.0.self_attn.[qk]_proj.bias",
    ),
    "weight's shape": (
        lambda d: reweigh(d, lambda w: w.update({QUERY: torch.ones(32, 64)})),
        r"q_proj.weight .* is \(32, 64\), not \(64, 64\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_known_is_refused(damage: str, folder: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(folder)
    assert kind_in(folder) == "msd"
    with pytest.raises(ModelError, match=message):
        load_head(folder, target("llava"))


def test_a_target_of_another_width(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target("llava").text_config, "hidden_size", 96)
    with pytest.raises(ModelError, match="hidden size is 64 but this target's is 96; give the target that"):
        load_head(folder, target("llava"))


def test_a_small_llama_is_no_head(tmp_path: Path) -> None:
    FAMILIES["llama"].model(layers=1).save_pretrained(tmp_path / "safe")
    assert kind_in(tmp_path / "safe") is None
    with pytest.raises(ModelError, match="has no 'saccade_head'"):
        kind_at(tmp_path / "safe")
    edit(tmp_path / "safe", architectures=None)
    reweigh(tmp_path / "safe", lambda w: w.update({"fc.weight": torch.ones(64, 192)}))  # of another form
    assert kind_in(tmp_path / "safe") is None
    (tmp_path / "safe" / "model.safetensors").write_bytes(b"x" * 40)
    assert kind_in(tmp_path / "safe") is None


def test_no_weights_of_deeper_models_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_shapes", lambda *_: pytest.fail("looked"))
    edit(folder, num_hidden_layers=2)
    assert kind_in(folder) is None
    save_head(original("msd"), folder)
    assert kind_in(folder) == "msd"
    edit(folder, num_hidden_layers=1)  # ours, whatever else it says
    assert kind_in(folder) == "msd"


@pytest.mark.parametrize("kind", ["eagle2", "msd"])
@pytest.mark.parametrize("option", [{"norms": "none"}, {"norms": "block"}, {"bias": True}])
def test_such_heads_are_not_trained(kind: str, option: dict[str, Any]) -> None:
    from saccade.train.recipe import read_recipe
    from saccade.train.warm_start import new_head

    (name,) = option
    with pytest.raises(TrainingError, match=rf"Heads with {name} .* not trained here; leave out head\.{name}\."):
        new_head(target("llava"), replace(read_recipe(kind), head=option))


def test_norms_are_those_that_there_are() -> None:
    with pytest.raises(ModelError, match="norms must be one of all, block, none, not 'some'"):
        random_head("llava", "msd", norms="some")
