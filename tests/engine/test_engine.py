"""The loop: where outputs end, what rows owe each other, what is counted, and what happens on failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit import METHODS, engine
from kit import prompts as all_prompts

import harness
from families import FAMILIES
from saccade.engine import Engine, Request, Run
from saccade.engine.row import DEFAULT_NEW_TOKENS, plan
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.target_model.adapter import Target
from saccade.target_model.cache import QUANTUM

NEW = 24
DRAFTING = pytest.mark.parametrize("method", [*METHODS, "dynamic"])


def prompts() -> Sequence[Prompt]:
    return all_prompts()[:3]


def requests() -> list[Request]:
    return harness.requests("llama")


def fresh(method: str) -> Engine:
    """An engine whose weights may be changed."""
    case = FAMILIES["llama"]
    return harness.build(Target(case.model()), Target(case.draft_model()), method)


def reference(row: int) -> list[int]:
    return FAMILIES["llama"].reference("text", rows=3, n=NEW)[row]


def run(method: str, n: int = NEW, **options: Any) -> list[Output]:
    return engine(method).generate(requests(), max_new_tokens=n, **options)


def start(under_test: Engine, **options: Any) -> Run:
    return under_test.start(requests(), plan(under_test.target, prompts(), max_new_tokens=NEW, **options))


# --------------------------------------------------------------------------- where outputs end


@DRAFTING
def test_finished_rows_stay_finished_and_silent(method: str) -> None:
    going = start(engine(method), eos_token_id=reference(0)[5])
    finished, text = [False] * 3, [list[int]() for _ in range(3)]
    for step in going.steps:
        for row in range(3):
            if finished[row]:
                assert step.finished[row]
                assert step.tokens[row] == step.marks[row] == ()
            else:
                assert len(step.tokens[row]) == len(step.marks[row]) > 0
            text[row] += step.tokens[row]
        finished = list(step.finished)
    assert all(finished)
    assert text == [output.tokens for output in going.outputs]
    assert len(set(map(len, text))) > 1  # otherwise no row would have waited for another


# --------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@DRAFTING
def test_counts_fit_together(method: str, do_sample: bool) -> None:
    end = reference(1)[20]
    drafter = engine(method).drafter
    for request, output in zip(requests(), run(method, do_sample=do_sample, eos_token_id=end), strict=True):
        stats = output.stats
        assert stats.prompt_tokens == len(request.prompt)
        assert stats.new_tokens == len(output.tokens) == len(output.marks)
        assert stats.new_tokens == stats.accepted_tokens + output.marks.count("target")
        assert sum(stats.accepted_histogram) == stats.target_passes
        judged = sum(a * n for a, n in enumerate(stats.accepted_histogram))
        cut = judged + stats.target_passes - stats.decoded_tokens  # what the last pass gave beyond the end
        assert 0 <= cut <= (drafter.facts.max_depth if drafter else 0)
        assert stats.accepted_tokens <= judged + stats.prefill_tokens
        assert judged <= stats.drafted_tokens
        if drafter is None:
            assert stats.prefill_tokens == 1
            assert stats.drafted_tokens == 0
            assert stats.target_passes == stats.new_tokens - 1
        elif method != "lookup":
            assert stats.accepted_tokens > 0
            assert stats.drafted_tokens <= (stats.target_passes + 1) * (drafter.facts.max_nodes - 1)
        seconds = stats.times
        assert seconds.total >= seconds.vision + seconds.prefill + seconds.draft_prefill + seconds.draft
        assert seconds.decode >= seconds.draft + seconds.verify


# --------------------------------------------------------------------------- caches and turns


@DRAFTING
def test_the_kv_cache_is_as_large_as_the_request(method: str) -> None:
    """Not as the model's context (1024 positions)."""
    under_test = engine(method)
    session = under_test.open(3)
    under_test.generate(requests(), max_new_tokens=NEW, session=session)
    nodes = under_test.drafter.facts.max_nodes if under_test.drafter else 1
    cache = session.context.cache
    for row in range(3):
        needed = len(prompts()[row]) + NEW + nodes
        assert needed <= cache.capacity(row) < needed + QUANTUM
    per_entry = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head width, bytes of a float
    assert cache.nbytes == cache.slots * per_entry
    assert cache.slots <= sum(cache.capacity(row) for row in range(3)) + 3 * QUANTUM


# --------------------------------------------------------------------------- failures and refusals


def test_a_drafter_that_gives_nan_changes_no_token() -> None:
    under_test: Any = fresh("chain")
    with torch.no_grad():
        under_test.drafter.model.model.get_output_embeddings().weight.fill_(float("nan"))
    harness.assert_equals_generate(under_test, "llama")


@pytest.mark.parametrize(
    ("lengths", "n", "message"),
    [
        ([], 3, "give at least one request"),
        ([0], 3, "give at least one token"),
        ([5], 1020, "needs 1025 tokens but this model's context is 1024"),
    ],
)
def test_what_cannot_be_generated_is_refused(lengths: list[int], n: int, message: str) -> None:
    under_test, asked = engine("chain"), [Request(Prompt((50,) * length)) for length in lengths]
    with pytest.raises(InputError, match=message):
        under_test.generate(asked, max_new_tokens=n)


def test_an_unnamed_length_is_the_default_within_the_context() -> None:
    target, prompt = engine("plain").target, prompts()[0]
    assert target.model.generation_config.max_length is None
    (row,) = plan(target, [prompt])
    assert row.max_new_tokens == min(DEFAULT_NEW_TOKENS, target.config.max_position_embeddings - len(prompt))
    (short,) = plan(target, [prompt], max_length=len(prompt) + 3)
    assert short.max_new_tokens == 3
