"""Quantised targets draft and verify on their own modules, or their checkpoints are refused in one sentence."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoints import ready
from families import FAMILIES, reference_greedy
from saccade import load
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.inputs.families import split
from saccade.loading import adapt, load_model
from saccade.target_model.adapter import Target

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


class Coded(Tensor):
    """A weight that is no plain parameter, as quantised ones are."""


def text_linears(model: PreTrainedModel) -> list[nn.Linear]:
    head = model.get_output_embeddings()
    return [m for m in model.get_decoder().modules() if isinstance(m, nn.Linear) and m is not head]


def check(name: str, model: PreTrainedModel) -> None:
    """Plain decoding and a tree give the tokens of `generate`."""
    case = FAMILIES[name]
    kind = case.kinds[0]
    (expected,) = reference_greedy(model, case.row_inputs(kind, 0), 16)
    target = Target(model)
    assert not target.is_lean
    head = build_head(HeadConfig.from_target(target, "eagle3")).eval()
    requests = [Request(prompt) for prompt in split(target.config, case.row_inputs(kind, 0))]
    for engine in (Engine(target), Engine(target, HeadDrafter(head, target, DynamicTree(top=3, max_depth=3, total=9)))):
        assert [list(o.tokens) for o in engine.generate(requests, max_new_tokens=16)] == [expected]


def test_weights_that_are_no_plain_parameters_stay_as_they_are() -> None:
    model = FAMILIES["llava"].model()
    for linear in text_linears(model):
        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Coded))
    check("llava", model)
    assert all(isinstance(linear.weight, Coded) for linear in text_linears(model))


def quantise(model: PreTrainedModel, form: str) -> None:
    """Quantise the decoder's products in memory."""
    from torchao import quantization as ao

    forms = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    }
    chosen = set(map(id, text_linears(model)))
    ao.quantize_(model, forms[form](), filter_fn=lambda module, _: id(module) in chosen)


@needs_torchao
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_torchao(name: str, form: str) -> None:
    model = FAMILIES[name].model()
    quantise(model, form)
    check(name, model)


@needs_torchao
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_methods_give_the_tokens_of_plain_decoding_of_the_same_quantised_models(form: str) -> None:
    model, draft = (load_model(ready("llama"), dtype="float32") for _ in range(2))
    quantise(model, form)
    quantise(draft, form)
    vlm = load(model, draft, "chain")
    expected = vlm.using("plain").generate("What is it?", max_new_tokens=24).tokens
    for method in ("chain", "dynamic-tree", "auto"):
        assert vlm.using(method).generate("What is it?", max_new_tokens=24).tokens == expected


@needs_torchao
def test_a_checkpoint_of_torchao_is_loaded_as_transformers_loads_it(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    FAMILIES["llama"].model().save_pretrained(tmp_path / "plain")
    settings = TorchAoConfig(Int8WeightOnlyConfig())
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings, dtype=torch.float32)
    small.save_pretrained(tmp_path / "small")
    target = adapt(load_model(tmp_path / "small"))
    assert not target.is_lean
    assert type(target.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    inputs = FAMILIES["llama"].row_inputs("text", 0)
    (output,) = Engine(target).generate([Request(split(target.config, inputs)[0])], max_new_tokens=12)
    assert [list(output.tokens)] == reference_greedy(small, inputs, 12)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes": ("bitsandbytes", {"load_in_4bit": True, "_load_in_4bit": True}),
    "gptq": ("optimum", {"bits": 4, "group_size": 32, "desc_act": False}),
    "awq": ("gptqmodel", {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}
"""Method -> package and settings."""


@pytest.mark.parametrize("method", OTHERS)
def test_a_checkpoint_whose_package_is_missing_is_refused(method: str, tmp_path: Path) -> None:
    package, settings = OTHERS[method]
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    FAMILIES["llama"].model().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": method, **settings}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"needs a package that is not installed .*{package}.*; install it, or give"):
        load_model(tmp_path)
