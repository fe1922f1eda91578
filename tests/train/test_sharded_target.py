"""A target whose layers are divided among two processes teaches what the whole one does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_vlm_training import checkpoint
from test_draft_vlm_training import recipe as draft_recipe
from test_draft_vlm_training import source as draft_source
from test_draft_vlm_training import vlm as draft_vlm
from train_kit import assert_close, listed, samples, target

from families import FAMILIES
from over_processes import run_split
from saccade.environment import fingerprint
from saccade.errors import ModelError
from saccade.loading import load_model
from saccade.target_model.adapter import Target
from saccade.target_model.sharding import Shards, check_sharding, held, sharded
from saccade.train import Recipe, Trainer, read_recipe
from saccade.train.checkpoint import identity
from saccade.train.features import read_features
from saccade.train.validate import EngineMeasure

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


def sharded_target(name: str) -> Target:
    return Target(sharded(lambda: FAMILIES[name].model()))


def digests(own: Target, name: str, rows: Sequence[int]) -> dict[str, str]:
    """Of every layer's states of some samples, to the last bit."""
    found = {}
    for row in rows:
        [features] = read_features(own, samples(name, 4)[row : row + 1], range(len(own.layers)))
        for layer, states in features.states.items():
            found[f"{row} {layer}"] = hashlib.sha256(states.numpy().tobytes()).hexdigest()
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n != "llava" else []) for n in ("llava", "qwen2_5_vl", "gemma3")],
)
def test_a_sharded_target_gives_the_states_of_the_whole_one_also_where_one_process_reads_more(
    name: str, tmp_path: Path
) -> None:
    def work(rank: int) -> dict[str, Any]:
        own = sharded_target(name)
        assert own.shards is not None
        assert not own.is_lean
        for layer in own.layers:
            for weight in layer.parameters():
                assert 2 * held(weight).numel() == weight.numel()
        found = digests(own, name, (0, 1, 2) if rank == 0 else (3,))
        own.shards.attend()
        return {"states": found, "identity": identity(own), "bytes": own.entry_bytes}

    first, second = run_split(tmp_path, work)
    assert first["states"] | second["states"] == digests(target(name), name, range(4))
    assert first["identity"] == second["identity"] == identity(target(name))
    assert first["bytes"] == target(name).entry_bytes


def test_a_checkpoint_is_loaded_sharded_with_the_parts_of_a_process_alone(tmp_path: Path) -> None:
    FAMILIES["llava"].model().save_pretrained(tmp_path / "llava")

    def work(rank: int) -> dict[str, Any]:
        own = Target(load_model(tmp_path / "llava", device_map="fsdp"))
        [features] = read_features(own, samples("llava", 1), ())
        return {
            "sum": float(features.states[len(own.layers)].double().sum()),
            "trained": own.model.lm_head.weight.requires_grad,
        }

    first, second = run_split(tmp_path, work)
    [features] = read_features(target("llava"), samples("llava", 1), ())
    assert (
        first == second == {"sum": float(features.states[len(target("llava").layers)].double().sum()), "trained": False}
    )


def small(kind: str, **settings: Any) -> Recipe:
    sizes = {"batch_size": 5, "micro_batch": 2, "log_every": 1, "validation_samples": 2, "validate_every": 2}
    sizes |= {"stage1.steps": 3, "stage1.warmup": 0, "stage1.rate": 3e-3, "precision": "fp32"}
    return read_recipe(kind).with_settings({**sizes, **settings})


def assert_same_run(one: Path, other: Path, kind: str = "head") -> None:
    assert_close(one, other, kind)
    for a, b in zip(lines(one), lines(other), strict=True):
        assert a.keys() == b.keys()
        for key in ("loss", "block_efficiency"):
            assert key not in a or a[key] == pytest.approx(b[key], rel=1e-5)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").open()]


KINDS = {
    "eagle2": {"stage1.draft_steps": 2},
    "dream": {"loss.layer": "entropy"},
    "kangaroo": {},
}


def test_a_process_that_does_not_join_in_the_others_gathering_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistake: of five samples one process has two micro batches, the other one."""
    monkeypatch.setattr(Shards, "attend", lambda self: None)
    chosen = small("eagle2", validation_samples=0)

    def work(rank: int) -> dict[str, Any]:
        Trainer(sharded_target("llava"), chosen, listed("llava", 24), tmp_path / "run", say=lambda _: None).run()
        return {}

    with pytest.raises(AssertionError):
        run_split(tmp_path, work, seconds=8)


@pytest.mark.parametrize("cache", ["memory", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] if k != "eagle2" else []) for k in KINDS])
def test_training_by_a_sharded_target_is_training_by_the_whole_one(kind: str, cache: str, tmp_path: Path) -> None:
    """Five samples a step: the processes have three and two, of different lengths, with pictures and without."""
    chosen = small(kind, **KINDS[kind], feature_cache=cache)

    def train(own: Target, out: Path) -> None:
        measure = EngineMeasure(own, [s.prompt for s in samples("llava", 2)], max_new_tokens=6)
        Trainer(own, chosen, listed("llava", 24), out, measure=measure, say=lambda _: None).run()

    def work(rank: int) -> dict[str, Any]:
        own = sharded_target("llava")
        assert fingerprint(own.model) == fingerprint(target("llava").model)
        train(own, tmp_path / "two")
        return {}

    run_split(tmp_path, work)
    train(target("llava"), tmp_path / "one")
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two" / "best" / "validation.json").exists()


@pytest.mark.slow
def test_a_draft_vlm_learns_from_a_sharded_teacher(tmp_path: Path) -> None:
    """Its teacher runs within the loss, in micro batches of unequal numbers."""
    sizes = {"batch_size": 5, "stage1.steps": 2, "stage2.steps": 2, "loss.kl": 0.5, "validation_samples": 0}
    sizes["precision"] = "fp32"

    def train(own: Target, out: Path) -> None:
        chosen, processor = draft_recipe(**sizes), draft_vlm("llava").processor
        Trainer(own, chosen, draft_source("llava"), out, processor=processor, say=lambda _: None).run()

    def work(rank: int) -> dict[str, Any]:
        train(Target(load_model(checkpoint("llava"), device_map="fsdp")), tmp_path / "two")
        return {}

    run_split(tmp_path, work)
    train(draft_vlm("llava").target, tmp_path / "one")
    assert_same_run(tmp_path / "one", tmp_path / "two", "draft")


def test_a_single_process_is_told_to_use_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ModelError, match="torchrun --nproc-per-node 2 --no-python saccade train"):
        check_sharding(FAMILIES["llama"].model().config)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised"),
        ({"cross_attention_layers": [1]}, "skips layers"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_weights_are_read(
    setting: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = deepcopy(FAMILIES["llama"].model().config)
    config.update(setting)
    with pytest.raises(ModelError, match=words):
        check_sharding(config)
