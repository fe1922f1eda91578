"""A target split over two processes gives the tokens of one process, and all processes give the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

import harness
from checkpoints import llama
from families import FAMILIES
from over_processes import COUNT, run_split, split_target
from saccade import VLM, load
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.engine import Engine
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.sharding import Ranks, check_split

NAMES = ("llava", "qwen2_5_vl", "gemma3", "mistral3")
DRAFTS = ("chain", "dynamic", "head")
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    for name in (*NAMES, "llama"):
        FAMILIES[name].model().save_pretrained(folder / name)
    return folder


def engine(name: str, drafts: str, target: Target) -> Engine:
    """The drafter is the same in every process: its weights follow from a seed."""
    if drafts != "head":
        return harness.build(target, Target(FAMILIES[name].draft_model()), drafts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = build_head(HeadConfig.from_target(target, "eagle2"))
    return Engine(target, HeadDrafter(head, target, harness.POLICIES["dynamic"]))


def answers(name: str, target: Target, seed: int = 7, only: Sequence[str] = DRAFTS) -> dict[str, list[list[int]]]:
    """Tokens of two rows by draft and by how they are chosen; some of a draft model's tokens are accepted."""
    made = {}
    for drafts, sampled in product(only, (False, True)):
        options = {"do_sample": True, "temperature": 0.7, "top_k": 20} if sampled else {}
        asked = harness.requests(name, "image", 2, seed)
        outputs = engine(name, drafts, target).generate(asked, max_new_tokens=16, **options)
        drafted, accepted = (
            sum(getattr(o.stats, f"{kind}_tokens") for o in outputs) for kind in ("drafted", "accepted")
        )
        assert drafted > accepted
        assert accepted > 0 or drafts == "head"
        made[f"{drafts} {sampled}"] = harness.tokens(outputs)
    return made


def whole(name: str, **options: Any) -> dict[str, list[list[int]]]:
    return answers(name, Target(FAMILIES[name].model()), **options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "llava" else []) for n in NAMES])
def test_two_processes_give_the_tokens_of_one(name: str, checkpoints: Path, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        target = split_target(checkpoints / name)
        weight = target.layers[0].self_attn.q_proj.weight
        assert weight.to_local().shape[0] * COUNT == weight.shape[0]
        assert target.ranks.is_split
        assert target.ranks.rank == rank
        assert not target.is_lean
        return answers(name, target)

    assert run_split(tmp_path, work) == [whole(name)] * COUNT


def test_the_comparison_notices_processes_that_decide_for_themselves(checkpoints: Path, tmp_path: Path) -> None:
    """The planted mistake: other seeds, and no rank sends trees, verdicts and seeds."""

    def work(rank: int) -> dict[str, Any]:
        Ranks.tree = lambda self, tree: tree  # type: ignore[method-assign]
        Ranks.tensors = lambda self, numbers, parts: (numbers, parts)  # type: ignore[method-assign, assignment, return-value]
        Ranks.numbers = lambda self, values: list(values)  # type: ignore[method-assign]
        return answers("llava", split_target(checkpoints / "llava"), seed=100 * rank, only=("chain",))

    with pytest.raises(AssertionError):
        assert run_split(tmp_path, work, seconds=20) == [whole("llava", seed=0, only=("chain",))] * COUNT


def test_what_rank_0_sends_may_have_another_shape(checkpoints: Path, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        ranks = split_target(checkpoints / "llama").ranks
        own = [torch.arange(3 + rank), torch.ones(1 + rank, 2, dtype=torch.bool)]
        numbers, parts = ranks.tensors([rank, 5 + rank], own)
        return {"numbers": numbers, "parts": [p.tolist() for p in parts], "kinds": [str(p.dtype) for p in parts]}

    first, second = run_split(tmp_path, work)
    expected = {"numbers": [0, 5], "parts": [[0, 1, 2], [[True, True]]], "kinds": ["torch.int64", "torch.bool"]}
    assert first == second == expected


def test_a_single_process_is_refused_with_the_advice_to_use_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_target_whose_layers_have_other_numbers_of_heads_is_split_where_all_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 4's configuration has no single number of key-value heads where its layers differ."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    config = Gemma4TextConfig(num_hidden_layers=6, attention_k_eq_v=True, **heads)
    for variable in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_split(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ModelError, match="2 key-value heads, which 4 processes"):
        check_split(config)


def test_a_running_batch_follows_the_first_process_in_memory_and_seeds(tmp_path: Path) -> None:
    folders = (str(llama(tmp_path / "llama", padded=1)),) * 2  # a vocabulary that every version can split

    def tokens(vlm: VLM, rank: int) -> list[list[int]]:
        with vlm.batch(max_rows=2, kv_memory=2**20 >> 20 * rank) as batch:  # too little for any request on rank 1
            tickets = [batch.add(text, seed=3 + 100 * rank, do_sample=True) for text in ("One?", "Two?", "Three?")]
            return [ticket.result().tokens for ticket in tickets]

    def work(rank: int) -> dict[str, Any]:
        with pytest.raises(ModelError, match="Exact mode needs the whole target"):
            load(folders[0], device_map="tp", exact=True)
        return {"tokens": tokens(load(*folders, "chain", device_map="tp"), rank)}

    whole = tokens(load(*folders, "chain"), 0)
    assert run_split(tmp_path, work) == [{"tokens": whole}] * COUNT
