"""With a LoRA, greedy tokens are those of PEFT's own `generate`, and the base's stay what they were."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import KasaConfig, LoraConfig
from safetensors.torch import load_file, save_file

from checkpoints import ready, vlm
from families import FAMILIES, reference_greedy
from harness import assert_equals_generate, build, draft, requests, tokens
from lora_kit import random_lora
from saccade import load
from saccade.errors import InputError, ModelError
from saccade.lora import KNOWN, _fingerprints, adapted
from saccade.target_model.adapter import Target

LENGTH = 16


@pytest.mark.some_families
@pytest.mark.parametrize("method", ["plain", "chain", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_peft(name: str, method: str, tmp_path: Path) -> None:
    settings = {"exclude_modules": ["out_proj"]} if name == "nemotron_h" else {}  # which PEFT refuses there
    compare(name, method, random_lora(tmp_path, FAMILIES[name].model(), **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"use_rslora": True, "lora_bias": True},
        {"target_modules": ["lm_head", "embed_tokens", "q_proj"]},
        {"target_modules": ["k_proj"], "layers_to_transform": [1], "rank_pattern": {"k_proj": 2}},
        {"target_modules": r".*visual.*\.(qkv|proj)"},
    ],
    ids=str,
)
def test_kinds_of_loras_equal_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    compare("qwen2_5_vl", "static", random_lora(tmp_path, FAMILIES["qwen2_5_vl"].model(), **settings))


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_the_unchanged_embedding_that_peft_stores_beside_a_lora_on_it_is_let_in(name: str, tmp_path: Path) -> None:
    settings = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}
    folder = random_lora(tmp_path, FAMILIES[name].model(), beside="auto", **settings)
    weights = load_file(folder / "adapter_model.safetensors")
    beside = [key for key in weights if ".lora_" not in key]
    assert len(beside) == 2
    compare(name, "static", folder)
    for key in beside:
        changed = weights[key].clone()
        changed[-1, -1] += 1
        for other in (changed, torch.cat([weights[key], weights[key][:1]])):
            save_file({**weights, key: other}, folder / "adapter_model.safetensors")
            with pytest.raises(ModelError, match=f"lora has {re.escape(key)}, and with it changes the target"):
                adapted(Target(FAMILIES[name].model()), {"lora": folder})


def test_a_lora_on_the_experts_parameters_equals_peft(tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    compare("qwen3_vl_moe", "static", random_lora(tmp_path, FAMILIES["qwen3_vl_moe"].model(), **settings))


def with_settings(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


@pytest.mark.parametrize("field", [*(field.name for field in fields(LoraConfig)), "of_a_later_version"])
def test_a_field_of_peft_that_is_not_known_is_refused_unless_it_has_its_default(field: str, tmp_path: Path) -> None:
    folder = random_lora(tmp_path, FAMILIES["llama"].model())
    adapted(Target(FAMILIES["llama"].model()), {"lora": with_settings(folder, of_a_later_version=None)})
    if field in KNOWN:
        return
    off = [False] if LoraConfig().to_dict().get(field) else []  # what is on by default, switched off
    for value in (True, 7, ["lm_head"], {"r": 1}, *off):
        with pytest.raises(ModelError, match=f"The adapter lora has {field}, and with it changes the target in other"):
            adapted(Target(FAMILIES["llama"].model()), {"lora": with_settings(folder, **{field: value})})


def test_every_known_field_is_one_of_peft() -> None:
    assert {field.name for field in fields(LoraConfig)} >= KNOWN


@pytest.mark.parametrize("modules", ["all-linear", r".*visual.*\.attn\.(qkv|proj)"])
def test_an_adapter_that_changes_the_base_in_its_first_forward_is_refused(
    modules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's KaSA cuts small singular values off the base's weights, wherever they are."""
    name = "qwen2_5_vl"
    settings = {"target_modules": modules, "kasa_config": KasaConfig()}
    folder = random_lora(tmp_path / "kasa", FAMILIES[name].model(), **settings)
    with pytest.raises(ModelError, match="The adapter lora has kasa_config, and with it changes the target in other"):
        adapted(Target(FAMILIES[name].model()), {"lora": folder})
    monkeypatch.setattr("saccade.lora.KNOWN", {*KNOWN, "kasa_config"})
    plain = random_lora(tmp_path / "plain", FAMILIES[name].model())
    with pytest.raises(ModelError, match=r"The adapter lora changes model\.\S+\.weight of the target, which all"):
        adapted(Target(FAMILIES[name].model()), {"plain": plain, "lora": folder})


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.view(torch.uint8).view(-1)[-1].bitwise_xor_(1),
        lambda weight: weight.data.copy_(weight.data.flip(0)),
        lambda weight: weight.data.copy_(weight.data.flip(1)),
        lambda weight: setattr(weight, "data", weight.data.clone()),
        lambda weight: setattr(weight, "data", weight.data[:, :1]),
    ],
    ids=["a bit", "rows", "columns", "another place", "another shape"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_of_a_weight_shows_in_its_fingerprint(change: Any, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(37, 41).to(dtype)
    before = _fingerprints(model)
    assert _fingerprints(model) == before
    change(model.weight)
    after = _fingerprints(model)
    assert {name for name in after if after[name] != before[name]} == {"weight"}


def compare(name: str, method: str, folder: Path) -> None:
    from peft import PeftModel

    case, kind = FAMILIES[name], FAMILIES[name].kinds[0]
    base = Target(case.model())
    engine = build(adapted(base, {"lora": folder})["lora"], draft(name), method)
    theirs = PeftModel.from_pretrained(case.model(), str(folder))
    answer = partial(reference_greedy, theirs, n=LENGTH)
    expected = [answer(case.row_inputs(kind, row))[0] for row in range(3)]
    assert tokens(engine.generate(requests(name), max_new_tokens=LENGTH)) == expected
    assert expected != case.reference(kind, 3, LENGTH)
    assert_equals_generate(build(base, draft(name), method), name, n=LENGTH)


def test_an_adapter_adds_nothing_but_its_own_weights(tmp_path: Path) -> None:
    model = FAMILIES["llama"].model()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    base = Target(model)
    places = {p.data_ptr() for p in model.parameters()}
    target = adapted(base, {"lora": random_lora(tmp_path, FAMILIES["llama"].model())})["lora"]
    assert target.is_lean
    assert {n for n, p in target.model.named_parameters() if p.data_ptr() not in places and "lora_" not in n} == set()
    assert {n for n, _ in model.named_parameters()} == before.keys()
    assert all(torch.equal(p, before[n][1]) and p.requires_grad for n, p in model.named_parameters())


def test_using_keeps_what_it_does_not_name(tmp_path: Path) -> None:
    folder = random_lora(tmp_path, vlm("qwen", "qwen-draft").target.model)
    model = load(ready("qwen"), ready("qwen-draft"), "chain", gamma=2, adapters={"red": folder})
    red = model.using(adapter="red")
    assert (model.adapter, red.adapter, red.method, red.options["gamma"]) == (None, "red", "chain", 2)
    assert (red.using("sage").adapter, red.using(gamma=3).options["gamma"]) == ("red", 3)
    answers = [m.generate("Well?", max_new_tokens=LENGTH).tokens for m in (model, red, red.using("plain"))]
    assert answers[0] != answers[1] == answers[2]
    base = red.using(adapter=None)
    assert (base.adapter, base.target) == (None, model.target)
    with pytest.raises(InputError, match="There is no adapter 'blue'; expected one of red"):
        model.using(adapter="blue")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_is_exact_with_an_adapter(dtype: str, tmp_path: Path) -> None:
    folder = random_lora(tmp_path, vlm("qwen", "qwen-draft").target.model)
    model = load(ready("qwen"), ready("qwen-draft"), dtype=dtype, exact=True, adapters={"red": folder})
    answers = [
        model.using(method, adapter="red").generate(["Well?", "Two"], max_new_tokens=40)
        for method in ("plain", "chain", "static-tree")
    ]
    assert tokens(answers[0]) == tokens(answers[1]) == tokens(answers[2])
    assert model.adapters["red"].is_lean


def test_a_layer_of_multi_token_prediction_drafts_for_an_adapter(tmp_path: Path) -> None:
    folder = random_lora(tmp_path, vlm("predicting").target.model, std=0.02)
    red = load(ready("predicting"), adapters={"red": folder}).using(adapter="red")
    drafted = red.generate("Well?", max_new_tokens=LENGTH)
    assert red.method == "mtp"
    assert drafted.stats.drafted_tokens
    assert drafted.tokens == red.using("plain").generate("Well?", max_new_tokens=LENGTH).tokens
