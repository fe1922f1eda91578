"""EAGLE-3 heads in speculators' layout, and those with M-RoPE positions, draft as their files say, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_kit import POLICIES, Text, kind_of_prompt, prompts, random_head, recorded, target
from plain_eagle3 import PlainEagle3, speculator
from published_kit import KNOWN, drop, edit, randomised, released, reweigh, same

from families import FAMILIES, pristine, reset_rope_deltas
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.errors import ModelError

FORMS: dict[str, tuple[dict[str, str], dict[str, bool]]] = {
    "plain": ({}, {}),
    "norm_before_residual": ({"residual": "normed"}, {"norm_before_residual": True}),
    "norm_before_fc": ({"state_norms": "joint"}, {"norm_before_fc": True}),
    "fc_norm": ({"state_norms": "each"}, {"fc_norm": True}),
    "norm_output": ({"feeds": "normed"}, {"norm_output": True}),
    "all": (
        {"residual": "normed", "state_norms": "each", "feeds": "normed"},
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
}
"""Name -> our options and settings of config.json."""


def original(name: str, **options: Any) -> Eagle3:
    head = random_head(name, "eagle3", own_vocabulary=KNOWN, **options)
    assert isinstance(head, Eagle3)
    return randomised(head)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])  # a llama's block and one with norms of queries and keys
def test_answers_and_drafts(name: str, form: str, tmp_path: Path) -> None:
    options, settings = FORMS[form]
    ours = original(name, **options)
    head = load_head(speculator(ours, tmp_path, **settings), target(name))
    same(ours, head)
    check_drafts(name, head, PlainEagle3(tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])  # sections side by side, and interleaved
def test_positions_are_the_target_s_where_the_file_has_sections(name: str, tmp_path: Path) -> None:
    released(original(name), tmp_path, target(name))
    rope = target(name).text_config.rope_parameters
    sections = {k: v for k, v in rope.items() if k.startswith("mrope")}
    edit(tmp_path, rope_scaling={"type": "mrope", **sections})
    if FAMILIES[name].model().config.text_config.model_type.startswith("qwen3"):
        qk_norms = {
            f"midlayer.self_attn.{p}_norm.weight": original(name).state_dict()[f"self_attn.{p}_norm.weight"]
            for p in "qk"
        }
        reweigh(tmp_path, lambda w: w.update(qk_norms))
    head = load_head(tmp_path, target(name))
    assert head.config.options["positions"] == "target"
    check_drafts(name, head, PlainEagle3(tmp_path), mrope=True)
    save_head(head, tmp_path / "ours")
    same(head, load_head(tmp_path / "ours", target(name)))


def check_drafts(name: str, head: Any, plain: PlainEagle3, mrope: bool = False) -> None:
    """Answers are the target's; drafts are the formulas', of a whole prompt, and of a guess behind it."""
    family, kind = FAMILIES[name], kind_of_prompt(name)
    asked = prompts(family, family.inputs(kind, rows=2))
    outputs, steps = recorded(name, head, POLICIES["dynamic"], asked, n=12)
    assert [o.tokens for o in outputs] == family.reference(kind, rows=2, n=12)
    embed = target(name).model.get_input_embeddings()
    for row in range(2):
        inputs, step = family.row_inputs(kind, row), steps[1]
        text = Text.of(name, inputs, step.emitted[row])
        count = len(text.ids) - 1
        positions = positions_of(name, inputs, count + 1) if mrope else torch.arange(count + 1)
        if mrope:
            assert (positions != torch.arange(count + 1)).any(), "the picture must change positions"
        features = plain.fuse(torch.cat([text.streams[layer] for layer in head.layers], -1)[:-1])
        out = plain.run(features, text.embeddings[1:], positions[..., :-1])
        nodes = dict(step.nodes(row))
        torch.testing.assert_close(nodes[()], plain.logits(out[-1:])[0], atol=1e-3, rtol=1e-3)
        (token,) = path = next(path for path in nodes if len(path) == 1)
        words = torch.cat([text.embeddings[1:], embed(torch.tensor([token]))])
        out = plain.run(torch.cat([features, out[-1:]]), words, positions)
        torch.testing.assert_close(nodes[path], plain.logits(out[-1:])[0], atol=1e-3, rtol=1e-3)


def positions_of(name: str, inputs: dict[str, Any], count: int) -> torch.Tensor:
    """``[3, count]`` by the stock model, of the prompt and text behind it."""
    model = pristine(name)
    reset_rope_deltas(model)
    wanted = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    given = {key: inputs[key] for key in wanted if inputs.get(key) is not None}
    ids = inputs["input_ids"]
    positions, delta = model.model.get_rope_index(ids, attention_mask=torch.ones_like(ids), **given)
    reset_rope_deltas(model)
    behind = torch.arange(ids.shape[1], count) + delta.flatten()[0]
    return torch.cat([positions[:, 0], behind.expand(3, -1)], 1)[:, :count]


@torch.no_grad()
def test_positions_that_ignore_the_picture_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released(original("qwen2_5_vl"), tmp_path, target("qwen2_5_vl"))
    edit(tmp_path, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    head = load_head(tmp_path, target("qwen2_5_vl"))
    monkeypatch.setattr(Eagle3, "has_target_positions", property(lambda self: False))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_drafts("qwen2_5_vl", head, PlainEagle3(tmp_path), mrope=True)


def test_sections_mean_nothing_for_a_target_without_them(tmp_path: Path) -> None:
    released(original("llava"), tmp_path, target("llava"))
    edit(tmp_path, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    same(original("llava"), load_head(tmp_path, target("llava")))


def test_what_is_released_with_sglang_s_settings(tmp_path: Path) -> None:
    """SpecForge writes norm_output for logits behind the norm, and fc_norm for norms of every state."""
    head = original("llava", state_norms="each")
    released(original("llava"), tmp_path, target("llava"))
    norms = {f"fc_norm.{i}.weight": head.state_dict()[f"state_norms.{i}.weight"] for i in range(3)}
    edit(tmp_path, norm_output=True, fc_norm=True)
    reweigh(tmp_path, lambda w: w.update(norms))
    assert load_head(tmp_path, target("llava")).config.options == head.config.options
    edit(tmp_path, norm_before_residual=True)
    assert load_head(tmp_path, target("llava")).config.options["residual"] == "normed"


# --------------------------------------------------------------------------- what is refused


def nested(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    edit(folder, transformer_layer_config=values["transformer_layer_config"] | changes)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "residual unsaid": (
        lambda d: drop(d, "norm_before_residual"),
        "does not say norm_before_residual .* for which speculators and vLLM assume different values",
    ),
    "block's type": (lambda d: nested(d, model_type="gpt_oss"), "of the model type 'gpt_oss'; expected llama or qwen3"),
    "no block": (lambda d: drop(d, "transformer_layer_config"), "of the model type None"),
    "own embedding": (lambda d: edit(d, embed_requires_grad=True), "has embed_requires_grad True"),
    "window": (
        lambda d: nested(d, layer_types=["sliding_attention"]),
        "has attention in a sliding window, which is not supported",
    ),
    "two layers": (lambda d: nested(d, num_hidden_layers=2), "has num_hidden_layers 2, .*; expected 1"),
    "vocabulary": (lambda d: nested(d, vocab_size=191), "vocabulary is 191 but this target's is 192"),
    "norm missing": (lambda d: edit(d, norm_before_fc=True), "lacks the weight input_norm.weight"),
    "other width": (lambda d: edit(d, target_hidden_size=96), "hidden size is 96 but this target's is 64"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_known_is_refused(damage: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[damage]
    speculator(original("llava"), tmp_path)
    assert kind_in(tmp_path) == kind_at(tmp_path) == "eagle3"
    harm(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target("llava"))


@pytest.mark.parametrize("algorithm", ["eagle", "dflash", "mtp", "peagle"])
def test_other_speculators_are_named(algorithm: str, tmp_path: Path) -> None:
    speculator(original("llava"), tmp_path, speculators_model_type=algorithm)
    for read in (kind_in, kind_at, lambda folder: load_head(folder, target("llava"))):
        with pytest.raises(ModelError, match=f"Speculators of the type '{algorithm}' are not supported; .* eagle3 is"):
            read(tmp_path)
