"""Processors and criteria that keep something, or that look at which row they have: right, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

import harness
from families import FAMILIES, FIRST_WORD, LAST_WORD, VOCAB, reference_greedy
from processes import exit_code_of, run_anew
from saccade import hf
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.processors import StatefulProcessor, stateless

CASE = FAMILIES["llama"]
NEW = 20


def prompts() -> list[Prompt]:
    return [request.prompt for request in harness.requests("llama")]


def run(method: str, rows: int = 3, **options: Any) -> list[list[int]]:
    asked = harness.requests("llama", rows=rows)
    return harness.tokens(harness.engine("llama", method).generate(asked, max_new_tokens=NEW, **options))


METHOD = pytest.mark.parametrize("method", ["plain", "lookup", "chain", "static"])


# --------------------------------------------------------------------------- rows


class AddsToRows(LogitsProcessor):
    """``scores[i] += bias[i]``, row by row and in place."""

    stateless = True

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(len(self.bias)):
            scores[row] += self.bias[row]
        return scores


def bias(rows: int) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5))


@METHOD
def test_a_processor_that_looks_at_the_row_sees_every_row_s_own(method: str) -> None:
    inputs = CASE.inputs("text", rows=3)
    wanted = reference_greedy(CASE.model(), inputs, NEW, logits_processor=LogitsProcessorList([AddsToRows(bias(3))]))
    assert wanted != CASE.reference("text", rows=3, n=NEW)
    assert run(method, logits_processor=[AddsToRows(bias(3))]) == wanted


@pytest.mark.parametrize("each", [1, 2])
def test_rows_are_distinguished_inside_generate_too(each: int) -> None:
    inputs = CASE.inputs("text", rows=3)
    options = {
        "logits_processor": LogitsProcessorList([AddsToRows(bias(3 * each))]),
        "max_new_tokens": NEW,
        "num_return_sequences": each,
        "do_sample": each > 1,
        "top_k": 1 if each > 1 else 50,  # so that the two ways draw the same
    }
    theirs = CASE.model().generate(**inputs, **options)
    ours = CASE.model().generate(**inputs, **options, custom_generate=hf.speculate(CASE.draft_model()))
    assert ours.tolist() == theirs.tolist()


def test_transformers_own_processors_for_a_batch_are_cut_to_each_row() -> None:
    inputs = CASE.inputs("text", rows=3)
    ids = inputs["input_ids"]
    words = range(FIRST_WORD, LAST_WORD + 1)
    own = [
        EncoderRepetitionPenaltyLogitsProcessor(0.5, ids),
        EncoderNoRepeatNGramLogitsProcessor(1, ids),
        PrefixConstrainedLogitsProcessor(
            lambda row, ids: [w for w in words if (w + int(ids[-1]) + row) % 3], num_beams=1
        ),
    ]
    wanted = reference_greedy(CASE.model(), inputs, NEW, logits_processor=LogitsProcessorList(own))
    assert run("static", logits_processor=own) == wanted


def test_a_processor_that_changes_the_shape_is_named() -> None:
    with pytest.raises(InputError, match=r"<lambda> returned scores of shape \(3, 7\) for 3 rows of 192"):
        run("plain", logits_processor=[stateless(lambda ids, scores: scores[:, :7])])


# --------------------------------------------------------------------------- state


class Alternating:
    """Even and odd tokens in turns, and none again that came twice: what a grammar's matcher does."""

    def __init__(self) -> None:
        self.started: list[list[int]] = []

    def start(self, prompt: Sequence[int]) -> tuple[int, ...]:
        self.started.append(list(prompt))
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        assert not forbidden(state)[token], "plain decoding never comes here"
        return (*state, token)

    def scores(self, state: tuple[int, ...], scores: Tensor) -> Tensor:
        return scores.masked_fill_(forbidden(state), float("-inf"))


def forbidden(answer: Sequence[int]) -> Tensor:
    mask = torch.arange(VOCAB) % 2 != len(answer) % 2
    for token in {t for t in answer if answer.count(t) > 1}:
        mask[token] = True
    return mask


class Advances(LogitsProcessor):
    """The same as grammar matchers are given to `generate`: it takes in the last token of every call."""

    def __init__(self) -> None:
        self.answer: list[int] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.answer = [] if self.answer is None else [*self.answer, int(input_ids[0, -1])]
        return scores.masked_fill(forbidden(self.answer), float("-inf"))


@cache
def constrained() -> list[list[int]]:
    """`generate`'s answers under a processor of each row's own."""
    answers = []
    for row in range(3):
        processors = LogitsProcessorList([Advances()])
        answers += reference_greedy(CASE.model(), CASE.row_inputs("text", row), NEW, logits_processor=processors)
    return answers


@METHOD
def test_a_state_follows_every_branch_of_a_tree(method: str) -> None:
    processor = Alternating()
    assert isinstance(processor, StatefulProcessor)
    assert run(method, logits_processor=[processor]) == constrained()
    assert sorted(processor.started) == sorted(list(p.ids) for p in prompts())


def test_a_state_stands_in_order_with_other_processors() -> None:
    sampled = run("static", logits_processor=[Alternating()], do_sample=True, temperature=1.5, repetition_penalty=1.3)
    for tokens in sampled:
        assert all(not forbidden(tokens[:n])[token] for n, token in enumerate(tokens))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_state_is_kept_inside_generate_too(rows: int) -> None:
    inputs = CASE.inputs("text", rows=rows)
    own = hf.speculate(CASE.draft_model(), gamma=3)
    out = CASE.model().generate(**inputs, max_new_tokens=NEW, logits_processor=[Alternating()], custom_generate=own)
    assert out[:, inputs["input_ids"].shape[1] :].tolist() == constrained()[:rows]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("processor", [Advances(), lambda ids, scores: scores], ids=["class", "function"])
def test_what_may_keep_something_is_refused(processor: Any, rows: int) -> None:
    message = "may have state between its calls, .* mark it by saccade.processors.stateless"
    with pytest.raises(InputError, match=message):
        run("plain", rows, logits_processor=[processor])
    with pytest.raises(InputError, match=message):
        CASE.model().generate(
            **CASE.inputs("text", rows=rows), logits_processor=[processor], custom_generate=hf.speculate()
        )


def test_both_modules_are_there_after_importing_the_package_alone() -> None:
    code = "import saccade; saccade.processors.stateless, saccade.grammar.json_schema"
    assert exit_code_of(lambda: run_anew(code)) == 0


def test_what_takes_no_mark_is_refused_where_it_is_marked() -> None:
    with pytest.raises(InputError, match="len cannot be marked"):
        stateless(len)


# --------------------------------------------------------------------------- criteria


class Counts:
    """Ends an answer at its seventh call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(ids),), self.calls >= 7)


@METHOD
def test_a_criterion_of_one_row_may_count_its_calls(method: str) -> None:
    assert run(method, 1, stopping_criteria=[Counts()]) == CASE.reference("text", n=7)


def test_a_criterion_that_several_rows_share_may_not() -> None:
    message = "criterion Counts is shared by 3 rows, .* and may have state"
    with pytest.raises(InputError, match=message):
        run("chain", stopping_criteria=[Counts()])
    with pytest.raises(InputError, match=message):
        CASE.model().generate(
            **CASE.inputs("text", rows=3), stopping_criteria=[Counts()], custom_generate=hf.speculate()
        )


class EndsRows:
    """Every row at a length of its own."""

    stateless = True

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([ids.shape[1] >= n for n in self.lengths])


@METHOD
def test_a_criterion_that_looks_at_the_row_sees_every_row_s_own(method: str) -> None:
    ends = [len(p) + n for p, n in zip(prompts(), (4, 11, 7), strict=True)]
    answers = run(method, stopping_criteria=[EndsRows(ends)])
    assert answers == [a[:n] for a, n in zip(CASE.reference("text", rows=3), (4, 11, 7), strict=True)]


def test_a_criterion_that_reads_scores_is_refused() -> None:
    with pytest.raises(InputError, match="ConfidenceCriteria reads scores"):
        run("chain", 1, stopping_criteria=[ConfidenceCriteria(0.4)])


class ReadsScores:
    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> bool:
        return bool(scores[-1].max() > 100)


def test_scores_that_generate_would_give_to_criteria_are_refused_when_they_are_read() -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "custom_generate": hf.speculate()}
    with pytest.raises(InputError, match="criterion ReadsScores reads scores"):
        CASE.model().generate(**CASE.inputs("text"), **options, stopping_criteria=[ReadsScores()])
