"""Drafts of eight rows where the drafter is as good for all of them, and where it is useless for half: `auto` beside
chains of fixed length.

Every contestant answers a batch of prompts, round by round in one process and each time in another order, some rounds
before they count; the useless half's draft tokens are random. Seconds are processor time; those of decoding are of
steps in which all rows decode. Ratios are medians over rounds of tokens per second, against the fixed length whose
median is best.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

import torch

from benchmarks import pocket_pair
from benchmarks.pocket_pair import FIRST_SEED, load
from saccade.draft.drafter import DraftSession
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.trees.policy import Chain, Proposer
from saccade.engine import Engine, Request
from saccade.engine.costs import Pacer
from saccade.engine.row import plan
from saccade.loading import load_processor
from saccade.pocket import draw
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.token_blocks import ForwardOutput, TokenBlock
from saccade.tree import DraftTree, Emitted, Rows

ROWS, LONGEST = 8, 8
FIXED = (1, 2, 3, 4, 6, 8)
TASK = "scene"  # the task of the longest answers, about a hundred tokens


class PartlyUseless(ModelDrafter):
    """A draft model whose tokens are replaced by random ones for some rows."""

    useless: frozenset[int] = frozenset()

    def open(self, rows: int, target: Context) -> ModelDraftSession:
        return _PartlyUselessSession(self, rows, target)


class _PartlyUselessSession(ModelDraftSession):
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        tree, drafter = super().propose(rows, new, proposer, limit), self._drafter
        assert isinstance(drafter, PartlyUseless)
        useless = [place for place, row in enumerate(rows) if row in drafter.useless]
        tree.tokens[useless, 1:] = torch.randint(drafter.vocab_size, (len(useless), tree.size - 1))
        return tree


@dataclass
class Counts:
    """What a contestant has done in one round."""

    tokens: int = 0
    seconds: float = 0.0
    decoded: int = 0
    decoding: float = 0.0
    steps: int = 0  # of decoding alone
    verified: int = 0  # draft tokens in these
    levels: int = 0  # forwards of the drafter in these


@dataclass
class Contestant:
    """One way to draft, with its rounds."""

    engine: Engine
    rounds: list[Counts] = field(default_factory=list)


def contestants(target: Target, draft: Target) -> dict[str, Contestant]:
    """Fixed lengths and `auto`, by name."""
    made = {"plain": Engine(target)}
    for length in FIXED:
        made[f"chain of {length}"] = Engine(target, PartlyUseless(draft, Chain(length)))
    made["auto"] = Engine(target, PartlyUseless(draft, Chain(LONGEST)), pacer=Pacer(LONGEST, 0.125))
    return {name: Contestant(engine) for name, engine in made.items()}


def run(engine: Engine, requests: Sequence[Request]) -> Counts:
    counts, batch = Counts(), engine.open(ROWS, prefill_chunk=4096, longest_step=inf)
    forwards = _counted(batch.drafting)
    plans = plan(engine.target, [request.prompt for request in requests], max_new_tokens=256)
    rows = [batch.add(*each) for each in zip(requests, plans, strict=True)]
    while not batch.is_idle:
        before, ran = sum(row.stats.drafted_tokens for row in rows), len(forwards)
        is_full = all(row.output and not row.done for row in rows)
        started = time.thread_time()
        emitted = sum(len(chunk.tokens) for _, chunk in batch.step())
        spent = time.thread_time() - started
        counts.tokens += emitted
        counts.seconds += spent
        if is_full:
            counts.decoded += emitted
            counts.decoding += spent
            counts.steps += 1
            counts.verified += sum(row.stats.drafted_tokens for row in rows) - before
            counts.levels += len(forwards) - ran
    batch.close()
    return counts


def _counted(session: DraftSession | None) -> list[int]:
    """A list that gets longer with every forward of a drafter."""
    forwards: list[int] = []
    if isinstance(session, ModelDraftSession):
        run = session.context.run

        def counted(blocks: Sequence[TokenBlock]) -> list[ForwardOutput]:
            forwards.append(len(blocks))
            return run(blocks)

        session.context.run = counted  # type: ignore[method-assign]
    return forwards


def table(running: dict[str, Contestant]) -> Iterator[str]:
    rates = {name: [c.tokens / c.seconds for c in one.rounds] for name, one in running.items()}
    decoding = {name: [c.decoded / c.decoding for c in one.rounds] for name, one in running.items()}
    fixed = [name for name in running if name.startswith("chain")]

    def ratios(by_name: dict[str, list[float]], name: str) -> str:
        best = max(fixed, key=lambda other: median(by_name[other]))
        pairs = sorted(ours / theirs for ours, theirs in zip(by_name[name], by_name[best], strict=True))
        return f"{median(pairs):.3f} ({pairs[0]:.2f}-{pairs[-1]:.2f})"

    rows = []
    for name, one in running.items():
        steps = sum(c.steps for c in one.rounds)
        each = [sum(getattr(c, what) for c in one.rounds) / steps for what in ("decoded", "verified", "levels")]
        cells = [name, f"{median(rates[name]):.0f}", ratios(rates, name)]
        cells += [f"{median(decoding[name]):.0f}", ratios(decoding, name), *(f"{value:.1f}" for value in each)]
        rows.append(cells)
    head = ["method", "tokens/s", "x best fixed", "decoding alone", "x best fixed"]
    return pocket_pair.table([*head, "tokens a step", "draft tokens", "draft forwards"], rows)


def main() -> None:
    parser = pocket_pair.parser(__doc__)
    parser.set_defaults(target_dtype="float32", threads=1)
    parser.add_argument("--rounds", type=int, default=8, help="(default: 8)")
    parser.add_argument("--warm", type=int, default=3, help="rounds before them, which do not count (default: 3)")
    options = pocket_pair.options_of(parser)
    target = Target(load(options.target, options.target_dtype, options.device))
    draft = Target(load(options.draft, options.draft_dtype, options.device))
    processor = load_processor(str(options.target))
    for title, useless in (("alike", ()), ("half of the rows with a useless drafter", range(1, ROWS, 2))):
        running = contestants(target, draft)
        for number in range(-options.warm, options.rounds):
            drawn = [draw(FIRST_SEED + ROWS * (options.warm + number) + i, TASK) for i in range(ROWS)]
            requests = [Request(processor.prompt(sample.messages())) for sample in drawn]
            names = list(running)
            random.Random(number).shuffle(names)
            for name in names:
                drafter = running[name].engine.drafter
                if isinstance(drafter, PartlyUseless):
                    drafter.useless = frozenset(useless)
                counts = run(running[name].engine, requests)
                running[name].rounds += [counts] if number >= 0 else []
        print(f"\n{title}\n")
        print("\n".join(table(running)), flush=True)


if __name__ == "__main__":
    main()
