"""Rows join and leave between steps, each with its own options, and keep their mistakes to themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import METHODS, Forwards, add, alone, engine, prompts

from harness import drain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.errors import InputError, ModelError
from saccade.inputs.families.family import Prompt
from saccade.processors import stateless
from saccade.verify.loose import FLy

METHOD = pytest.mark.parametrize("method", METHODS)


@METHOD
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_arrive_and_are_cancelled_at_any_time_give_what_they_give_alone(method: str, seed: int) -> None:
    chance = random.Random(seed)
    batch = engine(method).open(3, prefill_chunk=chance.choice([1, 5, 512]))
    added, cancelled = [], set()
    left = [chance.randrange(4) for _ in range(8)]
    while left or not batch.is_idle:
        if left and chance.random() < 0.5:
            which, number = left.pop(), len(added)
            options = {"n": 6 + 5 * (number % 4), "seed": number}
            if number % 2:
                options |= {"do_sample": True, "temperature": 0.5 + 0.1 * number}
            added.append((add(batch, prompts()[which], **options), which, options))
        if added and chance.random() < 0.05:
            row = chance.choice(added)[0]
            if not row.done:
                batch.cancel(row)
                cancelled.add(row)
        batch.step()
    for row, which, options in added:
        expected = alone(method, prompts()[which], **options)
        assert row.output == (expected[: len(row.output)] if row in cancelled else expected)
        assert row.error is None


@METHOD
@pytest.mark.parametrize("how", ["ends", "is cancelled"])
def test_a_row_that_is_over_costs_nothing_from_the_next_step_on(
    how: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine(method).open(3)
    over = add(batch, prompts()[0], n=1 if how == "ends" else 40)
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


@pytest.mark.parametrize("method", ["chain", "static"])
def test_draft_tokens_count_as_they_do_alone_beside_rows_that_end_sooner(method: str) -> None:
    counts = []
    for together in (True, False):
        drafted, batch = [], engine(method).open(3)
        for n, prompt in zip((2, 20, 7), prompts(), strict=False):
            batch = batch if together else engine(method).open(1)
            drafted.append(add(batch, prompt, n=n))
            if not together:
                drain(batch)
        drain(batch)
        counts.append([row.stats.drafted_tokens for row in drafted])
    assert counts[0] == counts[1]


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


def test_a_batch_refuses_a_second_thread() -> None:
    batch = engine("chain").open(2)
    row = add(batch, prompts()[0])
    with ThreadPoolExecutor(1) as other:
        for call in (batch.step, lambda: add(batch, prompts()[1]), lambda: batch.cancel(row)):
            with pytest.raises(InputError, match="let one thread own it"):
                other.submit(call).result()
    drain(batch)
    assert row.output == alone("chain", prompts()[0])


def test_a_stream_that_another_thread_collects_ends_before_the_batch_s_next_step() -> None:
    under_test = engine("chain")
    session = under_test.open(1)
    decoding = plan(under_test.target, prompts()[:1], max_new_tokens=40)
    run = under_test.start([Request(prompts()[0])], decoding, session)
    next(run.steps)
    rows, steps = run.rows, run.steps
    with ThreadPoolExecutor(1) as other:
        other.submit(steps.close).result()
    assert session.rows == rows
    session.step()
    assert session.is_idle
    assert rows[0].finish().finish_reason == "interrupted"
    fresh = add(session, prompts()[1], n=8)
    drain(session)
    assert fresh.output == alone("chain", prompts()[1], n=8)


def test_a_step_that_is_interrupted_leaves_a_batch_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = engine("chain").open(2)
    row, waiting = add(batch, prompts()[0]), [add(batch, prompt) for prompt in prompts()[1:3]]
    batch.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = list(row.output)
    with monkeypatch.context() as patched:
        patched.setattr(batch.context, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    assert row.finish().finish_reason == "interrupted"
    assert row.error is None
    assert row.output == before
    again = add(batch, prompts()[0])
    drain(batch)
    assert again.output == alone("chain", prompts()[0])
    assert waiting[1].output == alone("chain", prompts()[2])  # it had not begun


def test_a_closed_batch_says_so_and_its_rows_are_cancelled() -> None:
    batch = engine("chain").open(1)
    rows = [add(batch, prompt) for prompt in prompts()[:2]]
    batch.step()
    batch.close()
    batch.close()
    assert [row.finish().finish_reason for row in rows] == ["cancelled"] * 2
    with pytest.raises(InputError, match="closed"):
        add(batch, prompts()[0])


# --------------------------------------------------------------------------- options and mistakes


class Turns:
    """A stateful processor that forbids every other token: the state counts the row's tokens."""

    def start(self, prompt: Any) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def scores(self, state: int, scores: torch.Tensor) -> torch.Tensor:
        scores[state % 2 :: 2] = float("-inf")
        return scores


def options() -> list[dict[str, Any]]:
    return [
        {"n": 25},
        {"n": 9, "do_sample": True, "temperature": 0.7, "seed": 3},
        {"n": 17, "do_sample": True, "temperature": 1.3, "top_k": 20, "seed": 4},
        {"n": 21, "repetition_penalty": 1.3},
        {"n": 13, "logits_processor": [Turns()]},
        {"n": 13, "do_sample": True, "logits_processor": [Turns()], "seed": 5},
        {"n": 30, "eos_token_id": alone("plain", prompts()[2], n=12)[-1]},
    ]


@METHOD
def test_rows_with_options_of_their_own_give_what_they_give_alone(method: str) -> None:
    batch = engine(method).open(7)
    rows = [add(batch, prompts()[i % 4], **own) for i, own in enumerate(options())]
    drain(batch)
    for i, (row, own) in enumerate(zip(rows, options(), strict=True)):
        assert row.output == alone(method, prompts()[i % 4], **own), own


def failing(at: int) -> Callable[..., Any]:
    """Raises for a row that has emitted ``at`` tokens (of prompt 0)."""
    length = len(prompts()[0]) + at

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= length:
            raise ZeroDivisionError("mine")
        return False if scores is None else scores  # as a criterion, or as a processor

    return processor


@METHOD
@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("what", ["logits_processor", "stopping_criteria"])
def test_a_row_whose_processor_or_criterion_raises_fails_alone(method: str, at: int, what: str) -> None:
    batch = engine(method).open(3)
    mine: dict[str, Any] = {what: [stateless(failing(at))]}
    stateful = {"logits_processor": [Turns()], "n": 15}
    bad = add(batch, prompts()[0], n=30, **mine)
    good, turns = add(batch, prompts()[1], n=30), add(batch, prompts()[2], **stateful)
    drain(batch)
    assert isinstance(bad.error, ZeroDivisionError)
    assert bad.output == alone(method, prompts()[0], n=30)[: len(bad.output)]
    assert good.output == alone(method, prompts()[1], n=30)
    assert turns.output == alone(method, prompts()[2], **stateful | {"logits_processor": [Turns()]})


@METHOD
def test_one_row_without_finite_logits_fails_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = engine(method).open(2)
    bad, good = (add(batch, prompt, n=30) for prompt in prompts()[:2])
    for _ in range(2):
        batch.step()
    run, slot = batch.context.run, bad.slot

    def spoilt(pieces: Any) -> Any:
        readings = run(pieces)
        for piece, reading in zip(pieces, readings, strict=True):
            if slot in piece.rows:
                reading.logits[list(piece.rows).index(slot)] = float("nan")
        return readings

    monkeypatch.setattr(batch.context, "run", spoilt)
    batch.step()
    monkeypatch.undo()
    assert isinstance(bad.error, ModelError)
    assert "not finite at step 3 " in str(bad.error)
    drain(batch)
    assert good.output == alone(method, prompts()[1], n=30)


@pytest.mark.parametrize("method", ["plain", "chain"])
def test_a_picture_that_cannot_be_read_ends_its_own_row_alone(method: str) -> None:
    """Its pixels have no shape that the tower takes, which shows when the tower runs."""
    good, bad, other = prompts("image", "llava")[:3]
    medium = replace(bad.media[0], tensors={"pixel_values": torch.zeros(1, 3, 5, 5)}, digest="broken")
    batch = engine(method, "llava").open(3)
    first = add(batch, good)
    batch.step()
    broken, last = add(batch, replace(bad, media=(medium,))), add(batch, other)
    drain(batch)
    assert broken.error is not None
    assert broken.output == []
    assert first.output == alone(method, good, "llava")
    assert last.output == alone(method, other, "llava")


def test_a_row_that_fails_as_it_is_admitted_is_returned_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = engine("plain").open(2)
    begin = batch.context.prefill

    def refuse(slot: int, prompt: Any) -> Any:
        if prompt is prompts()[0]:
            raise InputError("refused")
        return begin(slot, prompt)

    monkeypatch.setattr(batch.context, "prefill", refuse)
    bad = add(batch, prompts()[0])
    assert [row for row, _ in batch.step()] == [bad], "also without another row"
    bad, good = add(batch, prompts()[0]), add(batch, prompts()[1])
    assert [row for row, step in batch.step() if step.finished] == [bad]
    drain(batch)
    assert good.output == alone("plain", prompts()[1])


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_prompt_with_an_id_that_the_model_lacks_is_refused_and_no_other_row_is_harmed(wrong: int) -> None:
    batch = engine("chain").open(2)
    good = add(batch, prompts()[1])
    batch.step()
    with pytest.raises(InputError, match=f"has the token id {wrong}, but this model's ids go from 0 to "):
        add(batch, Prompt((*prompts()[0].ids, wrong)))
    drain(batch)
    assert good.output == alone("chain", prompts()[1])


def test_a_greedy_rule_names_the_way_out_where_the_checkpoint_itself_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine("chain")
    monkeypatch.setattr(plain.target.model.generation_config, "do_sample", True)
    batch = Engine(plain.target, plain.drafter, FLy()).open(1)
    with pytest.raises(InputError, match="generation_config ask for sampling; give do_sample=False"):
        add(batch, prompts()[0])
    row = add(batch, prompts()[0], do_sample=False)
    drain(batch)
    assert row.error is None
