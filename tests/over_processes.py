"""Tiny targets split over two processes, which say what they generated."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from families import FAMILIES
from processes import forked
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.loading import load_model
from saccade.target_model.adapter import Target

NAMES = ("llava", "qwen2_5_vl", "gemma3", "mistral3")
DRAFTS = ("chain", "tree", "head")
COUNT = 2
Answers = dict[str, list[list[int]]]


@cache
def requests(name: str) -> list[Request]:
    case = FAMILIES[name]
    inputs = case.inputs("image", rows=2)
    return [Request(prompt, seed=7 + row) for row, prompt in enumerate(split(case.model().config, inputs))]


def engine(name: str, drafts: str, target: Target) -> Engine:
    """The drafter is the same in every process: its weights follow from a seed."""
    if drafts == "head":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            head = build_head(HeadConfig.from_target(target, "eagle2"))
        return Engine(target, HeadDrafter(head, target, DynamicTree(top=3, max_depth=3, total=8)))
    policy = Chain(4) if drafts == "chain" else DynamicTree(top=3, max_depth=3, total=8)
    return Engine(target, ModelDrafter(Target(FAMILIES[name].draft_model()), policy))


def answers(name: str, target: Target, seed: int = 0, only: tuple[str, ...] = DRAFTS) -> Iterator[tuple[str, Any]]:
    """Tokens of two rows by draft and by how they are chosen; some of a draft model's tokens are accepted."""
    for drafts, sampled in product(only, (False, True)):
        asked = [Request(r.prompt, seed=r.seed + seed) for r in requests(name)]
        options = {"do_sample": True, "temperature": 0.7, "top_k": 20} if sampled else {}
        outputs = engine(name, drafts, target).generate(asked, max_new_tokens=16, **options)
        stats = [output.stats for output in outputs]
        drafted, accepted = sum(s.drafted_tokens for s in stats), sum(s.accepted_tokens for s in stats)
        assert drafted > accepted
        assert accepted > 0 or drafts == "head"
        yield f"{name} {drafts} {'sampled' if sampled else 'greedy'}", [output.tokens for output in outputs]


def as_rank(rank: int, port: int, out: Path, work: Callable[[int], dict[str, Any]]) -> None:
    """One of several processes, as `torchrun` starts them; writes what ``work`` returns."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(COUNT),
        LOCAL_WORLD_SIZE=str(COUNT),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    PartialState._reset_state()  # a forked process has that of a run before
    faulthandler.disable()  # a process that is torn off by another one's end says no more
    torch.set_num_threads(1)
    found = work(rank)
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def run_split(out: Path, work: Callable[[int], dict[str, Any]], seconds: float = 120) -> list[dict[str, Any]]:
    """What every process returns.

    Raises:
        AssertionError: one failed, or took longer.
    """
    port = free_port()
    both = [forked(lambda rank=rank: as_rank(rank, port, out, work)) for rank in range(COUNT)]  # type: ignore[misc]
    try:
        for process in both:
            process.join(seconds)
            assert process.exitcode == 0
    finally:
        for process in both:
            process.kill()
            process.join()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(COUNT)]


def split_target(folder: Path) -> Target:
    return Target(load_model(folder, device_map="tp"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
