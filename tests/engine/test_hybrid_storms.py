"""Rows of hybrid targets among others give what they give alone: arrivals, cancels, shared prefixes and freed slots."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
from kit import prompts

import harness
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.engine import Engine, Request, Row
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt

KINDS = {"qwen3_5": ("text", "image", "images2", "video"), "lfm2": ("text",), "nemotron_h": ("text",)}
METHODS = ("plain", "chain", "dynamic", "lookup", "merged")


@cache
def engine(name: str, method: str) -> Engine:
    if method != "merged":
        return harness.engine(name, method)
    both = MergedDrafter(ModelDrafter(harness.draft(name), harness.POLICIES["dynamic"]), PromptLookup(6))
    return Engine(harness.target(name), both)


def options(rng: random.Random, longest: int) -> dict[str, Any]:
    made: dict[str, Any] = {"max_new_tokens": rng.randint(1, longest)}
    if rng.random() < 0.4:
        made |= {"do_sample": True, "temperature": rng.choice([0.6, 1.0]), "top_k": rng.choice([0, 20])}
    if rng.random() < 0.2:
        made["repetition_penalty"] = 1.2
    return made


def following(rng: random.Random, row: Row) -> Prompt:
    """A prompt that continues what a row has so far, or departs from it a few tokens before its end."""
    ids = [*row.request.prompt.ids, *row.output]
    more = [rng.randint(8, 180) for _ in range(rng.randint(1, 12))]
    kept = len(ids) if rng.random() < 0.5 else len(row.request.prompt) - rng.randint(0, 3)
    return Prompt((*ids[:kept], *more), row.request.prompt.media)


def storm(name: str, method: str, count: int, seed: int, longest: int) -> int:
    """Run requests that come and go at random, compare each with itself alone, and return the number of tokens."""
    rng, under_test = random.Random(seed), engine(name, method)
    batch = under_test.open(rng.randint(2, 5), prefill_chunk=rng.choice([7, 24, 512]))
    rows: dict[Row, dict[str, Any]] = {}
    cancelled = set()
    while len(rows) < count or not batch.is_idle:
        if len(rows) < count and rng.random() < 0.3:
            prompt = rng.choice(prompts(rng.choice(KINDS[name]), name))
            if rows and rng.random() < 0.6:
                prompt = following(rng, rng.choice(list(rows)))
            given = options(rng, longest)
            (decoding,) = plan(batch.target, [prompt], **given)
            rows[batch.add(Request(prompt, seed=len(rows)), decoding)] = given
        if rows and rng.random() < 0.03:
            row = rng.choice(list(rows))
            if not row.done:
                batch.cancel(row)
                cancelled.add(row)
        batch.step()
    for row, given in rows.items():
        (alone,) = under_test.generate([row.request], **given)
        assert row.error is None
        assert row.output == (alone.tokens[: len(row.output)] if row in cancelled else alone.tokens), row.request
    assert any(row.stats.reused_tokens for row in rows)
    return sum(len(row.output) for row in rows)


@pytest.mark.parametrize(("name", "method"), [("qwen3_5", "dynamic"), ("lfm2", "chain"), ("nemotron_h", "merged")])
def test_rows_of_a_hybrid_among_others_give_what_they_give_alone(name: str, method: str) -> None:
    assert storm(name, method, 12, 1, 12) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_many_rows_of_a_hybrid_among_others_give_what_they_give_alone(name: str, method: str) -> None:
    total, seeds = 0, itertools.count(10)
    while total < 2_000:
        total += storm(name, method, 24, next(seeds), 48)
