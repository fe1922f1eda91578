"""Two processes learn what one does, also with half of the target each, and resume where another number stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_draft_vlm_training import checkpoint
from test_draft_vlm_training import recipe as draft_recipe
from test_draft_vlm_training import source as draft_source
from test_draft_vlm_training import trainer as draft_trainer
from test_draft_vlm_training import vlm as draft_vlm
from train_kit import assert_close, listed, samples, target
from training_run import closeness

from families import FAMILIES
from over_processes import as_rank, free_port, run_split
from processes import forked
from saccade.environment import fingerprint
from saccade.errors import ModelError, TrainingError
from saccade.loading import load_model
from saccade.target_model.adapter import Target
from saccade.target_model.sharding import check_sharding, held, sharded
from saccade.train import Recipe, Stage, Trainer, read_recipe
from saccade.train.checkpoint import identity
from saccade.train.feature_cache import FeatureCache
from saccade.train.features import extract_features
from saccade.train.learner import EngineMeasure
from saccade.train.processes import Processes

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


def quick(kind: str = "eagle2", **settings: Any) -> Recipe:
    """Five samples a step, of which the processes have three and two, of different lengths; sums in float32."""
    sizes = {"batch_size": 5, "micro_batch": 2, "log_every": 1, "validation_samples": 2, "validate_every": 3}
    sizes |= {"checkpoint_every": 2, "stage1.steps": 6, "stage1.warmup": 2, "stage1.rate": 3e-3, "precision": "fp32"}
    return read_recipe(kind).with_settings({**sizes, **settings})


def train_head(out: Path, chosen: Recipe, own: Target | None = None, **options: Any) -> dict[str, Any]:
    given = {"measure": closeness, "say": lambda _: None, **options}
    Trainer(own or target("llava"), chosen, listed("llava", 24), out, **given).run()
    return {}


def train_draft(out: Path, chosen: Recipe, **options: Any) -> dict[str, Any]:
    draft_trainer("llava", out, chosen, **options).run()
    return {}


def draft(**settings: Any) -> Recipe:
    sizes = {"batch_size": 5, "stage1.steps": 3, "stage2.steps": 4, "checkpoint_every": 2, "loss.kl": 0.5}
    return draft_recipe(**{**sizes, "precision": "fp32", **settings})


Train = Callable[..., dict[str, Any]]
RUNS: dict[str, tuple[Train, Recipe]] = {"head": (train_head, quick()), "draft": (train_draft, draft())}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").open()]


def weights(out: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(out / kind / "model.safetensors")


def assert_same_curve(one: Path, other: Path, kind: str) -> None:
    """The same examples in every step, losses and gradients up to the order of sums, and the weights they lead to."""
    for a, b in zip(lines(one), lines(other), strict=True):
        assert (a.keys(), a["step"], a.get("examples")) == (b.keys(), b["step"], b.get("examples"))
        for key in ("loss", "gradient", "block_efficiency"):
            assert key not in a or a[key] == pytest.approx(b[key], rel=1e-4)
    assert_close(one, other, kind)


def assert_same_bits(one: Path, other: Path, kind: str) -> None:
    first, second = weights(one, kind), weights(other, kind)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    plain = [[{k: v for k, v in line.items() if k != "seconds"} for line in lines(out)] for out in (one, other)]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("kind", ["head", pytest.param("draft", marks=pytest.mark.slow)])
def test_two_processes_have_the_loss_curve_of_one_and_the_first_alone_writes(kind: str, tmp_path: Path) -> None:
    train, chosen = RUNS[kind]
    train(tmp_path / "one", chosen)

    def work(rank: int) -> dict[str, int]:
        train(tmp_path / f"rank-{rank}", chosen)
        return {"count": Processes().count}

    assert run_split(tmp_path, work) == [{"count": 2}] * 2
    assert_same_curve(tmp_path / "one", tmp_path / "rank-0", kind)
    assert not (tmp_path / "rank-1").exists()


def test_gradients_averaged_over_processes_of_unequal_examples_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistake: the mean of every process's own mean, as DistributedDataParallel has it."""
    own: list[int] = []
    plain, backward = Processes.sum_gradients, Trainer._backward

    def counted(self: Trainer, *given: Any) -> Any:
        tally = backward(self, *given)
        own.append(int(tally.kept.sum()))
        return tally

    def averaged(self: Processes, parameters: Any) -> None:
        mine, own[:] = sum(own), []
        together = int(self.sum(torch.tensor(mine)))
        for weight in parameters:
            weight.grad = weight.grad / mine * together / self.count
        plain(self, parameters)

    train_head(tmp_path / "one", quick())
    monkeypatch.setattr(Trainer, "_backward", counted)
    monkeypatch.setattr(Processes, "sum_gradients", averaged)
    run_split(tmp_path, lambda rank: train_head(tmp_path / "two", quick()))
    with pytest.raises(AssertionError):
        assert_same_curve(tmp_path / "one", tmp_path / "two", "head")


def killed_after(step: int) -> Callable[[str], None]:
    """Takes lines of progress, and kills its process at a step's."""

    def say(words: str) -> None:
        if words.startswith(f"step {step} of"):
            os.kill(os.getpid(), signal.SIGKILL)

    return say


def cut(train: Train, chosen: Recipe, out: Path, count: int) -> None:
    """A run of one or two processes that is killed in its fifth step, after the checkpoint of the fourth."""
    port = free_port()

    def work(rank: int) -> dict[str, Any]:
        return train(out, chosen, say=killed_after(5))

    works = [lambda: work(0)]
    if count == 2:
        works = [lambda rank=rank: as_rank(rank, port, out.parent, work) for rank in range(2)]  # type: ignore[misc]
    processes = [forked(each) for each in works]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 1][:count]
    assert [p.name for p in sorted((out / "checkpoints").iterdir())][-1] == "step-00000004"


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("head", 2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("head", 2, 2), ("draft", 1, 2)
    ])],
)  # fmt: skip
def test_a_killed_run_goes_on_with_any_number_of_processes(kind: str, before: int, after: int, tmp_path: Path) -> None:
    train, chosen = RUNS[kind]
    cut(train, chosen, tmp_path / "cut", before)
    if after == 1:
        train(tmp_path / "cut", chosen, resume=True)
    else:
        run_split(tmp_path, lambda rank: train(tmp_path / "cut", chosen, resume=True))
    train(tmp_path / "one", chosen)
    assert_same_curve(tmp_path / "one", tmp_path / "cut", kind)
    if before == after:
        run_split(tmp_path, lambda rank: train(tmp_path / "two", chosen))
        assert_same_bits(tmp_path / "two", tmp_path / "cut", kind)


def test_a_batch_smaller_than_the_number_of_processes_is_refused(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, str]:
        with pytest.raises(TrainingError) as refused:
            train_head(tmp_path / "run", quick(batch_size=1))
        return {"said": str(refused.value)}

    first, second = run_split(tmp_path, work)
    assert first == second
    assert first["said"].startswith("A batch has 1 samples, fewer than the 2 processes; start fewer")


def features(first: int, count: int) -> list[Any]:
    return extract_features(target("llava"), samples("llava", first + count)[first:], ())


def test_processes_find_what_the_others_have_cached_on_disk(tmp_path: Path) -> None:
    one, other = (FeatureCache(target("llava"), 1e9, tmp_path, "same") for _ in range(2))
    read = features(0, 3)
    one.put(0, read[0])
    one.flush()
    held = other.get(0)
    assert held is not None
    assert torch.equal(held.states[max(held.states)], read[0].states[max(read[0].states)])
    other.put(1, read[1])
    other.put(0, read[0])  # known by now
    other.flush()
    assert one.get(1) is not None
    assert one.get(2) is None
    assert one.samples == other.samples == 2
    again = FeatureCache(target("llava"), 1e9, tmp_path, "same")  # also after the number of processes has changed
    assert again.samples == 2
    assert again.bytes > one.bytes / 2


def test_what_another_process_removed_is_computed_and_cached_again(tmp_path: Path) -> None:
    said: list[str] = []
    cache = FeatureCache(target("llava"), 1e9, tmp_path / "features", "same", say=said.append)
    read = features(0, 2)
    cache.put(0, read[0])
    cache.flush()
    shutil.rmtree(tmp_path / "features")
    assert cache.get(0) is None
    assert "damaged or gone" in said[0]
    assert cache.get(1) is None
    cache.put(0, read[0])
    cache.flush()
    assert FeatureCache(target("llava"), 1e9, tmp_path / "features", "same").samples == 1


def test_only_caches_of_another_fingerprint_are_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    cache = FeatureCache(target("llava"), 1e9, tmp_path, "one")
    cache.put(0, features(0, 1)[0])
    cache.flush()
    assert FeatureCache(target("llava"), 1e9, tmp_path, "two").samples == 0
    assert len(list(tmp_path.iterdir())) == 2
    assert FeatureCache(target("llava"), 1e9, tmp_path, "one").samples == 0


def sharded_target(name: str) -> Target:
    return Target(sharded(lambda: FAMILIES[name].model()))


def digests(own: Target, name: str, rows: Sequence[int]) -> dict[str, str]:
    """Of every layer's states of some samples, to the last bit."""
    states_by_layer = {}
    for row in rows:
        [features] = extract_features(own, samples(name, 4)[row : row + 1], range(len(own.layers)))
        for layer, states in features.states.items():
            states_by_layer[f"{row} {layer}"] = hashlib.sha256(states.numpy().tobytes()).hexdigest()
    return states_by_layer


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
        states_by_layer = digests(own, name, (0, 1, 2) if rank == 0 else (3,))
        own.shards.attend()
        return {"states": states_by_layer, "identity": identity(own), "bytes": own.entry_bytes}

    first, second = run_split(tmp_path, work)
    assert first["states"] | second["states"] == digests(target(name), name, range(4))
    assert first["identity"] == second["identity"] == identity(target(name))
    assert first["bytes"] == target(name).entry_bytes


def test_a_checkpoint_is_loaded_sharded_with_the_parts_of_a_process_alone(tmp_path: Path) -> None:
    FAMILIES["llava"].model().save_pretrained(tmp_path / "llava")

    def work(rank: int) -> dict[str, Any]:
        own = Target(load_model(tmp_path / "llava", device_map="fsdp"))
        [features] = extract_features(own, samples("llava", 1), ())
        return {
            "sum": float(features.states[len(own.layers)].double().sum()),
            "trained": own.model.lm_head.weight.requires_grad,
        }

    whole = target("llava")
    [features] = extract_features(whole, samples("llava", 1), ())
    expected = {"sum": float(features.states[len(whole.layers)].double().sum()), "trained": False}
    assert run_split(tmp_path, work) == [expected] * 2


def small(kind: str, **settings: Any) -> Recipe:
    sizes = {"validate_every": 2, "checkpoint_every": 100, "stage1.steps": 3, "stage1.warmup": 0}
    return quick(kind, **{**sizes, **settings})


KINDS = {"eagle2": {"stage1.draft_steps": 2}, "dream": {"loss.layer": "entropy"}, "kangaroo": {}}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] if k != "eagle2" else []) for k in KINDS])
def test_training_by_a_sharded_target_is_training_by_the_whole_one(kind: str, tmp_path: Path) -> None:
    """Five samples a step: the processes have three and two, of different lengths, with pictures and without."""
    chosen = small(kind, **KINDS[kind], feature_cache="memory")

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
    assert_same_curve(tmp_path / "one", tmp_path / "two", "head")
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
    assert_same_curve(tmp_path / "one", tmp_path / "two", "draft")


@pytest.mark.parametrize("kind", ["head", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("draft", "fsdp"))])
def test_a_ruined_run_stops_in_every_process_and_names_the_last_checkpoint_in_order(kind: str, tmp_path: Path) -> None:
    train, chosen = RUNS["draft" if kind == "draft" else "head"]
    stages = (Stage(2, 1e-3), Stage(6, 1e20))
    chosen = replace(chosen, stages=stages, checkpoint_every=1, validate_every=0, clip=0.0)

    def work(rank: int) -> dict[str, str]:
        own = sharded_target("llava") if kind == "fsdp" else None
        with pytest.raises(TrainingError, match=r"not finite|The (loss|gradient) is (nan|-?inf)") as failed:
            train(tmp_path / "run", chosen, **({} if own is None else {"own": own}))
        return {"said": str(failed.value)}

    first, second = run_split(tmp_path, work)
    assert first == second
    assert f"--from {tmp_path}/run/checkpoints/step-00000002" in first["said"]
    assert not {"head", "draft"} & {path.name for path in (tmp_path / "run").iterdir()}


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
