"""A row of a batch samples exactly the tokens that it samples alone, whatever its neighbours' trees look like."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness import TREES, course
from saccade import load
from saccade.draft.ensemble.weights import InverseError, Random
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request, Row
from saccade.engine.row import plan
from saccade.output import Output, TreeTrace
from saccade.pocket import draw
from saccade.verify.loose import RandomLoosening

HEADS = ("eagle2", "eagle3", "peagle", "msd", "hivis", "vispec", "dream", "medusa", "hydra")
SAMPLED = {"do_sample": True, "max_new_tokens": 32, "temperature": 0.7, "top_k": 20}
DRAFTERS = {
    **harness.DRAFTERS,
    "random views": lambda *models: harness.ensemble(*models, Random()),
    "weighed views": lambda *models: harness.ensemble(*models, InverseError()),
}


@cache
def engine(name: str, drafter: str, tree: str, rule: Any = None) -> Engine:
    target = harness.target(name)
    policy = SageTree(alpha_of="accepted") if tree == "accepted" else TREES.get(tree)
    return Engine(target, DRAFTERS[drafter](target, harness.draft(name), policy), rule)


def beside_and_alone(method: Engine, name: str, options: dict[str, Any]) -> tuple[list[Output], list[Output]]:
    asked = harness.requests(name, seed=60)
    together = method.generate(asked, **options)
    alone = [method.generate([request], **options)[0] for request in asked]
    if method.drafter is not None:
        assert 0 < sum(o.stats.accepted_tokens for o in together) < sum(o.stats.drafted_tokens for o in together)
    return together, alone


CASES = [
    *(("model", tree, name) for tree in TREES for name in ("llama", "qwen2_5_vl")),
    *(("model", tree, "gemma3") for tree in harness.POLICIES),
    *(("ensemble", tree, "llava") for tree in TREES),
    ("random views", "static", "qwen2_5_vl"),
    ("weighed views", "static", "llava"),
    *(("kangaroo", "confident", name) for name in ("llama", "qwen2_5_vl")),
    *(("merged", tree, "llama") for tree in ("chain", "dynamic", "confident")),
    *((head, "static", "llava") for head in HEADS),
    *((head, "sage", "llava") for head in HEADS if head not in ("medusa", "hydra")),  # these reach five levels
    *(("pruned", tree, name) for tree, name in (("static", "llava"), ("chain", "qwen2_5_vl"), ("sage", "gemma3"))),
    *((head, "oneshot", "llava") for head in ("medusa", "hydra")),
    ("lookup", "", "llama"),
    ("suffix", "", "llama"),
    ("plain", "", "llama"),
]


@pytest.mark.singly
@pytest.mark.parametrize(("drafter", "tree", "name"), CASES)
def test_a_row_s_drafts_and_draws_do_not_depend_on_its_neighbours(drafter: str, tree: str, name: str) -> None:
    longest = 32 if drafter in ("lookup", "suffix") else 20  # shorter answers may repeat nothing
    together, alone = beside_and_alone(engine(name, drafter, tree), name, {**SAMPLED, "max_new_tokens": longest})
    assert list(map(course, together)) == list(map(course, alone))


def test_a_row_without_pictures_learns_nothing_of_its_views_from_being_read_beside_one_with_pictures() -> None:
    """Alone its views are one, so there is nothing to learn; later turns start from what was learned."""
    asked = [Request(harness.prompt("llava", kind, row), seed=row) for row, kind in enumerate(("text", "image"))]

    def weights(rows: list[Request]) -> Tensor:
        method = engine("llava", "ensemble", "chain")
        session = method.open(len(rows))
        method.generate(rows, session=session, **SAMPLED)
        drafting: Any = session.drafting
        learned: Tensor = drafting._weights.choose(range(len(rows)))
        return learned

    together = weights(asked)
    assert torch.equal(together, torch.cat([weights([request]) for request in asked]))
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize(("drafter", "tree"), [("weighed views", "dynamic"), ("model", "accepted")])
def test_what_is_learned_of_a_row_does_not_depend_on_those_that_it_is_verified_with(drafter: str, tree: str) -> None:
    """Trees of predicted answers are verified in groups of like sizes: at their ends, rows have smaller ones."""
    method, traces = engine("llava", drafter, tree), list[list[TreeTrace]]()
    for lengths in ({0: 1, 1: 18, 2: 1}, {1: 18}):
        session, rows = method.open(3), dict[int, Row]()
        session.trace = True
        for number, most in lengths.items():
            asked = Request(harness.prompt("llava", row=number), prediction=(7, 8))
            rows[number] = session.add(asked, *plan(method.target, [asked.prompt], max_new_tokens=most))
        harness.drain(session)
        traces.append([step.tree for step in rows[1].steps if step.tree is not None])
    for together, alone in zip(*traces, strict=True):
        assert replace(together, signals={}) == replace(alone, signals={})
        assert {name: pytest.approx(values) for name, values in together.signals.items()} == alone.signals


@pytest.mark.parametrize("tree", ["chain", "confident"])
def test_what_is_forgiven_at_random_does_not_depend_on_neighbours(tree: str) -> None:
    together, alone = beside_and_alone(
        engine("llama", "model", tree, RandomLoosening(0.5)), "llama", {"max_new_tokens": 24}
    )
    assert list(map(course, together)) == list(map(course, alone))
    assert any(mark == "loose" for output in together for mark in output.marks)


def test_a_seed_gives_the_same_tokens_again_and_another_gives_others() -> None:
    method, asked = engine("llama", "model", "chain"), harness.requests("llama")
    first, again = (harness.tokens(method.generate(asked, **SAMPLED)) for _ in range(2))
    assert first == again
    (other,) = harness.tokens(method.generate([Request(asked[0].prompt, seed=7)], **SAMPLED))
    assert other != first[0]


@pytest.mark.executors
@pytest.mark.parametrize(
    "method", ["tabed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("specvlm", "self-spec"))]
)
def test_steps_of_two_batches_on_one_model_take_turns_and_neither_notices_the_other(method: str) -> None:
    """Prompts of one are read while the other one's rows are under way."""
    vlm = load("pocket", method=method, dtype="float32")
    samples = [draw(500 + number, task) for number, task in enumerate(("chart", "scene", "difference", "caption"))]

    def ask(batch: Any, place: int) -> Any:
        sample, sampling = samples[place], {"do_sample": True, "temperature": 0.8} if place % 2 else {}
        return batch.add(sample.question, images=list(sample.images), seed=place, max_new_tokens=12, **sampling)

    alone = []
    for place in range(len(samples)):
        with vlm.batch(max_rows=1) as batch:
            alone.append(ask(batch, place).result().tokens)
    with vlm.batch(max_rows=2, prefill_chunk=64) as one, vlm.batch(max_rows=2) as two:
        tickets = [ask(one, 0), ask(two, 1)]
        while not (one.is_idle and two.is_idle):
            one.step()
            two.step()
            if len(tickets) < len(samples):
                tickets.append(ask((one, two)[len(tickets) % 2], len(tickets)))
        assert [ticket.output.tokens for ticket in tickets] == alone
