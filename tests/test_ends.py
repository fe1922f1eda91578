"""Where an answer ends: end-of-text tokens, stop tokens and strings, a minimum of tokens, and grammars that meet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from checkpoints import llama, picture, tokenizer, vlm
from saccade import VLM, load
from saccade.grammar import Rollback, json_schema
from saccade.output import Output

END = 257  # of the tokenizer; the checkpoints' configurations name none
METHODS = ("plain", "chain", "dynamic-tree")
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x{", "y"]}, "b": {"type": "integer"}}, "required": ["a"]}

Surface = Callable[..., Output]


def model(method: str) -> VLM:
    return vlm("llava", "llava-draft").using(method)


def constraint(schema: Any) -> Rollback:
    pytest.importorskip("llguidance", reason="schemas need the serve or grammar extra")
    one = model("plain")
    return json_schema(schema, one.processor.tokenizer, one.target.vocab_size)


def alone(method: str, **options: Any) -> Output:
    return model(method).generate("What?", [picture()], **options)


def in_a_batch(method: str, **options: Any) -> Output:
    return model(method).generate(["Tell", "What?"], [[], [picture()]], **options)[1]


def streamed(method: str, **options: Any) -> Output:
    stream = model(method).stream("What?", [picture()], **options)
    text = "".join(chunk.text for chunk in stream)
    assert text == stream.output.text
    return stream.output


def running(method: str, **options: Any) -> Output:
    with model(method).batch(max_rows=2) as batch:
        tickets = [batch.add("Tell", **options), batch.add("What?", [picture()], **options)]
        return [ticket.result() for ticket in tickets][1]


SURFACES = pytest.mark.parametrize("answer", [alone, in_a_batch, streamed, running])
EACH = pytest.mark.parametrize("method", METHODS)


@EACH
@SURFACES
def test_a_minimum_beyond_a_whole_answer_is_given_up(answer: Surface, method: str) -> None:
    output = answer(method, logits_processor=[constraint({"enum": [1, 2]})], min_new_tokens=15, max_new_tokens=40)
    assert (output.text in "12", output.tokens[-1], output.finish_reason) == (True, END, "eos")


@EACH
def test_a_minimum_is_kept_where_the_grammar_goes_on(method: str) -> None:
    options = {"logits_processor": [constraint({"type": "integer", "minimum": 1})], "sequence_bias": {(END,): 99.0}}
    for minimum in (0, 20):
        output = alone(method, min_new_tokens=minimum, max_new_tokens=60, **options)
        assert len(str(int(output.text))) == max(minimum, 1)
        assert output.tokens[-1] == END


@EACH
@SURFACES
def test_nothing_but_its_grammar_ends_an_answer_of_a_form(answer: Surface, method: str) -> None:
    ids = model(method).processor.tokenizer.encode('{}":', add_special_tokens=False)
    options = {"logits_processor": [constraint(SCHEMA)], "max_new_tokens": 60, "sequence_bias": {(END,): 99.0}}
    whole = answer(method, **options)
    assert json.loads(whole.text)["a"] in ("x{", "y")
    for stops in ({"eos_token_id": [END, *ids]}, {"stop_strings": ["{", '"', "}"]}, {"eos_token_id": ids}):
        stopped = answer(method, **options, **stops)
        assert (stopped.tokens, stopped.finish_reason) == (whole.tokens, "eos")


@EACH
@SURFACES
def test_a_stop_string_ends_no_answer_below_its_minimum(answer: Surface, method: str) -> None:
    whole = answer(method, max_new_tokens=24).text
    assert len(whole) == 24
    for stop in (whole[3:5], whole[9:11]):
        for minimum in (0, 4, 8, 12, 24):
            output = answer(method, max_new_tokens=24, stop_strings=[stop], min_new_tokens=minimum)
            places = [at + 2 for at in range(24) if whole.startswith(stop, at) and at + 2 > minimum]
            assert output.text == whole[: min(places, default=24)]
            assert output.finish_reason == ("stop" if places else "length")


@EACH
@SURFACES
def test_the_end_that_only_the_tokenizer_names_ends_an_answer(answer: Surface, method: str) -> None:
    likely = {"sequence_bias": {(END,): 99.0}, "max_new_tokens": 6}
    output = answer(method, **likely)
    assert (output.tokens, output.finish_reason) == ([END], "eos")
    assert len(answer(method, min_new_tokens=3, **likely).tokens) == 4
    for ends in ({"eos_token_id": []}, {"eos_token_id": 40}, {"generation_config": GenerationConfig(eos_token_id=40)}):
        output = answer(method, **likely, **ends)
        assert (output.tokens, output.finish_reason) == ([END] * 6, "length"), "requested ends stand alone"


def test_ends_of_configurations_are_added_unless_they_are_words(tmp_path: Path) -> None:
    tok = tokenizer(more=["<|im_end|>"])
    turn, word = tok.convert_tokens_to_ids("<|im_end|>"), 2  # the latter a default of Llama's configuration
    folder = llama(tmp_path / "llama", tok=tok, eos_token_id=[turn, word])
    (folder / "generation_config.json").write_text('{"eos_token_id": [60], "max_new_tokens": 3}')
    one = load(folder, method="plain")
    for token, reason in ((60, "eos"), (END, "eos"), (turn, "eos"), (word, "length")):
        assert one.generate("Tell", sequence_bias={(token,): 99.0}).finish_reason == reason
