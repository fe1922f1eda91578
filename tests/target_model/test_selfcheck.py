"""Untested architectures are tried at load: sound ones pass, others are refused before they answer wrongly."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES
from families import _CLIP, FAMILIES, REFUSED, UNKNOWN, VIDEO, Piece, _text, _vision_language_model
from saccade.errors import ModelError
from saccade.hf import speculate
from saccade.loading import adapt
from saccade.target_model import adapter, cache, selfcheck, token_blocks
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import self_check
from saccade.target_model.traits import ordinary_ids

LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32}
SOUND: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("olmo2", "phi", "stablelm", "granite", "cohere", "opt", "gpt_neox", "nemotron")},
    # a window shorter than prompt and tree, so that it is checked too
    **{name: {"sliding_window": 4} for name in ("phi3", "starcoder2", "mixtral", "olmo3", "cohere2", "gpt_oss")},
    "gemma2": {"sliding_window": 4, "head_dim": 16, "attn_logit_softcapping": 5.0},
    "deepseek_v3": {**LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
}


def sharp(model: PreTrainedModel) -> PreTrainedModel:
    """Weights that make attention and logits differ clearly between right and wrong positions and masks."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            gain = 1.6 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query")) else 1.0
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter[0].numel()))
    nn.init.normal_(model.get_input_embeddings().weight)
    return model.eval()


def untested(model_type: str, **more: Any) -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **_text(2, **more))
    return Target(sharp(AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize("model_type", SOUND)
def test_a_sound_architecture_passes(model_type: str) -> None:
    untried = untested(model_type, **SOUND[model_type])
    assert not untried.traits.tested
    self_check(untried)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_a_low_precision_is_forgiven(dtype: torch.dtype) -> None:
    self_check(Target(untested("olmo2").model.to(dtype)))


@pytest.mark.parametrize("model_type", ["mamba", "recurrent_gemma"])
def test_recurrent_layers_without_a_tree_form_are_refused(model_type: str) -> None:
    # Early versions of transformers name RecurrentGemma's layers otherwise, and its forward is what fails.
    reason = "(it has layers of type (linear|recurrent)|its forward failed)"
    with pytest.raises(ModelError, match=f"{model_type}' cannot be verified on trees: {reason}"):
        self_check(untested(model_type))


def test_a_model_without_attention_heads_is_refused_in_one_sentence() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(ModelError, match="mamba' cannot be verified on trees"):
        adapt(AutoModelForCausalLM.from_config(config))


def test_models_without_known_decoder_layers_are_refused_before_any_check() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_head=2, n_layer=1)
    with pytest.raises(ModelError, match="has no decoder layers"):
        Target(AutoModelForCausalLM.from_config(config))


class Planted(LlamaForCausalLM):  # type: ignore[misc]
    """An architecture that is not known, with a window in its configuration where it is given one, but none in its
    attention."""

    config_class: Any = type("PlantedConfig", (LlamaConfig,), {"model_type": "planted"})


class CountsSlots(Planted):
    """Takes its positions from the cache, as models with learned or ALiBi positions do."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class IgnoresMasks(Planted):
    """Attends to whatever is in the cache."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Remembers(Planted):
    """A recurrent state outside the cache."""

    state: Any = 0.0

    def forward(self, *args: Any, use_cache: bool = True, **kwargs: Any) -> Any:
        out = super().forward(*args, use_cache=use_cache, **kwargs)
        if use_cache:
            out.logits = out.logits + self.state
            self.state = 0.1 * out.logits[:, -1:].detach()
        return out


class Fails(Planted):
    """Knows nothing of caches that are not its untried."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            raise TypeError("expected a cache of my own")
        return super().forward(*args, **kwargs)


class GivesNan(Planted):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * float("nan")
        return out


class MixesFarTokens(Planted):
    """Mixes tokens after a position in its configuration with their neighbours in the forward, related or not."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        out = super().forward(*args, position_ids=position_ids, **kwargs)
        if position_ids is not None:
            is_far = (position_ids >= self.config.original_max_position_embeddings)[..., None]
            out.logits = out.logits + is_far * out.logits.roll(1, 1)
        return out


class RoundsWholeTexts(Planted):
    """Computes whole texts less precisely than token by token, as chunked scans may."""

    def forward(self, *args: Any, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        out = super().forward(*args, past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        if not use_cache and past_key_values is None:
            out.logits = out.logits * 1.01
        return out


def planted(kind: type[Planted], **more: Any) -> Target:
    torch.manual_seed(0)
    return Target(sharp(kind(kind.config_class(**{**_text(2), **more}))))


@pytest.mark.parametrize("kind", [CountsSlots, IgnoresMasks, Remembers, GivesNan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_deviation_is_refused_with_its_size(kind: type, dtype: torch.dtype) -> None:
    untried = Target(planted(kind).model.to(dtype))
    with pytest.raises(ModelError, match=r"'planted' cannot be verified on trees: logits differ .* by up to [\dn]"):
        self_check(untried)


def test_a_forward_that_fails_is_refused_with_its_reason() -> None:
    with pytest.raises(ModelError, match=r"its forward failed \(TypeError: expected a cache of my own\)"):
        self_check(planted(Fails))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "llava_recurrent",
            "'llava' around 'recurrent_gemma' cannot be verified on trees: it has layers of type (lin|rec)",
        ),
        ("doge", "'doge' cannot be verified .* what it does with sequences longer than keep_window_size=12 is not"),
    ],
)
def test_a_text_backbone_that_cannot_be_verified_is_refused_inside_any_model(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        adapt(REFUSED[name].model())


def test_a_known_family_around_an_unknown_text_model_is_checked_and_taken_if_sound() -> None:
    build = _vision_language_model("llava", text={"model_type": "olmo2"}, vision=_CLIP)
    untried = Target(sharp(build(2)))
    assert not untried.traits.tested
    self_check(untried)


def shapes_of(untried: Target) -> list[tuple[int, ...]]:
    """Shapes of the ids of every forward of the check."""
    shapes: list[tuple[int, ...]] = []
    untried.model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    self_check(untried)
    return shapes


def test_the_check_takes_eight_forwards_and_more_on_both_sides_of_a_window() -> None:
    assert shapes_of(untested("olmo2")) == [(1, 6), (1, 6), (1, 1), (3, 6), *[(3, 1)] * 4]
    assert {6, 28, 32} <= {count for _, count in shapes_of(untested("starcoder2", sliding_window=30))}


@pytest.mark.parametrize("name", ["phi3", "olmo3", "gemma2"])
def test_a_window_too_long_for_a_prompt_is_checked_as_a_short_one(name: str) -> None:
    untried = untested(name, **{**SOUND[name], "sliding_window": 4096}, max_position_embeddings=8192)
    assert max(count for _, count in shapes_of(untried)) < 20
    assert untried.text_config.sliding_window == untried.traits.masks.window == 4096


@pytest.mark.parametrize("window", [4, 40, 4096])
def test_a_window_that_the_model_reads_otherwise_is_noticed_whatever_its_length(window: int) -> None:
    with pytest.raises(ModelError, match="logits differ"):
        self_check(planted(Planted, max_position_embeddings=8192, sliding_window=window))


def test_what_begins_behind_a_far_position_is_noticed() -> None:
    with pytest.raises(ModelError, match="logits differ"):
        self_check(planted(MixesFarTokens, original_max_position_embeddings=500))
    self_check(planted(MixesFarTokens, original_max_position_embeddings=5000))  # beyond its context: never reached


@pytest.mark.parametrize("name", [*(f"nemotron_h, {seed}" for seed in range(12)), "planted"])
def test_a_model_whose_whole_forward_differs_from_its_own_decoding_passes(name: str) -> None:
    """Answers must be those of plain decoding; Nemotron-H's two ways differ by more than the check allows."""
    family, _, seed = name.partition(", ")
    untried = planted(RoundsWholeTexts) if family == "planted" else Target(FAMILIES[family].model(int(seed)))
    object.__setattr__(untried.traits, "tested", False)
    self_check(untried)


def test_a_model_that_makes_no_cache_of_its_own_is_given_one() -> None:
    untried = Target(ARCHITECTURES["granite4_vision"].model())
    assert not untried.traits.tested
    self_check(untried)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_conformance_suite_counts_as_tested(name: str) -> None:
    assert Target(FAMILIES[name].model()).traits.tested


def test_a_position_dependent_scale_of_the_model_s_own_passes() -> None:
    untried = Target(FAMILIES["ministral3"].model())
    object.__setattr__(untried.traits, "tested", False)
    self_check(untried)


def test_positions_that_modules_derive_from_the_cache_follow_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 scales queries by the number of entries, among which are nodes of other branches."""
    model = ARCHITECTURES["llama4"].model()
    self_check(Target(model))
    monkeypatch.setattr(cache.RowCache, "get_seq_length", lambda self, layer_idx=0: self.get_query_offset())
    with pytest.raises(ModelError, match="logits differ"):
        self_check(Target(model))


def test_running_out_of_memory_is_not_blamed_on_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "forward", Mock(side_effect=torch.OutOfMemoryError("planted")))
    with pytest.raises(torch.OutOfMemoryError):
        self_check(untested("olmo2"))


@pytest.mark.parametrize("bug", ["siblings see each other", "no cache gather", "no sliding window"])
def test_a_bug_of_our_own_would_be_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "siblings see each other":
        triangle = torch.ones(1, 6, 6, dtype=torch.bool).tril()
        monkeypatch.setattr(selfcheck, "ancestors_of", lambda *_: triangle)
    elif bug == "no cache gather":
        monkeypatch.setattr(cache.RowCache, "_move", lambda *_: None)
    else:
        monkeypatch.setattr(token_blocks.MaskPlan, "_local", lambda *_: {"all": torch.tensor(True)})
    with pytest.raises(ModelError, match="logits differ"):
        self_check(untested("starcoder2", sliding_window=4))


def test_a_tested_family_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    untried = Target(FAMILIES["llama"].model())
    monkeypatch.setattr(untried.model, "forward", lambda **_: pytest.fail("a forward was run"))
    self_check(untried)


def test_the_check_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the global random numbers nor on the rope deltas that M-RoPE models keep."""
    untried = Target(FAMILIES["qwen2_5_vl"].model())
    untried.model.model.rope_deltas = before = torch.tensor([[7]])
    traits = untried.traits
    monkeypatch.setattr(adapter.ModelTraits, "tested", property(lambda _: False))
    assert not traits.tested
    state = torch.get_rng_state()
    self_check(untried)
    assert torch.equal(torch.get_rng_state(), state)
    assert untried.model.model.rope_deltas is before
    assert not untried.model.training
    assert all(p.grad is None for p in untried.model.parameters())


def test_ids_with_a_meaning_are_not_used() -> None:
    untried = Target(FAMILIES["qwen2_5_vl"].model())
    ids = ordinary_ids(untried.config, untried.vocab_size, 150)
    config = untried.config
    special = {config.image_token_id, config.video_token_id, config.vision_start_token_id, 0, 1}
    assert len(set(ids)) == 150
    assert special.isdisjoint(ids)


@pytest.mark.parametrize("kind", ["text", "image", "images2", "video", "image and video"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_pictures_and_videos_are_read_as_generate_reads_them(name: str, kind: str) -> None:
    case = UNKNOWN[name]
    if kind == "image and video":
        assert case.image
        assert case.video
        generator = torch.Generator().manual_seed(3)
        words = Piece((9, 40, 71), {})
        inputs = case._assemble([[words, case.image(generator, 0), words, case.video(generator, 1), words]])
        assert (inputs["input_ids"] == VIDEO).any()
    else:
        inputs = case.inputs(kind)
    model = case.model()
    theirs = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    speculation = speculate(case.draft_model(), gamma=3)
    ours = case.model().generate(**inputs, max_new_tokens=20, do_sample=False, custom_generate=speculation)
    assert ours.tolist() == theirs.tolist()
