"""Measured costs of target and drafter forwards, and the estimated duration of a suite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
import torch

from saccade.bench.answering import answer_turns
from saccade.bench.preparing import Prepared
from saccade.bench.suites import BASELINE
from saccade.draft.heads.head import Head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.policy import Chain, TopProposer
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per pass measured in every run
ROUNDS = 15  # timed passes of every size
WARM = 2  # untimed passes before them
HEAD_STEPS = 5  # longest chain over which a head's step is averaged


@dataclass(frozen=True, slots=True)
class Costs:
    """Median seconds per pass at a fixed KV length, timed alone and synchronised."""

    kv: int  # entries in the target's cache while measuring
    target: dict[int, float]  # seconds by number of tokens in the pass
    draft: dict[int, float]  # the draft model's seconds by number of tokens; empty without one
    heads: dict[str, float] = field(default_factory=dict)  # by name

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Costs | None:
        """Read the costs in a run's header; None when none were measured."""
        if not stored:
            return None
        target, draft = ({int(k): v for k, v in stored[name].items()} for name in ("target", "draft"))
        return cls(stored["kv"], target, draft, dict(stored["heads"]))

    def target_seconds(self, tokens: float) -> float:
        """T_p(tokens), interpolated between measured sizes."""
        sizes = sorted(self.target)
        return float(np.interp(tokens, sizes, [self.target[size] for size in sizes]))


def measure(
    target: Target,
    prompt: Prompt,
    draft: Target | None,
    text: Prompt,
    sizes: Iterable[int] = (),
    heads: Mapping[str, Head] | None = None,
) -> Costs:
    """Time passes after a real prompt, all sizes in turn so that drift affects them alike."""
    wanted = sorted({*SIZES, *sizes})
    kv, seconds = _passes(target, prompt, wanted)
    drafts: dict[int, float] = {}
    if draft is not None:
        few, limit = [s for s in wanted if s <= SIZES[3]], draft.traits.limits.context
        length = len(prompt) if limit is None else min(len(prompt), max(limit - few[-1], 1))
        _, drafts = _passes(draft, Prompt(tuple(islice(cycle(text.ids), length))), few)
    steps = {name: _head_step(head, target, prompt) for name, head in (heads or {}).items()}
    return Costs(kv, seconds, drafts, steps)


@torch.inference_mode()
def _passes(model: Target, prompt: Prompt, sizes: list[int]) -> tuple[int, dict[int, float]]:
    limit = model.traits.limits.context
    room = sizes[-1] if limit is None else limit - len(prompt)
    sizes = [s for s in sizes if s <= room]
    context = Context(model, 1)
    context.cache.reserve(0, len(prompt) + max(sizes))
    context.load(0, prompt)
    chains = {size: torch.full((1, size), prompt.ids[-1], device=model.device) for size in sizes}  # [1, size]

    def step(tokens: torch.Tensor) -> None:
        """Pass over a chain that leaves the cache unchanged."""
        context.forward([0], tokens)
        context.cache.drop([0])

    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS + WARM):
        for size, tokens in chains.items():
            seconds[size].append(_timed(partial(step, tokens), model.device))
    return len(prompt), {size: median(times[WARM:]) for size, times in seconds.items()}


@torch.inference_mode()
def _head_step(head: Head, target: Target, prompt: Prompt) -> float:
    """Median seconds of a head's draft step; every chain follows the same emitted token."""
    steps = min(HEAD_STEPS, head.reach or HEAD_STEPS)
    room = len(prompt) + ROUNDS + WARM
    context = Context(target, 1)
    session = HeadDrafter(head, target, Chain(steps)).open(1, context)
    context.cache.reserve(0, room)
    session.begin(0, room)
    session.load(0, prompt, context.load(0, prompt))
    emitted = [[prompt.ids[-1]]]
    proposer = TopProposer()
    spent = [
        _timed(lambda: session.propose([0], emitted, proposer, steps), target.device) for _ in range(ROUNDS + WARM)
    ]
    return median(spent[WARM:]) / steps


def _timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the device idle before and after it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected size of a run."""

    answers: int  # records of the complete run
    traced: int  # extra answers for the report's trees
    seconds: float  # of the whole run, if every method were as slow as plain decoding


def estimate(prepared: Prepared) -> Expected:
    """Time one plain answer to the first question of every task, after one to warm up."""
    suite = prepared.suite
    plain = prepared.methods[BASELINE]
    seconds = 0.0
    answers = traced = 0
    for number, group in enumerate(prepared.questions.values()):
        rounds = 2 if number == 0 else 1
        for _ in range(rounds):
            spent = sum(a.seconds for a in answer_turns(plain, BASELINE, group[0], 0, options=prepared.options, seed=0))
        turns = [len(question.turns) for question in group]
        timed = sum(turns) * suite.repeats * len(prepared.methods)
        again = sum(turns[: suite.trace]) * len(prepared.methods)
        warmup = turns[0] * suite.warmup * len(prepared.methods) if number == 0 else 0
        answers += timed
        traced += again
        seconds += spent / turns[0] * (timed + again + warmup)
    return Expected(answers, traced, seconds)
