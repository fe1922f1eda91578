"""Targets that multiply embeddings, or multiply or cap logits: heads learn and draft with the same numbers."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from families import FAMILIES, VOCAB
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import LogitMap, logit_map
from saccade.train.data import TrainingSample
from saccade.train.features import extract_features
from saccade.train.objectives.entries import entries_of, lm_head_of

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
}


@cache
def target(name: str, dtype: torch.dtype = torch.float32) -> Target:
    """``seeing``: the language model of ``granite`` after LLaVA's eyes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "seeing":
            config = FAMILIES["llava"].model().config
            text = AutoConfig.for_model("granite", **SIZES, **GRANITE)
            both = type(config).from_dict({**config.to_dict(), "text_config": text.to_dict()})
            return Target(AutoModelForImageTextToText.from_config(both))
        more: Any = {"granite": GRANITE, "cohere": {"logit_scale": 0.0625}}.get(name, {})
        config = AutoConfig.for_model(name, **SIZES, **more)
        return Target(AutoModelForCausalLM.from_config(config).to(dtype))


def drafter(name: str, kind: str, own: Target | None = None) -> HeadDrafter:
    own = own or target(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(HeadConfig.from_target(own, kind))
    return HeadDrafter(head, own, Chain(3))


def asked(name: str) -> Prompt:
    if name != "seeing":
        return Prompt((1, 20, 21, 22))
    return split(target(name).config, FAMILIES["llava"].row_inputs("image", 0))[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("granite", "hivis"),
        ("granite", "dream"),
        ("seeing", "hivis"),
        ("seeing", "eagle2"),
        ("seeing", "vispec"),
    ],
)
def test_a_head_learns_with_the_embeddings_that_it_drafts_with(name: str, kind: str) -> None:
    drafting, prompt = drafter(name, kind), asked(name)
    drafted: list[torch.Tensor] = []
    handle = drafting.head.register_forward_pre_hook(lambda module, args: drafted.append(args[1][0]))
    engine = Engine(target(name), drafting)
    (output,) = engine.generate([Request(prompt)], max_new_tokens=1)
    handle.remove()
    features = extract_features(target(name), [TrainingSample("0", prompt, tuple(output.tokens))], drafting.head.layers)
    supervised = entries_of(drafting.head, features).embeddings[0]
    torch.testing.assert_close(drafted[0], supervised[: len(drafted[0])].detach())
    assert len(drafted[0]) == len(supervised) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "factor", "cap"), [("granite", 1 / 8, math.inf), ("cohere", 0.0625, math.inf), ("gemma2", 1.0, 30.0)]
)
def test_a_model_s_map_is_measured(name: str, factor: float, cap: float, dtype: torch.dtype) -> None:
    found = logit_map(target(name, dtype))
    assert found.factor == pytest.approx(factor, rel=1e-3)
    assert found.cap == cap


@pytest.mark.parametrize("name", ["granite", "cohere", "seeing", "gemma2"])
def test_a_head_s_logits_are_those_of_the_target(name: str) -> None:
    """Of a state that the head guesses right, the logits are the target's own. (LLaVA around Granite leaves out its
    factor.)"""
    sample = TrainingSample("0", Prompt((1, 20, 21, 22)), (30, 31))
    own = target(name)
    if name == "gemma2":  # whose random logits are too small for its cap to bend them
        own = Target(copy.deepcopy(own.model))
        own.model.lm_head.weight.data *= 200
    (features,) = extract_features(own, [sample], ())
    logits = own.model(input_ids=features.ids[None]).logits
    states = features.states[len(own.layers)]
    torch.testing.assert_close(drafter(name, "hivis", own).logits(states[None]), logits)
    stacked = drafter(name, "medusa", own).logits(states[None])
    torch.testing.assert_close(stacked, logits)
    torch.testing.assert_close(lm_head_of(own)(states[None]), logits)  # the teacher's, in training


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3n"])  # which caps its logits at 30
def test_other_models_have_no_map(name: str) -> None:
    assert logit_map(Target(FAMILIES[name].model(), executor="stock")) == LogitMap()
