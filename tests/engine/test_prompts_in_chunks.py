"""A prompt read in parts, beside other rows' steps, gives the tokens of a prompt read at once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from kit import Forwards, add, alone, engine, prompts

from families import FAMILIES
from harness import drain
from saccade.engine import Engine, Request
from saccade.engine.prefill import ChunkSizes
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context, Prefill
from saccade.target_model.token_blocks import TokenBlock
from saccade.verify.loose import LVSpec

NEW = 8


def sizes(length: int) -> list[int]:
    """Every size up to 6, and some that end a chunk near the prompt's end."""
    return [*range(1, 7), 16, length // 2, length - 1, length]


@pytest.mark.executors
@pytest.mark.some_families
@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family, case in FAMILIES.items() for kind in case.kinds]
)
def test_chunks_of_any_size_give_the_tokens_of_whole_prompts(family: str, kind: str) -> None:
    prompt = prompts(kind, family)[0]
    expected = FAMILIES[family].reference(kind, n=NEW)[0]
    for size in sizes(len(prompt)):
        batch = engine("plain", family).open(1, prefill_chunk=size)
        row = add(batch, prompt, n=NEW)
        drain(batch)
        assert row.output == expected, size


@pytest.mark.parametrize("method", ["plain", "lookup", "chain", "static"])
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_long_prompt_is_read_beside_rows_that_go_on(method: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = engine(method).open(2, prefill_chunk=chunk, longest_step=math.inf)
    first = add(batch, prompts()[0], n=60)
    while not first.output:
        batch.step()
    second = add(batch, prompts()[1], n=20)
    forwards, before = Forwards(batch, monkeypatch), len(first.output)
    while not second.output:
        before_step = len(first.output)
        batch.step()
        assert len(first.output) > before_step or first.done  # nobody waits for a prompt
    reading = -(-len(prompts()[1]) // chunk)
    assert sum(count == 2 for count in forwards.rows) == reading
    assert len(forwards.passes) <= reading + 1  # a long draft prompt has a step of its own
    assert len(first.output) >= before + min(reading, 60 - before)
    drain(batch)
    assert first.output == alone(method, prompts()[0], n=60)
    assert second.output == alone(method, prompts()[1], n=20)


def test_passes_of_their_own_count_as_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, spent = prompts()[0], list[float]()
    batch = engine("plain").open(1, prefill_chunk=len(prompt) // 3)
    run = Prefill.run

    def timed(prefill: Prefill, stop: int) -> None:
        begun = time.perf_counter()
        run(prefill, stop)
        spent.append(time.perf_counter() - begun)

    monkeypatch.setattr(Prefill, "run", timed)
    monkeypatch.setattr(Prefill, "runs_alone", property(lambda prefill: True))
    row = add(batch, prompt, n=NEW)
    drain(batch)
    assert len(spent) > 2
    assert row.finish().stats.times.prefill >= sum(spent)


@pytest.mark.parametrize("method", ["lookup", "chain", "static"])
def test_the_first_guesses_are_verified_in_the_pass_that_ends_the_prompt(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine(method).open(1)
    forwards = Forwards(batch, monkeypatch)
    row = add(batch, prompts()[0], n=30)
    batch.step()
    assert len(forwards.passes) == 1
    (piece,) = forwards.passes[0]
    assert piece.logits_from == len(prompts()[0]) - 1
    if method != "lookup":
        assert piece.count > len(prompts()[0])
    assert row.stats.prefill_tokens == len(row.output) >= 1
    drain(batch)
    assert len(forwards.passes) == 1 + row.stats.target_passes
    assert row.output == alone("plain", prompts()[0], n=30)


def test_a_draft_prompt_that_is_too_long_fails_its_row_alone() -> None:
    batch = engine("chain").open(2)
    limit = engine("chain").drafter.model.config.max_position_embeddings
    bad = add(batch, prompts()[0], draft=Prompt((50,) * (limit + 5)))
    good = add(batch, prompts()[1])
    drain(batch)
    assert f"but that model's context is {limit}" in str(bad.error)
    assert good.output == alone("plain", prompts()[1])


@pytest.mark.parametrize("method", ["plain", "chain"])
@pytest.mark.parametrize("token", [0.05, 0.0001])
def test_a_step_with_a_part_of_a_prompt_stays_below_three_without(
    method: str, token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts tokens; those of the drafter take as long, and later ones twice as long."""
    clock, forward = [0.0], Target.forward
    cold = Prompt(tuple(5 + place % 50 for place in range(900)))
    expected, neighbour = alone(method, cold, n=4), alone(method, prompts()[0], n=300)

    def timed(target: Target, cache: RowCache, blocks: Sequence[TokenBlock], *more: Any) -> Any:
        clock[0] += 1 + sum(
            token * (block.count * len(block.rows) - 1) * (1 + cache.lengths[block.rows[0]] / 900) for block in blocks
        )
        return forward(target, cache, blocks, *more)

    batch = engine(method).open(2)
    monkeypatch.setattr("saccade.engine.slots.time.thread_time", lambda: clock[0])
    monkeypatch.setattr(Target, "forward", timed)
    first, steps = add(batch, prompts()[0], n=300), list[float]()
    while len(first.output) < 30:
        begun = clock[0]
        batch.step()
        steps.append(clock[0] - begun)
    second = add(batch, cold, n=4)
    parts, largest = list[float](), 0
    while not second.output:
        before, begun = 0 if second.slot is None else batch.context.lengths[second.slot], clock[0]
        batch.step()
        parts.append(clock[0] - begun)
        assert second.slot is not None
        largest = max(largest, batch.context.lengths[second.slot] - before)
    assert max(parts) < 3 * median(steps[-9:])
    assert largest > 200 if token < 0.01 else 16 < largest < 200
    drain(batch)
    assert second.output == expected
    assert first.output == neighbour


@pytest.mark.parametrize("method", ["plain", "chain"])
def test_media_and_draft_prompts_of_little_time_need_no_steps_of_their_own(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, forward = [0.0], Target.forward

    def timed(target: Target, cache: RowCache, blocks: Sequence[TokenBlock], *more: Any) -> Any:
        clock[0] += 1 + 0.001 * sum(block.tokens.numel() for block in blocks)
        return forward(target, cache, blocks, *more)

    *_, new, known = sorted(prompts("image", "llava"), key=len)
    batch = engine(method, "llava").open(4, prefill_chunk=len(known))
    monkeypatch.setattr("saccade.engine.slots.time.thread_time", lambda: clock[0])
    monkeypatch.setattr(Target, "forward", timed)
    add(batch, prompts("text", "llava")[0], n=200)
    for _ in range(5):
        batch.step()
    drained = add(batch, known)  # by whose steps times are known
    while not drained.done:
        batch.step()
    row = add(batch, new)
    batch.step()
    assert row.output
    drain(batch)
    assert row.output == alone("plain", new, "llava")


def test_half_a_prompt_whose_states_nobody_took_in_is_no_prefix_of_the_next() -> None:
    """A rule that reads the states of the whole prompt gets them all, also where the first row of it was cancelled."""
    chain, prompt = engine("chain", "llava"), prompts("image", "llava")[0]
    reading = Engine(chain.target, chain.drafter, LVSpec(loose_share=0.7))
    expected = reading.generate([Request(prompt)], max_new_tokens=NEW)[0].tokens
    for under_test, reused in ((chain, True), (reading, False)):
        batch = under_test.open(1, prefill_chunk=len(prompt) - 3)
        first = add(batch, prompt, n=NEW)
        batch.step()
        assert 0 < batch.context.lengths[0] < len(prompt)
        batch.cancel(first)
        again = add(batch, prompt, n=NEW)
        drain(batch)
        assert bool(again.stats.reused_tokens) == reused
        assert again.output == (expected if under_test is reading else alone("plain", prompt, "llava", n=NEW))


def test_more_time_goes_to_prompts_where_more_wait_than_decode() -> None:
    sizes = ChunkSizes(1000)
    sizes.observe_step(2, 1.0)
    sizes.observe_chunk(400, 5.0, 2)
    assert sizes.size(2) == sizes.size(2, waiting=2) == 125
    assert sizes.size(2, waiting=6) == 375


def test_draft_prompts_of_rows_that_begin_together_run_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = list[int]()
    load = Context.load_together

    def counted(context: Context, rows: Sequence[int], given: Sequence[Prompt]) -> bool:
        is_done = load(context, rows, given)
        passes.append(len(rows) * is_done)
        return is_done

    monkeypatch.setattr(Context, "load_together", counted)
    batch = engine("chain", "llava").open(4)
    rows = [add(batch, prompt) for prompt in prompts("image", "llava")]
    drain(batch)
    assert passes == [4]
    assert [row.output for row in rows] == [alone("plain", prompt, "llava") for prompt in prompts("image", "llava")]


def test_a_draft_prompt_that_fails_among_others_fails_alone() -> None:
    batch = engine("chain").open(3)
    limit = engine("chain").drafter.model.config.max_position_embeddings
    first, bad, last = (
        add(batch, prompts()[place], draft=Prompt((50,) * (limit + 5)) if place == 1 else None) for place in range(3)
    )
    drain(batch)
    assert f"but that model's context is {limit}" in str(bad.error)
    assert [first.output, last.output] == [alone("plain", prompts()[place]) for place in (0, 2)]
