"""Rows join and leave between steps, and nobody else notices."""

from __future__ import annotations

import random
import threading

import pytest
from kit import METHODS, Forwards, add, alone, drain, engine, prompts

from saccade.engine.row import Request, plan
from saccade.errors import InputError

METHOD = pytest.mark.parametrize("method", METHODS)


@METHOD
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_arrive_and_are_cancelled_at_any_time_say_what_they_say_alone(method: str, seed: int) -> None:
    chance = random.Random(seed)
    batch = engine(method).open(3, prefill_chunk=chance.choice([1, 5, 512]))
    asked, cancelled = [], set()
    left = [chance.randrange(4) for _ in range(8)]
    while left or not batch.is_idle:
        if left and chance.random() < 0.5:
            which, number = left.pop(), len(asked)
            options = {"n": 6 + 5 * (number % 4), "seed": number}
            if number % 2:
                options |= {"do_sample": True, "temperature": 0.5 + 0.1 * number}
            asked.append((add(batch, prompts()[which], **options), which, options))
        if asked and chance.random() < 0.05:
            row = chance.choice(asked)[0]
            if not row.done:
                batch.cancel(row)
                cancelled.add(row)
        batch.step()
    for row, which, options in asked:
        expected = alone(method, prompts()[which], **options)
        assert row.output == (expected[: len(row.output)] if row in cancelled else expected)
        assert row.error is None


@METHOD
@pytest.mark.parametrize("how", ["ends", "fails", "is cancelled"])
def test_a_row_that_is_over_costs_nothing_from_the_next_step_on(
    how: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine(method).open(3)

    def breaking(ids: object, scores: object) -> bool:
        raise ZeroDivisionError

    breaking.stateless = True  # type: ignore[attr-defined]
    short = {"n": 1} if how == "ends" else {"n": 40}
    if how == "fails":
        short["stopping_criteria"] = [breaking]  # type: ignore[assignment]
    over = add(batch, prompts()[0], **short)
    others = [add(batch, prompt, n=40) for prompt in prompts()[1:3]]
    batch.step()
    if how == "is cancelled":
        batch.cancel(over)
    assert over.done
    forwards = Forwards(batch, monkeypatch)
    batch.step()
    assert forwards.rows == [2]
    drain(batch)
    assert max(forwards.rows) == 2
    for row, prompt in zip(others, prompts()[1:3], strict=True):
        assert row.output == alone(method, prompt, n=40)


def test_waiting_rows_enter_in_the_order_in_which_they_came() -> None:
    batch = engine("chain").open(2)
    rows = [add(batch, prompts()[i % 4], n=4 + 3 * (i % 3)) for i in range(7)]
    begun: list[int] = []
    while not batch.is_idle:
        batch.step()
        begun += [i for i, row in enumerate(rows) if (row.slot is not None or row.done) and i not in begun]
        assert sum(row.slot is not None for row in rows) <= 2
    assert begun == list(range(7))
    assert all(row.stats.queue_seconds >= 0 for row in rows)


def test_a_row_that_is_cancelled_while_it_waits_never_runs() -> None:
    batch = engine("chain").open(1)
    first, second, third = (add(batch, prompt, n=8) for prompt in prompts()[:3])
    batch.step()
    batch.cancel(second)
    drain(batch)
    assert second.output == []
    assert second.finish().finish_reason == "cancelled"
    assert first.output == alone("chain", prompts()[0], n=8)
    assert third.output == alone("chain", prompts()[2], n=8)


def test_another_thread_is_told_that_one_thread_owns_a_batch() -> None:
    batch = engine("chain").open(2)
    row = add(batch, prompts()[0])
    said: list[BaseException] = []

    def use() -> None:
        for call in (batch.step, lambda: add(batch, prompts()[1]), lambda: batch.cancel(row)):
            try:
                call()
            except InputError as error:
                said.append(error)

    other = threading.Thread(target=use)
    other.start()
    other.join()
    assert len(said) == 3
    assert all("let one thread own it" in str(error) for error in said)
    drain(batch)
    assert row.output == alone("chain", prompts()[0])


def test_a_stream_that_another_thread_collects_ends_before_the_batch_s_next_step() -> None:
    under_test = engine("chain")
    session = under_test.open(1)
    decoding = plan(under_test.target, prompts()[:1], max_new_tokens=40)
    run = under_test.start([Request(prompts()[0])], decoding, session)
    next(run.steps)
    rows, steps = run.rows, run.steps
    other = threading.Thread(target=steps.close)
    other.start()
    other.join()
    assert session.rows == rows
    session.step()
    assert session.is_idle
    assert rows[0].finish().finish_reason == "interrupted"
    fresh = add(session, prompts()[1], n=8)
    drain(session)
    assert fresh.output == alone("chain", prompts()[1], n=8)


@METHOD
def test_two_batches_of_one_model_do_not_meet(method: str) -> None:
    batches = [engine(method).open(2) for _ in range(2)]
    rows = [add(batch, prompt) for batch, prompt in zip(batches * 2, prompts(), strict=True)]
    while not all(batch.is_idle for batch in batches):
        for batch in batches:
            batch.step()
    for row, prompt in zip(rows, prompts(), strict=True):
        assert row.output == alone(method, prompt)


@METHOD
def test_a_step_that_is_interrupted_leaves_a_batch_that_works(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = engine(method).open(2)
    row, waiting = add(batch, prompts()[0]), [add(batch, prompt) for prompt in prompts()[1:3]]
    batch.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    said = list(row.output)
    with monkeypatch.context() as patched:
        patched.setattr(batch.context, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    assert row.finish().finish_reason == "interrupted"
    assert row.error is None
    assert row.output == said
    again = add(batch, prompts()[0])
    drain(batch)
    assert again.output == alone(method, prompts()[0])
    assert waiting[1].output == alone(method, prompts()[2])  # it had not begun


def test_a_closed_batch_says_so_and_its_rows_are_cancelled() -> None:
    batch = engine("chain").open(1)
    rows = [add(batch, prompt) for prompt in prompts()[:2]]
    batch.step()
    batch.close()
    batch.close()
    assert [row.finish().finish_reason for row in rows] == ["cancelled"] * 2
    with pytest.raises(InputError, match="closed"):
        add(batch, prompts()[0])
