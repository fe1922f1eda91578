"""With a LoRA, greedy tokens are those of PEFT's own `generate`, and the base's stay what they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from families import FAMILIES, reference_greedy
from harness import assert_equals_generate, build, draft, requests, tokens
from lora_kit import random_lora
from saccade.lora import Adapter, adapted
from saccade.target_model.adapter import Target

LENGTH = 16


@pytest.mark.some_families
@pytest.mark.parametrize("method", ["plain", "chain", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_peft(name: str, method: str, tmp_path: Path) -> None:
    compare(name, method, random_lora(tmp_path, FAMILIES[name].model()))


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
    engine = build(adapted(base, Adapter.read("lora", folder)), draft(name), method)
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
    target = adapted(base, Adapter.read("lora", random_lora(tmp_path, FAMILIES["llama"].model())))
    assert target.is_lean
    assert {n for n, p in target.model.named_parameters() if p.data_ptr() not in places and "lora_" not in n} == set()
    assert {n for n, _ in model.named_parameters()} == before.keys()
    assert all(torch.equal(p, before[n][1]) and p.requires_grad for n, p in model.named_parameters())
