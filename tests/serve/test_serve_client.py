"""The official client of OpenAI against a live server."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from live_server import Live, asks, live, uri

import saccade
from checkpoints import vlm
from media_files import data_uri, film
from saccade import load
from saccade.serve.configuration import ModelEntry


def test_a_picture_is_answered_whole_and_streamed_alike(shared: Live) -> None:
    client, messages = shared.client(), asks("What is it?", uri(3), uri(4, (60, 40)))
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
    with client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    assert whole.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_example_of_the_page_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```\w*\n(from openai import OpenAI\n.*?)```", page, re.DOTALL)
    with live([(ModelEntry("pocket"), load("pocket", dtype="float32"))]) as server:
        code = code.replace("http://127.0.0.1:8000/v1", server.url).replace(
            "data:image/png;base64,...", uri(3, (64, 64))
        )
        exec(code, {})
    text, accepted = capsys.readouterr().out.rsplit(" ", 1)
    assert text
    assert int(accepted) > 0


def test_a_video_is_read_from_its_data_uri(shared: Live, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos need the video extra")
    path = tmp_path / "film.mp4"
    path.write_bytes(film([np.full((32, 32, 3), shade * 30, np.uint8) for shade in range(8)], rate=4))
    video = data_uri(path.read_bytes(), "video/mp4")
    parts = [{"type": "video_url", "video_url": {"url": video}}, {"type": "text", "text": "What happens?"}]
    answer = shared.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=9, extra_body={"num_frames": 4}
    )
    expected = vlm("qwen", "qwen-draft").generate("What happens?", videos=[str(path)], num_frames=4, max_new_tokens=9)
    assert answer.choices[0].message.content == expected.text


def test_log_probabilities_are_the_targets_own(shared: Live) -> None:
    messages = asks("Name one.")
    answer = shared.client().chat.completions.create(
        model="words", messages=messages, max_tokens=6, logprobs=True, top_logprobs=3
    )
    model = vlm("llama")
    prompt = model.processor.prompt(messages)
    output = model.generate(messages, max_new_tokens=6)
    ids = torch.tensor([[*prompt.ids, *output.tokens]])
    with torch.no_grad():
        logits = model.target.model(ids).logits
    logits = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    content = answer.choices[0].logprobs.content
    assert len(content) == len(output.tokens)
    for place, (entry, token) in enumerate(zip(content, output.tokens, strict=True)):
        assert math.isclose(entry.logprob, float(logits[place, token]), abs_tol=1e-4)  # float32, other kernels
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(logits[place].topk(3).values.tolist(), abs=1e-4)
        assert entry.top_logprobs[0].token == entry.token


def test_log_probabilities_stream_one_per_token(shared: Live) -> None:
    request = {"model": "tiny", "messages": asks("More?"), "max_tokens": 15, "logprobs": True, "seed": 2}
    request |= {"temperature": 0.8}
    whole = shared.client().chat.completions.create(**request)
    chunks = list(shared.client().chat.completions.create(**request, stream=True))
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
    assert [entry for part in parts for entry in part] == whole.choices[0].logprobs.content
    assert len(whole.choices[0].logprobs.content) == 15


@pytest.mark.parametrize("chosen", range(3))
def test_a_stop_string_ends_the_text_before_it(shared: Live, chosen: int) -> None:
    client, messages = shared.client(), asks("Say much.")
    text = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30).choices[0].message.content
    stop = [text[4:6], text[9:13], text[3]][chosen]
    body = {"model": "tiny", "messages": messages, "max_tokens": 30, "stop": [stop, "never!"]}
    (whole,) = client.chat.completions.create(**body).choices
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    assert whole.message.content == "".join(c.delta.content or "" for c in streamed) == text[: text.index(stop)]
    assert whole.finish_reason == streamed[-1].finish_reason == "stop"


def test_a_trace_has_every_token_with_its_mark_and_the_steps_tree(shared: Live) -> None:
    chunks = shared.client().chat.completions.create(
        model="tiny",
        messages=asks("Why?", uri(2)),
        max_tokens=20,
        stream=True,
        extra_body={"saccade": {"trace": True}, "speculation": {"method": "static-tree"}},
    )
    text, tokens, stats = "", [], None
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        own = (chunk.model_extra or {}).get("saccade")
        if own is None:
            continue
        tokens += own["tokens"]
        stats = own.get("stats", stats)
        tree = own["tree"]
        if tree is not None:
            assert len(tree["tokens"]) == len(tree["parents"])
            accepted = [tree["tokens"][node]["id"] for node in tree["path"][1:]]
            assert accepted == [token["id"] for token in own["tokens"]][: len(accepted)]
    assert "".join(token["text"] for token in tokens) == text
    assert {token["mark"] for token in tokens} == {"target", "draft"}
    assert stats["method"] == "static-tree"
    assert stats["accepted_tokens"] == sum(token["mark"] == "draft" for token in tokens)


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["colour", "count", "sure"],
    "additionalProperties": False,
}


def valid(answer: str) -> bool:
    found = json.loads(answer)
    right = found["colour"] in ("red", "green", "blue") and isinstance(found["sure"], bool)
    return right and set(found) == {"colour", "count", "sure"} and 0 <= found["count"] <= 99


def test_answers_of_a_schema_are_valid_with_speculation(writer: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "object", "schema": SCHEMA, "strict": True}}
    answers = set[str]()
    for number in range(6):
        body = {"messages": asks(f"Object {number}"), "max_tokens": 120, "temperature": number % 3, "seed": number}
        answer = writer.client().chat.completions.create(model="words", response_format=form, **body)
        assert answer.choices[0].finish_reason == "stop"
        answers.add(answer.choices[0].message.content)
    assert all(valid(answer) and " " not in answer and "\n" not in answer for answer in answers)
    assert len(answers) > 1


OPEN = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": OPEN}}}),
    ("/v1/chat/completions", {"guided_json": OPEN}),
    ("/v1/completions", {"structured_outputs": {"json": json.dumps(OPEN)}}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "object", "schema": OPEN}}}),
]


@pytest.mark.parametrize(("path", "form"), FORMS, ids=str)
def test_an_object_has_the_properties_that_its_schema_names(writer: Live, path: str, form: dict[str, Any]) -> None:
    for number in range(4):
        asked: dict[str, Any] = {
            "chat": {"messages": asks(f"Object {number}")},
            "responses": {"input": f"Object {number}"},
        }
        body = next((asked[kind] for kind in asked if kind in path), {"prompt": f"Object {number}"})
        limit = {"max_output_tokens" if "input" in body else "max_tokens": 120}
        status, answer = writer.post({**body, **limit, "temperature": 1.0, "seed": number, **form}, path)
        assert status == 200, answer
        if "input" in body:
            assert valid(answer["output"][-1]["content"][0]["text"])
        else:
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert valid(choice["message"]["content"] if "message" in choice else choice["text"])


def test_white_space_and_the_order_of_properties_are_the_requests_own(writer: Live) -> None:
    both = []
    for names, whitespace in ((("colour", "count"), False), (("count", "colour"), True)):
        schema = {**SCHEMA, "properties": {name: SCHEMA["properties"][name] for name in names}, "required": names}
        form = {"type": "json_schema", "json_schema": {"schema": schema}, "whitespace": whitespace}
        body = {"messages": asks("Thing"), "max_tokens": 120, "response_format": form, "temperature": 1.5, "seed": 3}
        both.append(writer.post(body)[1]["choices"][0]["message"]["content"])
    assert [list(json.loads(answer)) for answer in both] == [["colour", "count"], ["count", "colour"]]
    shortest = [json.dumps(json.loads(answer), separators=(",", ":")) for answer in both]
    assert shortest[0] == both[0]
    assert shortest[1] != both[1]


def test_models_are_listed_with_their_context_and_methods(shared: Live) -> None:
    client = shared.client()
    found = {model.id: model for model in client.models.list()}
    assert list(found) == ["tiny", "words"]
    assert found["tiny"].max_model_len == 1024
    assert "sage" in found["tiny"].saccade["methods"]
    assert "chain" not in found["words"].saccade["methods"], "it has no draft model"
    assert found["tiny"].saccade["lossy"]
    assert not {"off", "chain", "plain", "short"} & set(found["tiny"].saccade["lossy"])
    assert client.models.retrieve("words").id == "words"
    for path in ("models", "models/words"):  # as Anthropic's package asks for them
        assert shared.call("GET", f"/v1/{path}?beta=true")[0] == 200


def test_exact_is_granted_by_models_that_have_it(shared: Live) -> None:
    exact = vlm("qwen", "qwen-draft", dtype="bfloat16", exact=True)
    rough = vlm("qwen", "qwen-draft", dtype="bfloat16")
    with live([(ModelEntry("exact"), exact), (ModelEntry("rough"), rough)]) as server:
        about = {model.id: model.saccade for model in server.client().models.list()}
        assert [about[name]["exact"] for name in ("exact", "rough")] == [True, False]
        assert "exact mode (--exact)" in about["rough"]["caveat"]
        assert not about["exact"]["caveat"]
        body = {"model": "exact", "messages": asks("Why?"), "max_tokens": 12, "temperature": 0, "exact": True}
        chain, plain = (server.post({**body, "speculation": method}) for method in ("chain", "off"))
        assert chain[0] == plain[0] == 200
        assert chain[1]["choices"] == plain[1]["choices"]
        for fields, reason in (
            ({"model": "rough"}, "not loaded in exact mode"),
            ({"speculation": {"method": "chain", "rule": "fly"}}, "is lossy"),
        ):
            status, answer = server.post({**body, **fields})
            assert status == 400
            assert answer["error"]["param"] == "exact"
            assert reason in answer["error"]["message"]
    assert not shared.client().models.retrieve("words").saccade["caveat"]


def test_errors_of_the_client_are_the_clients_classes(shared: Live) -> None:
    client, messages = shared.client(), asks("Hello?")
    with pytest.raises(openai.NotFoundError, match="expected one of tiny, words"):
        client.chat.completions.create(model="huge", messages=messages)
    with pytest.raises(openai.BadRequestError, match="context is 1024") as problem:
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=5000)
    assert problem.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="context is 1024"):
        list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=5000, stream=True))


@pytest.mark.parametrize("speculation", ["off", "chain"])
def test_an_answer_that_ignores_its_end_has_all_requested_tokens(
    shared: Live, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = shared.service.models["tiny"].vlm.target.model.generation_config
    monkeypatch.setattr(defaults, "eos_token_id", 40)
    body = {"messages": asks("Hello?"), "max_tokens": 9, "speculation": speculation, "logit_bias": {"40": 100}}
    for ignored, expected in ((False, ("stop", 1)), (True, ("length", 9))):
        _, answer = shared.post({**body, "ignore_eos": ignored})
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == expected
    status, answer = shared.post({**body, "ignore_eos": True, "response_format": {"type": "json_object"}})
    assert (status, answer["error"]["param"]) == (400, "ignore_eos")


def both_ways(server: Live, body: dict[str, Any]) -> tuple[str, str]:
    """Text and reason of a whole answer, which a stream of it repeats."""
    status, answer = server.post({"temperature": 0, **body})
    assert status == 200, answer
    (choice,) = answer["choices"]
    choices = [chunk["choices"][0] for chunk in server.stream({"temperature": 0, **body, "stream": True})]
    assert "".join(each["delta"].get("content") or "" for each in choices) == choice["message"]["content"]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    return choice["message"]["content"], choice["finish_reason"]


def test_nothing_cuts_a_form_and_a_minimum_breaks_none(writer: Live) -> None:
    body = {"messages": asks("Object"), "max_tokens": 120, "guided_json": OPEN}
    whole = both_ways(writer, body)
    assert valid(whole[0])
    ids = writer.service.models["words"].vlm.processor.tokenizer.encode('{}":e', add_special_tokens=False)
    for stops in ({"stop": ["}", '"', "e"]}, {"stop_token_ids": ids}):
        assert both_ways(writer, {**body, **stops}) == whole
    text, reason = both_ways(writer, {**body, "min_tokens": 119})
    assert valid(text)
    assert reason == "stop"


@pytest.mark.parametrize("speculation", ["off", "chain", "dynamic-tree"])
@pytest.mark.parametrize("ignores", [False, True])
def test_a_stop_string_ends_no_answer_below_min_tokens(shared: Live, speculation: str, ignores: bool) -> None:
    body = {"messages": asks("Hello?"), "max_tokens": 20, "speculation": speculation, "ignore_eos": ignores}
    whole, _ = both_ways(shared, body)
    assert len(whole) == 20
    for stop in (whole[3:5], whole[11:12]):
        for minimum in (0, 4, 5, 12, 20):
            found = [at for at in range(20) if whole.startswith(stop, at) and at + len(stop) > minimum]
            expected = (whole[: found[0]], "stop") if found else (whole, "length")
            assert both_ways(shared, {**body, "stop": [stop], "min_tokens": minimum}) == expected


def test_the_tokenizers_end_ends_an_answer_and_is_ignored_on_request(shared: Live) -> None:
    end = shared.service.models["tiny"].vlm.processor.tokenizer.eos_token_id
    body = {"messages": asks("Hello?"), "max_tokens": 9, "logit_bias": {str(end): 100}}
    for more, expected in (({}, 1), ({"min_tokens": 4}, 5), ({"ignore_eos": True}, 9), ({"stop_token_ids": [3]}, 1)):
        assert shared.post({**body, **more})[1]["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("method", ["dynamic-tree", "prompt-lookup"])
def test_usage_runs_along_and_ends_with_the_acceptance(shared: Live, path: str, method: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "ignore_eos": True, "speculation": method}
    body |= {"messages": asks("abab", uri(1))} if "chat" in path else {"prompt": "ababababab"}
    _, whole = shared.post(body, path)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = shared.stream({**body, "stream": True, "stream_options": options}, path)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted({*counts})
    assert counts[-1] == last["usage"]["completion_tokens"] == 20
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk["usage"]} == {whole["usage"]["prompt_tokens"]}
    assert last["metrics"] == whole["metrics"]
    found = last["metrics"]["speculative_decoding"]
    histogram, steps = found["acceptance_histogram"], found["num_spec_steps"]
    accepted = found["num_accepted_draft_tokens"]
    assert sum(histogram) == steps > 0
    assert sum(j * count for j, count in enumerate(histogram)) == accepted
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert accepted <= found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert "metrics" not in shared.post({**body, "n": 2}, path)[1], "they belong to one choice"
    assert "metrics" not in shared.post({**body, "speculation": "off"}, path)[1]


@pytest.mark.parametrize("words", ["Hello <|im_end|> you", "", "Ünïcode 🎉"])
def test_tokens_and_their_text_are_those_of_the_model(shared: Live, words: str) -> None:
    processor = vlm("qwen").processor
    for special in (True, False):
        body = {"model": "tiny", "prompt": words, "add_special_tokens": special, "return_token_strs": True}
        _, found = shared.post(body, "/tokenize")
        expected = list(processor.encode(words, text_as_text=True, add_special_tokens=special))
        assert (found["tokens"], found["count"], found["max_model_len"]) == (expected, len(expected), 1024)
        assert len(found["token_strs"]) == len(expected)
        assert shared.post({"tokens": expected}, "/detokenize")[1] == {"prompt": words}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "123456789", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = [*asks("What is it?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def test_a_picture_in_the_result_of_a_call_reaches_the_prompt(shared: Live) -> None:
    def count(*images: str) -> int:
        result = {"role": "tool", "tool_call_id": "123456789", "content": asks("There.", *images)[0]["content"]}
        return int(shared.post({"messages": [*CALLED, result]}, "/tokenize")[1]["count"])

    alone = shared.post({"messages": asks("There.", uri(1))}, "/tokenize")[1]["count"]
    assert count(uri(1)) - count() == alone - shared.post({"messages": asks("There.")}, "/tokenize")[1]["count"] > 0


CONVERSATION = [*asks("What is it?", uri(1)), {"role": "assistant", "content": "A cat"}]


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({"messages": asks("What is it?", uri(1))}, True),
        ({"messages": asks("What is it?"), "tools": TOOLS}, False),
        ({"messages": asks("What is it?"), "tools": TOOLS, "tool_choice": "none"}, True),
        ({"messages": asks("What is it?"), "add_generation_prompt": False}, False),
        ({"messages": CONVERSATION, "continue_final_message": True}, False),
        ({"messages": asks("What is it?"), "chat_template_kwargs": {"add_vision_id": True}}, True),
    ],
    ids=["picture", "tools", "none", "open", "continued", "variables"],
)
def test_a_conversation_has_as_many_tokens_as_its_answer_counts(
    shared: Live, fields: dict[str, Any], alone: bool
) -> None:
    _, answer = shared.post({**fields, "max_tokens": 1})
    count = shared.post(fields, "/tokenize")[1]["count"]
    assert count == answer["usage"]["prompt_tokens"]
    assert (count == shared.post({"messages": fields["messages"]}, "/tokenize")[1]["count"]) == alone


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "Give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": asks("a")}, "Give either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "The field prompt is wrong"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, "The field tools is unknown; leave it out."),
        ("/tokenize", {"messages": asks("a"), "add_special_tokens": True}, "The field add_special_tokens is wrong"),
        ("/tokenize", {"messages": asks("a"), "add_generation_promt": True}, "add_generation_prompt may be meant"),
        ("/tokenize", {"messages": asks("a"), "tools": TOOLS * 2}, "tools has look twice"),
        ("/tokenize", {"prompt": "a" * 200_000}, "shorten it"),
        ("/detokenize", {"tokens": [-1]}, "The field tokens.0 is wrong"),
        ("/detokenize", {"tokens": [10_000]}, "every id must be below 263"),
    ],
)
def test_what_is_no_text_or_token_is_refused(shared: Live, path: str, body: Any, words: str) -> None:
    status, answer = shared.post({"model": "tiny", **body}, path)
    assert status == 400
    assert words in answer["error"]["message"]


def test_probes_are_answered_and_models_name_their_root(shared: Live) -> None:
    for path in ("/ping", "/health", "/ready", "/version", "/metrics"):
        assert [shared.call(method, path)[0] for method in ("GET", "HEAD")] == [200, 200]
    assert shared.call("POST", "/ping")[0] == 200
    assert json.loads(shared.call("GET", "/version")[2]) == {"version": saccade.__version__}
    assert [m["root"] for m in json.loads(shared.call("GET", "/v1/models")[2])["data"]] == ["tiny", "words"]
