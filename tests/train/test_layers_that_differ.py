"""Targets whose layers differ in size (Gemma 4), or have several residual streams (Gemma 3n): heads learn and draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit import listed, target
from transformers import AutoModelForCausalLM, OPTConfig

from harness import assert_equals_generate
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.train import Stage, Trainer, read_recipe

BETWEEN = ("eagle3", "peagle", "dream", "kangaroo", "dspark", "dflash", "dflash2")
"""Kinds that read states between the target's layers."""
CASES = [
    *((name, kind) for name in ("gemma4", "gemma4_unified", "gemma4_text") for kind in HEAD_KINDS),
    *(("gemma3n", kind) for kind in HEAD_KINDS if kind not in BETWEEN),
]


def trainer(name: str, kind: str, out: Path) -> Trainer:
    steps: dict[str, Any] = {"stages": (Stage(10, 1e-2),), "batch_size": 4, "micro_batch": 4}
    recipe = replace(read_recipe(kind), **steps, log_every=1, validation_samples=2)
    return Trainer(target(name), recipe, listed(name, 12), out, say=lambda _: None)


@pytest.mark.singly
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_head_is_trained_and_drafts(name: str, kind: str, tmp_path: Path) -> None:
    outcome = trainer(name, kind, tmp_path).run()
    losses = [line["loss"] for line in map(json.loads, (tmp_path / "log.jsonl").open()) if "loss" in line]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    head = load_head(outcome.head, target(name))
    drafter = HeadDrafter(head, target(name), Chain(min(head.reach or 3, 3)))
    assert_equals_generate(Engine(target(name), drafter), name, n=12)


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_head_that_reads_one_of_several_streams_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has several residual streams"):
        trainer("gemma3n", kind, tmp_path).run()


def test_a_head_has_the_shape_of_the_first_layer_and_rotates_all_of_a_query() -> None:
    text = target("gemma4").text_config
    assert len({layer.head_dim for layer in text.per_layer_config}) > 1
    config = HeadConfig.from_target(target("gemma4"), "hivis")
    assert config.head_dim == text.per_layer_config[0].head_dim
    assert config.rope["rope_theta"] == text.rope_parameters["full_attention"]["rope_theta"]


def test_a_target_that_names_its_mlp_otherwise_gets_a_head_of_the_usual_width() -> None:
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2)
    made = HeadConfig.from_target(Target(AutoModelForCausalLM.from_config(config)), "hivis")
    assert (made.intermediate_size, made.head_dim) == (4 * 32, 16)
