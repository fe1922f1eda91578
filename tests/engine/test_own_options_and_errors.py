"""Every row of a batch has its own options, and keeps its own mistakes to itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import METHODS, add, alone, drain, engine, prompts

from saccade.engine import Engine
from saccade.errors import InputError, ModelError
from saccade.inputs.families.family import Prompt
from saccade.processors import stateless
from saccade.verify.loose import FLy

METHOD = pytest.mark.parametrize("method", METHODS)


class Turns:
    """A stateful processor that forbids every other token: the state counts what the row has said."""

    def __init__(self) -> None:
        self.begun = 0

    def start(self, prompt: Any) -> int:
        self.begun += 1
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
def test_rows_with_options_of_their_own_say_what_they_say_alone(method: str) -> None:
    batch = engine(method).open(7)
    rows = [add(batch, prompts()[i % 4], **own) for i, own in enumerate(options())]
    drain(batch)
    for i, (row, own) in enumerate(zip(rows, options(), strict=True)):
        assert row.output == alone(method, prompts()[i % 4], **own), own


@METHOD
def test_a_stateful_processor_begins_once_per_row_and_reads_on(method: str) -> None:
    batch, turns = engine(method).open(2), Turns()
    row = add(batch, prompts()[0], n=15, logits_processor=[turns])
    add(batch, prompts()[1], n=9)
    drain(batch)
    assert turns.begun == 1
    assert all(token % 2 != place % 2 for place, token in enumerate(row.output))


def failing(at: int) -> Callable[..., Any]:
    """Raises for a row that has said ``at`` tokens (of prompt 0)."""
    length = len(prompts()[0]) + at

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= length:
            raise ZeroDivisionError("mine")
        return False if scores is None else scores  # as a criterion, or as a processor

    return processor


@METHOD
@pytest.mark.parametrize("at", [0, 1, 6])
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
    assert "not finite" in str(bad.error)
    drain(batch)
    assert good.output == alone(method, prompts()[1], n=30)


@pytest.mark.parametrize("method", ["plain", "chain"])
def test_a_picture_that_cannot_be_read_ends_its_own_row_alone(method: str) -> None:
    """Its pixels have no shape that the tower takes, which shows when the tower runs."""
    good, bad, other = prompts("image", "llava", 3)
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


@METHOD
@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_prompt_with_an_id_that_the_model_lacks_is_refused_and_no_other_row_hears_of_it(
    method: str, wrong: int
) -> None:
    batch = engine(method).open(2)
    good = add(batch, prompts()[1])
    batch.step()
    with pytest.raises(InputError, match=f"has the token id {wrong}, but this model's ids go from 0 to "):
        add(batch, Prompt((*prompts()[0].ids, wrong)))
    drain(batch)
    assert good.output == alone(method, prompts()[1])


def test_a_greedy_rule_names_the_way_out_where_the_checkpoint_itself_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine("chain")
    monkeypatch.setattr(plain.target.model.generation_config, "do_sample", True)
    batch = Engine(plain.target, plain.drafter, FLy()).open(1)
    with pytest.raises(InputError, match="generation_config ask for sampling; give do_sample=False"):
        add(batch, prompts()[0])
    row = add(batch, prompts()[0], do_sample=False)
    drain(batch)
    assert row.error is None
