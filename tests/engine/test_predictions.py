"""Rows with a prediction: plain decoding's tokens in fewer passes, and true counts, whatever it says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import saccade
from checkpoints import picture, vlm
from saccade import VLM, Output
from saccade.grammar import json_schema
from saccade.pocket import draw

LENGTH = 60
METHODS = {
    "grammar": None,
    "prompt-lookup": None,
    "suffix": None,
    "chain": "llava-draft",
    "dynamic-tree": "llava-draft",
    "static-tree": "llava-draft",
    "lookup-merge": "llava-draft",
    "tabed": "llava-draft",
    "sage": "llava-draft",
}
QUESTIONS = ("What is it?", "And this?", "Say more.", "Who is there?")
PICTURES = [[picture(shade)] for shade in range(len(QUESTIONS))]


@cache
def plain() -> list[Output]:
    return vlm("llava", method="plain").generate([*QUESTIONS], PICTURES, max_new_tokens=LENGTH)


def with_errors(text: str, every: int = 15) -> str:
    """The text with a character replaced, left out or added in turn."""
    parts = [text[at : at + every] for at in range(0, len(text), every)]
    return "".join(("#" + part[1:], part[1:], "#" + part)[number % 3] for number, part in enumerate(parts))


def expected() -> list[str | None]:
    """For every question: the answer, one with errors, one that goes on otherwise, none."""
    other = "".join(map(chr, range(40, 90)))
    return [plain()[0].text, with_errors(plain()[1].text), plain()[2].text[:40] + other, None]


def check(output: Output, prediction: str | None) -> None:
    stats = output.stats
    verified = stats.accepted_prediction_tokens + stats.rejected_prediction_tokens
    if prediction is None:
        assert not verified
    elif prediction in expected()[:2]:
        assert stats.accepted_prediction_tokens > LENGTH / 4
    assert stats.accepted_prediction_tokens <= stats.accepted_tokens
    assert stats.rejected_prediction_tokens <= stats.drafted_tokens - stats.accepted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_no_prediction_changes_a_token_in_any_method(method: str) -> None:
    model = vlm("llava", METHODS[method], method=method)
    together = model.generate([*QUESTIONS], PICTURES, prediction=expected(), max_new_tokens=LENGTH)
    alone = [
        model.generate(question, images, prediction=text, max_new_tokens=LENGTH)
        for question, images, text in zip(QUESTIONS, PICTURES, expected(), strict=True)
    ]
    for outputs in (together, alone):
        assert [output.tokens for output in outputs] == [output.tokens for output in plain()]
    for output, text in zip(together, expected(), strict=True):  # before suffix decoding knows the answers itself
        check(output, text)


def test_without_a_drafter_all_that_is_drafted_is_the_prediction_s() -> None:
    model = vlm("llava", method="grammar")
    passes = []
    for question, images, text in zip(QUESTIONS, PICTURES, expected(), strict=True):
        output = model.generate(question, images, prediction=text, max_new_tokens=LENGTH)
        stats = output.stats
        assert stats.accepted_prediction_tokens == stats.accepted_tokens == output.marks.count("draft")
        assert stats.rejected_prediction_tokens == stats.drafted_tokens - stats.accepted_tokens
        passes.append(stats.target_passes)
    assert passes[0] <= 4
    assert passes[1] <= LENGTH / 3
    assert passes[3] == LENGTH - 1


def test_plain_decoding_does_without() -> None:
    model = vlm("llava", method="plain")
    output = model.generate(QUESTIONS[0], PICTURES[0], prediction=plain()[0].text, max_new_tokens=LENGTH)
    assert (output.stats.drafted_tokens, output.stats.accepted_prediction_tokens) == (0, 0)


@pytest.mark.parametrize("method", ["grammar", "chain"])
def test_a_seed_repeats_a_sample_whoever_else_runs(method: str) -> None:
    model = vlm("llava", METHODS[method], method=method)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "max_new_tokens": LENGTH}
    together = model.generate([*QUESTIONS], PICTURES, prediction=expected(), seed=3, **options)
    for number, (question, images, text) in enumerate(zip(QUESTIONS, PICTURES, expected(), strict=True)):
        alone = model.generate(question, images, prediction=text, seed=3 + number, **options)
        assert alone.tokens == together[number].tokens
        assert alone.stats.accepted_prediction_tokens == together[number].stats.accepted_prediction_tokens


def test_requests_of_a_batch_have_their_own_predictions() -> None:
    model = vlm("llava", "llava-draft")
    with model.batch(max_rows=2) as batch:
        tickets = [
            batch.add(question, images, prediction=text, max_new_tokens=LENGTH)
            for question, images, text in zip(QUESTIONS, PICTURES, expected(), strict=True)
        ]
        for ticket, output, text in zip(tickets, plain(), expected(), strict=True):
            assert ticket.result().tokens == output.tokens
            check(ticket.output, text)


def test_a_turn_of_a_chat_may_be_the_earlier_one_edited() -> None:
    model = vlm("llava", "llava-draft")
    chats = [model.chat(), model.using("plain").chat()]
    for chat in chats:
        chat.send("Write it.", max_new_tokens=LENGTH)
    answers = [
        chat.send("Again.", prediction=chats[1].messages[-1]["content"][0]["text"], max_new_tokens=LENGTH)
        for chat in chats
    ]
    assert answers[0].tokens == answers[1].tokens


FORM = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"enum": ["cat", "cart", "dog"]}, "minItems": 3, "maxItems": 9}},
    "required": ["words"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("method", ["grammar", "chain", "dynamic-tree"])
def test_a_grammar_and_a_prediction_join_and_what_is_forbidden_is_not_drafted(method: str) -> None:
    pytest.importorskip("llguidance", reason="schemas need the serve or grammar extra")
    model = vlm("llava", "llava-draft").using(method)
    form = json_schema(FORM, model.processor.tokenizer, model.target.vocab_size)
    options: dict[str, Any] = {"logits_processor": [form], "max_new_tokens": 100}
    answer = model.using("plain").generate("Which?", **options)
    passes = []
    for text in (answer.text, answer.text.replace('"cat"', '"cow"'), '{"words": no JSON', "Hello."):
        output = model.generate("Which?", prediction=text, **options)
        assert output.tokens == answer.tokens
        passes.append(output.stats.target_passes)
    assert passes[0] <= min(passes)


@cache
def pocket() -> VLM:
    return saccade.load("pocket", dtype="float32")


@pytest.mark.parametrize(("every", "least"), [(0, 12.0), (20, 5.0), (7, 3.0)])
def test_tokens_a_pass_of_the_built_in_pair_by_the_rate_of_wrong_words(every: int, least: float) -> None:
    new = passes = 0
    for seed in range(3):
        sample = draw(seed, "receipt")
        answer = pocket().using("plain").generate(sample.question, [sample.image], max_new_tokens=LENGTH)
        words = answer.text.split(" ")
        text = " ".join("pear" if every and number % every == every - 1 else word for number, word in enumerate(words))
        for method in ("grammar", "auto"):
            output = (
                pocket().using(method).generate(sample.question, [sample.image], prediction=text, max_new_tokens=LENGTH)
            )
            assert output.tokens == answer.tokens
        output = pocket().using("grammar").generate(sample.question, [sample.image], prediction=text)
        new, passes = new + output.stats.new_tokens, passes + output.stats.target_passes + 1
    assert new / passes > least
