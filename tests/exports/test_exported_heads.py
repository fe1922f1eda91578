"""Heads in the layouts of other engines come back and draft as before, or are refused; and folders are described."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from families import FAMILIES, VOCAB
from heads_kit import POLICIES, kind_of_prompt, prompts, random_head, recorded, target
from released_kit import KNOWN, PlainEagle3, edit, randomised, release, same
from saccade.checkpoints import export_head, inspect_checkpoint
from saccade.checkpoints.exporting import obstacle
from saccade.draft.heads.head import Head, HeadConfig, Placement, build_head
from saccade.draft.heads.store import load_head, save_head
from saccade.errors import ModelError
from saccade.target_model.adapter import Target

CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "speculators": ("llava", "eagle3", "speculators", {"own_vocabulary": KNOWN}),
    "speculators, every token": ("llava", "eagle3", "speculators", {}),
    "speculators, biases": ("qwen2_5_vl", "eagle3", "speculators", {}),
    "speculators, norms of queries": ("qwen3_vl", "eagle3", "speculators", {"own_vocabulary": KNOWN}),
    "speculators, scaled embeddings": ("gemma3", "eagle3", "speculators", {}),
    "speculators, M-RoPE": ("qwen3_vl", "eagle3", "speculators", {"positions": "target"}),
    "speculators, all norms": (
        "llava",
        "eagle3",
        "speculators",
        {"residual": "normed", "state_norms": "joint", "feeds": "normed"},
    ),
    "sglang": ("llava", "eagle3", "sglang", {"own_vocabulary": KNOWN}),
    "sglang, every token": ("llava", "eagle3", "sglang", {}),
    "eagle": ("llama", "eagle2", "eagle", {"norms": "none", "bias": True}),
    "eagle for Qwen2": ("qwen2", "eagle2", "eagle", {"norms": "none"}),
    "msd": ("llava", "msd", "eagle", {"norms": "none", "bias": True}),
    "msd for Qwen2-VL": ("qwen2_vl", "msd", "eagle", {"norms": "block"}),
}
"""Name -> family of the target, kind, layout and options."""


def head_for(case: str) -> Head:
    name, kind, to, options = CASES[case]
    rope = target(name).text_config.rope_parameters
    head = randomised(random_head(name, kind, **options))
    changes: dict[str, Any] = {}
    if options.get("positions") == "target":
        sections = {key: value for key, value in rope.items() if key.startswith("mrope")}
        changes["rope"] = {**head.config.rope, **sections}
    if to == "sglang":
        changes["layers"] = (1, 2, 1)  # not the embeddings
    other = build_head(replace(head.config, **changes))
    other.load_state_dict(head.state_dict())
    return other.eval()


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_drafts_the_same(case: str, tmp_path: Path) -> None:
    name, kind, to, _ = CASES[case]
    head, family = head_for(case), FAMILIES[name]
    assert obstacle(head, target(name), to) is None
    export_head(head, target(name), tmp_path / "out", to, target_name="someone/some-target")
    again = load_head(tmp_path / "out", target(name))
    assert again.kind == kind
    prompt_kind = kind_of_prompt(name)
    asked = prompts(family, family.inputs(prompt_kind, rows=2))
    outputs, steps = recorded(name, again, POLICIES["static"], asked, n=10)
    assert [o.tokens for o in outputs] == family.reference(prompt_kind, rows=2, n=10)
    _, expected = recorded(name, head, POLICIES["static"], asked, n=10)
    for step, other in zip(steps, expected, strict=True):
        for (tokens, _, logits), (same_tokens, _, same_logits) in zip(step.levels, other.levels, strict=True):
            assert torch.equal(tokens, same_tokens)
            torch.testing.assert_close(logits.exp(), same_logits.exp(), atol=1e-4, rtol=1e-3)
    assert "some-target" in (tmp_path / "out" / "README.md").read_text()
    assert inspect_checkpoint(tmp_path / "out").kind == kind


@pytest.mark.parametrize("to", ["eagle", "sglang", "speculators"])
def test_the_layers_that_eagle_s_own_code_reads(to: str, tmp_path: Path) -> None:
    deep = Target(FAMILIES["llama"].model(layers=8))
    head = randomised(build_head(HeadConfig.from_target(deep, "eagle3", own_vocabulary=KNOWN)))
    assert head.layers == (2, 4, 5)
    export_head(head, deep, tmp_path / "out", to, target_name="x")
    again = load_head(tmp_path / "out", deep)
    same(head, again)


def test_a_target_s_factor_of_logits_is_in_the_lm_head_that_goes_with_a_head(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("granite", vocab_size=VOCAB, num_key_value_heads=2, logits_scaling=8.0, **sizes)
    scaled = Target(AutoModelForCausalLM.from_config(config).eval())
    head = randomised(build_head(HeadConfig.from_target(scaled, "eagle3")))
    export_head(head, scaled, tmp_path / "out", "speculators", target_name="x")
    weight = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(weight, scaled.output_embeddings.weight.detach() / 8)


@pytest.mark.parametrize("to", ["speculators", "sglang"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64},
        {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8, "max_position_embeddings": 64},
        {"rope_type": "default", "partial_rotary_factor": 0.75},
    ],
    ids=lambda scaling: str(scaling["rope_type"]),
)
def test_rotary_settings_that_a_head_does_not_follow_are_left_out(
    scaling: dict[str, Any], to: str, tmp_path: Path
) -> None:
    plain = random_head("llava", "eagle3")
    head = build_head(replace(plain.config, rope={**scaling, "rope_theta": 5000.0}, layers=(1, 2, 1)))
    export_head(head, target("llava"), tmp_path / "out", to, target_name="x")
    values = config_of(tmp_path / "out")
    block = values.get("transformer_layer_config", values)
    assert block["max_position_embeddings"] == scaling.get("max_position_embeddings", 1024)
    if to == "speculators":
        assert block["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    else:
        assert (block["rope_theta"], block["rope_scaling"]) == (5000.0, None)


def test_scaled_frequencies_are_exported(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    head = build_head(replace(random_head("llava", "eagle3").config, rope={**rope, "max_position_embeddings": 64}))
    export_head(head, target("llava"), tmp_path / "out", "speculators", target_name="x")
    assert config_of(tmp_path / "out")["transformer_layer_config"]["rope_parameters"] == rope


def test_the_files_are_what_the_layouts_ask_for(tmp_path: Path) -> None:
    head = head_for("sglang")
    for to in ("speculators", "sglang"):
        export_head(head, target("llava"), tmp_path / to, to, target_name="someone/some-target")
    weights, values = load_file(tmp_path / "speculators/model.safetensors"), config_of(tmp_path / "speculators")
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert (weights["lm_head.weight"].shape, weights["fc.weight"].shape) == ((KNOWN, 64), (64, 192))
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    ids = weights["d2t"] + torch.arange(KNOWN)
    assert torch.equal(weights["t2d"].nonzero()[:, 0], ids.sort().values)
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == "eagle3"
    assert (values["norm_before_residual"], values["norm_before_fc"]) == (False, False)
    assert values["eagle_aux_hidden_state_layer_ids"] == list(head.layers)
    assert values["speculators_config"]["verifier"]["name_or_path"] == "someone/some-target"
    weights, values = load_file(tmp_path / "sglang/model.safetensors"), config_of(tmp_path / "sglang")
    assert {"midlayer.hidden_norm.weight", "t2d", "d2t", "lm_head.weight", "norm.weight"} <= set(weights)
    assert "embed_tokens.weight" not in weights
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    left = values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [layer + 1 for layer in left] == list(head.layers)


@torch.no_grad()
def test_another_implementation_of_the_formulas_reads_the_files(tmp_path: Path) -> None:
    head = head_for("speculators")
    export_head(head, target("llava"), tmp_path / "out", "speculators", target_name="x")
    torch.manual_seed(0)
    states, words = torch.randn(7, 192), torch.randn(7, 64)
    plain = PlainEagle3(tmp_path / "out", "llava")
    out = plain.run(plain.fuse(states), words, torch.arange(7))
    causal = torch.ones(1, 7, 7, dtype=torch.bool).tril()
    ours = head(head.fuse(states)[None], words[None], Placement(torch.arange(7)[None], causal))
    torch.testing.assert_close(ours[0], out, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(head.logits(ours, torch.nn.Identity())[0], plain.logits(out), atol=2e-4, rtol=2e-4)


def test_a_card_names_no_folder_as_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/target").mkdir(parents=True)
    for name in ("runs/target", "someone/target"):
        out = Path(name.replace("/", "-"))
        export_head(head_for("speculators"), target("llava"), out, "speculators", target_name=name)
        assert (f"base_model: {name}" in (out / "README.md").read_text()) == (name == "someone/target")


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


REFUSED: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "dream": ("llava", "dream", {}, "speculators", "only eagle3 heads are written for vLLM and speculators"),
    "hivis": ("llava", "hivis", {}, "eagle", "EAGLE's code knows eagle2, eagle3 and msd heads alone"),
    "medusa": ("llava", "medusa", {}, "sglang", "only eagle3 heads are written for SGLang"),
    "norms of inputs": ("llava", "eagle2", {}, "eagle", "both inputs have norms"),
    "hidden pictures": ("llava", "eagle2", {"norms": "none", "text_only": True}, "eagle", "text_only, features and"),
    "residual": ("llava", "eagle3", {"residual": "normed"}, "sglang", "has residual 'normed', which SGLang"),
    "norms of queries": ("qwen3_vl", "eagle3", {}, "sglang", "its queries and keys have norms"),
    "biases": ("qwen2_5_vl", "eagle3", {}, "sglang", "biases, which SGLang would leave out"),
    "layers": ("llava", "eagle3", {}, "eagle", r"reads the layers \(0, 1, 2\), where EAGLE's code reads"),
    "scaled": ("gemma3", "eagle3", {}, "sglang", "norms, which SGLang would leave out|scales its embeddings"),
    "unknown": ("llava", "eagle3", {}, "gguf", "no layout 'gguf' to export to; choose one of speculators, eagle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_cannot_hold_a_head_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    name, kind, options, to, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as refusal:
        export_head(random_head(name, kind, **options), target(name), tmp_path / "out", to, target_name="x")
    assert str(refusal.value).endswith(".")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists and is not an empty folder; give a new one"):
        export_head(head_for("speculators"), target("llava"), tmp_path, "speculators", target_name="x")
    assert (tmp_path / "mine.txt").read_text() == "mine"


# --------------------------------------------------------------------------- what a folder is


@pytest.fixture
def model(tmp_path: Path) -> Path:
    target("llava").model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_head_of_ours_is_described_and_compared(model: Path, tmp_path: Path) -> None:
    save_head(random_head("llava", "hivis"), tmp_path / "head")
    alone = inspect_checkpoint(tmp_path / "head")
    assert (alone.holds, alone.layout, alone.kind, alone.fits) == ("head", "saccade", "hivis", None)
    assert alone.facts["hidden size"] == 64
    assert alone.facts["target class"] == "LlavaForConditionalGeneration"
    assert inspect_checkpoint(tmp_path / "head", model).fits
    edit(model, text_config={**config_of(model)["text_config"], "vocab_size": 200})
    other = inspect_checkpoint(tmp_path / "head", model)
    assert other.fits is False
    assert "its vocabulary is 192 but this target's is 200" in str(other.problem)
    (vocabulary,) = (check for check in other.checks if check.what == "vocabulary")
    assert (vocabulary.head, vocabulary.target, vocabulary.fits) == (192, 200, False)


def test_a_speculator_names_its_target_and_says_what_it_drafts(model: Path, tmp_path: Path) -> None:
    export_head(head_for("speculators"), target("llava"), tmp_path / "out", "speculators", target_name="a/b")
    found = inspect_checkpoint(tmp_path / "out", model)
    assert (found.layout, found.kind, found.facts["target"]) == ("speculators", "eagle3", "a/b")
    assert found.facts["drafts tokens"] == KNOWN
    assert found.fits
    edit(tmp_path / "out", norm_before_fc=True)
    broken = inspect_checkpoint(tmp_path / "out")
    assert broken.fits is False
    assert "lacks the weight input_norm.weight" in str(broken.problem)


def test_a_speculator_that_drafts_in_parallel_is_described_and_not_exported(model: Path, tmp_path: Path) -> None:
    found = inspect_checkpoint(release("peagle", tmp_path / "out"), model)
    assert (found.layout, found.kind, found.facts["reads layers"]) == ("speculators", "peagle", [0, 1, 2])
    assert found.facts["dtype"] == "float32"  # not of the table of tokens
    assert found.fits
    for to in ("speculators", "eagle"):
        assert "eagle3" in str(obstacle(random_head("llava", "peagle"), target("llava"), to))


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 8])
def test_a_head_of_a_shallow_target_is_described_and_fits(layers: int, tmp_path: Path) -> None:
    own = Target(FAMILIES["llama"].model(layers=layers))
    head = build_head(HeadConfig.from_target(own, "eagle3"))
    export_head(head, own, tmp_path / "out", "speculators", target_name="a/b")
    own.model.save_pretrained(tmp_path / "model")
    alone = inspect_checkpoint(tmp_path / "out")
    assert (alone.problem, alone.facts["reads layers"]) == (None, list(head.layers))
    assert inspect_checkpoint(tmp_path / "out", tmp_path / "model").fits


def test_positions_that_only_a_person_can_judge_are_marked(tmp_path: Path) -> None:
    head = randomised(random_head("qwen3_vl", "eagle3", own_vocabulary=KNOWN))
    export_head(head, target("qwen3_vl"), tmp_path / "out", "speculators", target_name="a/b")
    target("qwen3_vl").model.save_pretrained(tmp_path / "model")
    found = inspect_checkpoint(tmp_path / "out", tmp_path / "model")
    (positions,) = (check for check in found.checks if check.what == "positions")
    assert (positions.head, positions.target, positions.fits) == ("entries", "M-RoPE", None)
    assert found.fits


def test_a_model_and_an_empty_folder(model: Path, tmp_path: Path) -> None:
    found = inspect_checkpoint(model)
    assert (found.holds, found.layout, found.kind) == ("model", "transformers", "LlavaForConditionalGeneration")
    assert found.facts["reads images"] is True
    with pytest.raises(ModelError, match="holds no head, so it is not compared with a target"):
        inspect_checkpoint(model, model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds neither a head that is known nor a model"):
        inspect_checkpoint(tmp_path / "empty")


def test_heads_of_stacks_are_described_without_a_target(tmp_path: Path) -> None:
    weights: dict[str, Tensor] = {"0.0.linear.weight": torch.ones(8, 8), "0.0.linear.bias": torch.ones(8)}
    weights["0.1.weight"] = torch.ones(20, 8)
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    found = inspect_checkpoint(tmp_path)
    assert (found.layout, found.facts["hidden size"], found.facts["vocabulary"]) == ("Medusa", 8, 20)
    assert found.facts["reach"] == 1
