"""With a LoRA, greedy tokens are those of PEFT's own `generate`, and the base's stay what they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ready, vlm
from families import FAMILIES, reference_greedy
from harness import assert_equals_generate, build, draft, requests, tokens
from lora_kit import random_lora
from saccade import load
from saccade.errors import InputError
from saccade.lora import adapted
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


def compare(name: str, method: str, folder: Path) -> None:
    from peft import PeftModel

    case, kind = FAMILIES[name], FAMILIES[name].kinds[0]
    base = Target(case.model())
    engine = build(adapted(base, "lora", folder), draft(name), method)
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
    target = adapted(base, "lora", random_lora(tmp_path, FAMILIES["llama"].model()))
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
