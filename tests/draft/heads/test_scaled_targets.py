"""Targets that multiply their embeddings or their logits: heads learn and draft with the same numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from families import FAMILIES, VOCAB
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head, logits_scale
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.static import Chain
from saccade.engine import Engine, Request
from saccade.inputs.batching import split
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.train.features import read_features
from saccade.train.objectives.entries import entries_of, lm_head_of
from saccade.train.samples import Sample

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
    """``seeing``: the language model of ``granite`` behind LLaVA's eyes."""
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


def drafter(name: str, kind: str) -> HeadDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(HeadConfig.from_target(target(name), kind))
    return HeadDrafter(head, target(name), Chain(3))


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
    features = read_features(target(name), [Sample("0", prompt, tuple(output.tokens))], drafting.head.layers)
    supervised = entries_of(drafting.head, features).embeddings[0]
    torch.testing.assert_close(drafted[0], supervised[: len(drafted[0])].detach())
    assert len(drafted[0]) == len(supervised) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "scale"), [("granite", 1 / 8), ("cohere", 0.0625)])
def test_a_model_s_factor_is_measured(name: str, scale: float, dtype: torch.dtype) -> None:
    assert logits_scale(target(name, dtype)) == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("name", ["granite", "cohere", "seeing"])
def test_a_head_s_logits_are_on_the_scale_of_the_target_s(name: str) -> None:
    """Of a state that the head guesses right, the logits are the target's own. (LLaVA around Granite leaves out its
    factor.)"""
    sample = Sample("0", Prompt((1, 20, 21, 22)), (30, 31))
    (features,) = read_features(target(name), [sample], ())
    logits = target(name).model(input_ids=features.ids[None]).logits
    states = features.states[len(target(name).layers)]
    torch.testing.assert_close(drafter(name, "hivis").logits(states[None]), logits)
    stacked = drafter(name, "medusa").logits(states[None])
    torch.testing.assert_close(stacked, logits)
    torch.testing.assert_close(lm_head_of(target(name))(states[None]), logits)  # the teacher's, in training


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2"])
def test_other_models_have_no_factor_at_all(name: str) -> None:
    """Soft caps included, which bend logits."""
    own = target(name) if name == "gemma2" else Target(FAMILIES[name].model())
    assert logits_scale(own) == 1.0
