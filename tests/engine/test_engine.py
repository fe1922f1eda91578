"""The loop: where outputs end, what rows owe each other, what is counted, and what happens on failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kit
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import METHODS, build, engine

from families import FAMILIES
from saccade.engine import Engine, Request, Run, RunningBatch
from saccade.engine.row import DEFAULT_NEW_TOKENS, plan
from saccade.errors import InputError, ModelError
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.processors import stateless
from saccade.target_model.cache import QUANTUM

NEW = 24
DRAFTING = pytest.mark.parametrize("method", [*METHODS, "dynamic"])


def prompts() -> Sequence[Prompt]:
    return kit.prompts()[:3]


def requests(seed: int = 0) -> list[Request]:
    return [Request(prompt, seed=seed + row) for row, prompt in enumerate(prompts())]


def reference(row: int) -> list[int]:
    return FAMILIES["llama"].reference("text", rows=3, n=NEW)[row]


def run(method: str, asked: Sequence[Request] | None = None, n: int = NEW, **options: Any) -> list[Output]:
    return engine(method).generate(asked or requests(), max_new_tokens=n, **options)


def start(under_test: Engine, session: RunningBatch | None = None, **options: Any) -> Run:
    decoding = plan(under_test.target, prompts(), max_new_tokens=NEW, **options)
    return under_test.start(requests(), decoding, session)


# --------------------------------------------------------------------------- where outputs end


@DRAFTING
@settings(max_examples=3, deadline=None)
@given(row=st.integers(0, 2), place=st.integers(0, NEW - 1))
def test_an_end_of_sequence_anywhere_ends_its_row_and_no_other(method: str, row: int, place: int) -> None:
    """The end is a token that occurs at a random place of one row, and maybe in others."""
    end = reference(row)[place]
    for index, output in enumerate(run(method, eos_token_id=end)):
        expected = reference(index)
        cut = expected.index(end) + 1 if end in expected else NEW
        assert output.tokens == expected[:cut]
        assert output.finish_reason == ("eos" if end in expected else "length")


@DRAFTING
@settings(max_examples=3, deadline=None)
@given(row=st.integers(0, 2), place=st.integers(1, NEW - 1))
def test_a_stopping_criterion_anywhere_ends_its_row_and_no_other(method: str, row: int, place: int) -> None:
    pair = reference(row)[place - 1 : place + 1]

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([ids[0, -2:].tolist() == pair])

    for index, output in enumerate(run(method, stopping_criteria=[stateless(criterion)])):
        text = [prompts()[index].ids[-1], *reference(index)]
        ends = [i for i in range(1, len(text)) if text[i - 1 : i + 1] == pair]
        cut = ends[0] if ends else NEW
        assert output.tokens == reference(index)[:cut]
        assert output.finish_reason == ("stop" if ends else "length")


@DRAFTING
@settings(max_examples=3, deadline=None)
@given(n=st.integers(1, NEW))
@example(n=1)
def test_max_new_tokens_cuts_anywhere_in_a_block(method: str, n: int) -> None:
    for row, output in enumerate(run(method, n=n)):
        assert output.tokens == reference(row)[:n]
        stats = output.stats
        assert 1 <= stats.prefill_tokens <= n
        assert (stats.target_passes == 0) == (n == stats.prefill_tokens)


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


def test_an_interrupted_run_gives_what_there_is() -> None:
    going = start(engine("chain"))
    for _ in range(3):
        next(going.steps)
    for row, output in enumerate(going.outputs):
        assert output.finish_reason == "interrupted"
        assert 3 <= len(output.tokens) < NEW
        assert output.tokens == reference(row)[: len(output.tokens)]


# --------------------------------------------------------------------------- rows and their neighbours


def counted(output: Output) -> dict[str, Any]:
    """All but times and what is guessed for the last place or beyond it: a tree is as deep as the neighbour with most
    room wants."""
    beyond = ("drafted_tokens", "accepted_tokens", "accepted_histogram", "acceptance_by_depth")
    stats = {k: v for k, v in output.stats.as_dict().items() if "seconds" not in k and k not in beyond}
    return {**output.as_dict(), "marks": output.marks[:-1], "stats": stats}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@DRAFTING
def test_neither_tokens_nor_counts_depend_on_the_neighbours(method: str, do_sample: bool) -> None:
    options = {"do_sample": True, "temperature": 0.8} if do_sample else {}
    together = [counted(o) for o in run(method, requests(seed=5), **options)]
    alone = [counted(run(method, [request], **options)[0]) for request in requests(seed=5)]
    assert together == alone
    turned = [counted(o) for o in run(method, requests(seed=5)[::-1], **options)]
    assert turned == together[::-1]


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
        assert 0 <= cut <= (drafter.max_depth if drafter else 0)
        assert stats.accepted_tokens <= judged + stats.prefill_tokens
        assert judged <= stats.drafted_tokens
        if drafter is None:
            assert stats.prefill_tokens == 1
            assert stats.drafted_tokens == 0
            assert stats.target_passes == stats.new_tokens - 1
        elif method != "lookup":
            assert stats.accepted_tokens > 0
            assert stats.drafted_tokens <= (stats.target_passes + 1) * (drafter.max_nodes - 1)
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
    nodes = under_test.drafter.max_nodes if under_test.drafter else 1
    cache = session.context.cache
    for row in range(3):
        needed = len(prompts()[row]) + NEW + nodes
        assert needed <= cache.capacity(row) < needed + QUANTUM
    per_entry = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head width, bytes of a float
    assert cache.nbytes == cache.slots * per_entry
    assert cache.slots <= sum(cache.capacity(row) for row in range(3)) + 3 * QUANTUM


@DRAFTING
def test_a_second_turn_gives_the_tokens_of_one_shot_and_prefills_only_what_is_new(method: str) -> None:
    under_test = engine(method)
    session = under_test.open(3)
    first = under_test.generate(requests(), max_new_tokens=9, session=session)
    again = [
        Request(Prompt((*prompt.ids, *output.tokens, 30 + row, 40, 50)))
        for row, (prompt, output) in enumerate(zip(prompts(), first, strict=True))
    ]
    passes = []
    run = session.context.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session.context, "run", lambda pieces: passes.append(pieces) or run(pieces))
        second = under_test.generate(again, max_new_tokens=12, session=session)
    # the last answer's last token, which no forward has seen, and three new ones; behind them only guesses
    assert [piece.logits_from + 1 for piece in passes[0]] == [4, 4, 4]
    one_shot = under_test.generate(again, max_new_tokens=12)
    for row in range(3):
        assert second[row].tokens == one_shot[row].tokens
        assert second[row].stats.reused_tokens == len(again[row].prompt) - 4
        assert one_shot[row].stats.reused_tokens == 0


# --------------------------------------------------------------------------- failures and refusals


@DRAFTING
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_logits_that_are_not_finite_stop_the_run_and_name_the_step(method: str, steps: int) -> None:
    under_test = build(method)
    going = start(under_test)
    for _ in range(steps):
        next(going.steps)
    with torch.no_grad():
        under_test.target.model.get_output_embeddings().weight[50] = float("nan")
    with pytest.raises(ModelError, match=f"logits are not finite at step {steps + 1} "):
        next(going.steps)


def test_a_drafter_that_gives_nan_changes_no_token() -> None:
    under_test: Any = build("chain")
    with torch.no_grad():
        under_test.drafter.model.model.get_output_embeddings().weight.fill_(float("nan"))
    outputs = under_test.generate(requests(), max_new_tokens=NEW)
    assert [o.tokens for o in outputs] == [reference(row) for row in range(3)]


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
    (row,) = plan(target, [prompt]).rows
    assert row.max_new_tokens == min(DEFAULT_NEW_TOKENS, target.config.max_position_embeddings - len(prompt))
    (short,) = plan(target, [prompt], max_length=len(prompt) + 3).rows
    assert short.max_new_tokens == 3
