"""Which prompts a step reads, and how much of each: read from the chunks, without times."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf

import pytest
from kit import add, alone, engine, prompts
from test_memory import needed

from harness import drain
from saccade.engine import Row, RunningBatch
from saccade.engine.prefill import PATIENCE, PrefillChunk, PromptRunner
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Prefill

NUMBERS = count()


def text(length: int) -> Prompt:
    """A prompt that shares no prefix with another one."""
    return Prompt((20 + next(NUMBERS) % 70, *(5 + place % 50 for place in range(length - 1))))


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunningBatch], dict[Row, int]]:
    """Runs a step; tokens of every row's prompt that it read."""
    seen: list[dict[Row, int]] = []
    chunks = PromptRunner.chunks

    def recorded(runner: PromptRunner) -> list[PrefillChunk]:
        made = chunks(runner)
        seen.append({chunk.row: chunk.runs * (chunk.stop - chunk.prefill.num_computed) for chunk in made})
        return made

    def run(batch: RunningBatch) -> dict[Row, int]:
        batch.step()
        return seen[-1]

    monkeypatch.setattr(PromptRunner, "chunks", recorded)
    return run


Step = Callable[[RunningBatch], dict[Row, int]]


def test_short_prompts_that_come_beside_a_long_one_are_read_in_the_next_step(step: Step) -> None:
    batch = engine("plain").open(5, prefill_chunk=256)
    long = add(batch, text(1000), n=4)
    assert step(batch) == {long: 256}
    short = [add(batch, text(length), n=1) for length in (20, 10, 12, 18)]
    assert step(batch) == {short[1]: 10, short[2]: 12, short[3]: 18, short[0]: 20, long: 60}
    assert all(row.output for row in short)
    assert step(batch) == {long: 256}  # which has the whole step again
    drain(batch)
    assert [row.output for row in (long, *short)] == [
        alone("plain", row.request.prompt, n=row.plan.max_new_tokens) for row in (long, *short)
    ]


def test_a_single_short_prompt_does_not_wait_for_much_of_a_long_one(step: Step) -> None:
    batch = engine("plain").open(5, prefill_chunk=256)
    long = add(batch, text(1000), n=1)
    step(batch)
    short = add(batch, text(8), n=1)
    assert step(batch) == {short: 8, long: 32}


def test_short_prompts_go_first_beside_decoding_rows_too(step: Step) -> None:
    batch = engine("plain").open(5, prefill_chunk=256, longest_step=inf)
    add(batch, text(10), n=20)
    step(batch)
    long, short = add(batch, text(1000), n=1), add(batch, text(20), n=1)
    assert step(batch) == {short: 20, long: 236}
    drain(batch)


def test_a_long_prompt_has_a_part_of_every_step_beside_shorter_ones(step: Step) -> None:
    batch = engine("plain").open(5, prefill_chunk=256)
    long, later = add(batch, text(1000), n=1), add(batch, text(600), n=1)
    assert step(batch) == {later: 224, long: 32}


def test_a_prompt_that_cannot_be_divided_is_read_in_spite_of_shorter_ones_that_keep_coming(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine("plain").open(4, prefill_chunk=64)
    chunk_end = Prefill.chunk_end

    def whole(prefill: Prefill, budget: int) -> int:
        return len(prefill.prompt) if len(prefill.prompt) == 100 else chunk_end(prefill, budget)

    monkeypatch.setattr(Prefill, "chunk_end", whole)
    long = add(batch, text(100), n=1)
    steps = 0
    while not long.output:
        add(batch, text(10), n=1)
        step(batch)
        steps += 1
    assert steps == PATIENCE + 1
    drain(batch)


@pytest.mark.parametrize("method", ["plain", "chain"])
def test_media_and_draft_prompts_of_a_long_prompt_let_short_ones_go_ahead(
    method: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.engine.prefill.DRAFT_CHUNK", 3)
    *_, picture = sorted(prompts("image", "llava"), key=len)
    batch = engine(method, "llava").open(4, prefill_chunk=len(picture))
    long = add(batch, picture, n=4)
    short = add(batch, prompts("text", "llava")[0], n=1)
    while not short.output:
        assert not step(batch).get(long)
    drain(batch)
    assert long.output == alone("plain", picture, "llava", n=4)


def test_rows_that_fit_go_ahead_of_one_that_waits_for_memory_but_not_for_ever() -> None:
    small, large = prompts()[0], prompts()[1]
    one = engine("chain").open(1)
    limit = needed(one, large, 200) + needed(one, small, 8) // 2
    batch = engine("chain").open(3, kv_memory=limit)
    running = add(batch, small, n=100)
    batch.step()
    big = add(batch, large, n=200)
    ahead, after = [add(batch, small, n=8) for _ in range(PATIENCE)], add(batch, small, n=8)
    while not running.done:
        batch.step()
        assert after.slot is None
    assert all(row.done for row in ahead)
    drain(batch)
    assert [row.output for row in (big, after)] == [alone("chain", large, n=200), alone("chain", small, n=8)]


def test_a_row_that_has_to_wait_for_memory_drops_no_cached_content() -> None:
    one = engine("chain").open(1)
    first, second, large = prompts()[:3]
    limit = sum(needed(one, prompt, 60) for prompt in (first, second)) + needed(one, large, 60) // 2
    batch = engine("chain").open(3, kv_memory=limit)
    add(batch, first, n=4)
    drain(batch)
    add(batch, second, n=60)
    add(batch, large, n=60 + needed(one, first, 60) // batch.target.entry_bytes // 2)
    batch.step()
    assert max(batch.context.shared_prefixes(range(3), first).values()) > 1
    drain(batch)
