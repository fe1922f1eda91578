"""A target split over two processes gives the tokens of one process, and all processes give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ready
from families import FAMILIES
from over_processes import COUNT, NAMES, answers, run_split, split_target
from saccade import VLM, load
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.sharding import Ranks, check_split

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    for name in (*NAMES, "llama"):
        FAMILIES[name].model().save_pretrained(folder / name)
    return folder


def whole(name: str, **options: Any) -> dict[str, Any]:
    return dict(answers(name, Target(FAMILIES[name].model()), **options))


def assert_as_one(found: list[dict[str, Any]]) -> None:
    expected = whole("llava", only=("chain",))
    assert found == [expected] * COUNT


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "llava" else []) for n in NAMES])
def test_two_processes_give_the_tokens_of_one(name: str, checkpoints: Path, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        target = split_target(checkpoints / name)
        weight = target.layers[0].self_attn.q_proj.weight
        assert weight.to_local().shape[0] * COUNT == weight.shape[0]
        assert target.ranks is not None
        assert target.ranks.rank == rank
        assert not target.is_lean
        return dict(answers(name, target))

    first, second = run_split(tmp_path, work)
    assert first == second == whole(name)
    assert len(first) == 6


def test_the_comparison_notices_processes_that_decide_for_themselves(checkpoints: Path, tmp_path: Path) -> None:
    """The planted mistake: other seeds, and nobody hands out trees, verdicts and seeds."""

    def work(rank: int) -> dict[str, Any]:
        Ranks.tree = lambda self, tree: tree  # type: ignore[method-assign]
        Ranks.tensors = lambda self, numbers, parts: (numbers, parts)  # type: ignore[method-assign, assignment, return-value]
        Ranks.numbers = lambda self, values: list(values)  # type: ignore[method-assign]
        return dict(answers("llava", split_target(checkpoints / "llava"), seed=100 * rank, only=("chain",)))

    with pytest.raises(AssertionError):
        assert_as_one(run_split(tmp_path, work, seconds=20))


def test_what_rank_0_hands_out_may_have_another_shape(checkpoints: Path, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        ranks = split_target(checkpoints / "llama").ranks
        assert ranks is not None
        own = [torch.arange(3 + rank), torch.ones(1 + rank, 2, dtype=torch.bool)]
        numbers, parts = ranks.tensors([rank, 5 + rank], own)
        return {"numbers": numbers, "parts": [p.tolist() for p in parts], "kinds": [str(p.dtype) for p in parts]}

    first, second = run_split(tmp_path, work)
    expected = {"numbers": [0, 5], "parts": [[0, 1, 2], [[True, True]]], "kinds": ["torch.int64", "torch.bool"]}
    assert first == second == expected


def test_a_single_process_is_told_to_use_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ModelError, match="torchrun --nproc-per-node"):
        check_split(FAMILIES["llama"].model().config)


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("llama", 3, "4 attention heads, which 3 processes"),
        ("llama", 4, "2 key-value heads"),
        ("qwen3_vl", 2, "no plan"),
    ],
)
def test_what_cannot_be_split_is_refused_before_weights_are_read(
    name: str, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(ModelError, match=words):
        check_split(FAMILIES[name].model().config)


def test_a_running_batch_follows_the_first_process_in_memory_and_seeds(tmp_path: Path) -> None:
    folders = str(ready("llama")), str(ready("llama"))

    def tokens(vlm: VLM, rank: int) -> list[list[int]]:
        with vlm.batch(max_rows=2, kv_memory=2**20 >> 20 * rank) as batch:  # too little for any request on rank 1
            asked = [batch.add(text, seed=3 + 100 * rank, do_sample=True) for text in ("One?", "Two?", "Three?")]
            return [ticket.result().tokens for ticket in asked]

    def work(rank: int) -> dict[str, Any]:
        with pytest.raises(ModelError, match="Exact mode needs the whole target"):
            load(folders[0], device_map="tp", exact=True)
        return {"tokens": tokens(load(*folders, "chain", device_map="tp"), rank)}

    whole = tokens(load(*folders, "chain"), 0)
    assert run_split(tmp_path, work) == [{"tokens": whole}] * COUNT
