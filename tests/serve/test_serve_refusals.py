"""Requests that are refused: one sentence in OpenAI's form, never a failure of the server."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from live_server import Live, asks, live, uri

from checkpoints import vlm
from media_files import data_uri
from saccade.errors import InputError
from saccade.serve.refusals import refusal_of

HELLO = {"model": "tiny", "messages": asks("Hello"), "max_tokens": 2}
PLAYLIST = {"type": "video_url", "video_url": data_uri(b"ffconcat version 1.0\nfile /etc/passwd\n", "video/mp4")}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role must be one of"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "must be text, image_url or video_url"),
    ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
    (
        {"messages": [{"role": "user", "content": [{**PLAYLIST, "max_pixels": 9}]}]},
        "A message part of type video_url has max_pixels, which would be ignored; leave it out.",
    ),
    ({"messages": asks("x", "/etc/passwd")}, "path"),
    ({"messages": asks("x", "file:///etc/passwd")}, "address"),
    ({"messages": asks("x", "http://127.0.0.1/x.png")}, "address|network|domain"),
    ({"messages": asks("x", "data:image/png;base64,AAAA")}, "image"),
    ({"messages": asks("x" * 200_000)}, "200000 characters, far more than"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, above max_tokens of 3; lower it."),
    ({"max_tokens": None, "min_tokens": 10_000}, "min_tokens is 10000, above max_tokens of"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"top_k": -5}, "top_k"),
    ({"n": 99}, "1 to 8 answers"),
    ({"stop": [""]}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"logit_bias": {"word": 1}}, "no token id"),
    ({"logit_bias": {"9999": 1}}, "no token id"),
    ({"top_logprobs": 3}, "needs logprobs"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"stream_options": {"include_usage": True}}, "needs stream"),
    ({"speculation": "warp"}, "This server has no method 'warp'; expected one of off, short"),
    ({"speculation": {"method": "chain", "gamma": 10_000}}, "at most 64"),
    ({"speculation": {"method": "chain", "gamma": 0}}, "gamma"),
    ({"speculation": {"method": "tabed", "captioner": "/etc"}}, "captioner is no option that a request"),
    (
        {"speculation": {"method": "hivis"}},
        "a trained hivis head.*; start the server with --drafter or --head, or",
    ),
    ({"temprature": 0.5}, "temperature may be meant"),
    ({"saccade": {"trce": True}}, "The field saccade.trce is unknown; leave it out."),
    ({"something_new": 1}, "The field something_new is unknown; leave it out."),
    ({"verbosity": "low"}, "The field verbosity is not supported here; leave it out."),
    ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag is unknown"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
        "tools.0.function.parameter is unk",
    ),
    (
        {"messages": [{**asks("x")[0], "tool_cals": []}]},
        r"tool_cals is unknown; messages\[0\].tool_calls may",
    ),
    *(
        (
            {"prediction": wrong},
            "The field prediction is wrong: expected an object with type content, and with content, which is a string",
        )
        for wrong in (
            "the text",
            {"content": "the text"},
            {"type": "content", "content": 5},
            {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
            {"type": "content", "content": "the text", "weight": 1},
        )
    ),
    ({"prediction": {"type": "content", "content": "x" * 200_000}}, "200000 characters, far more than"),
    ({"stop": 5}, "The field stop is wrong: Input should be a valid string or a valid list."),
    ({"speculation": 3}, "The field speculation is wrong: Input should be a valid string or an object."),
    ({"response_format": "json"}, "The field response_format is wrong: Input should be an object."),
    ({"messages": None}, "The field messages is missing."),
    ({"max_tokens": 100_000}, "or lower max_tokens."),
    ({"suffix": "end"}, "suffix is not supported"),
    ({"suffix": "a"}, "suffix is not supported"),
    ({"functions": [{"name": "f"}]}, "functions is not supported"),
    ({"messages": asks("x", data_uri(b"%!PS-Adobe-3.0 EPSF-3.0\n%%EndComments\n"))}, "accepted format"),
    ({"messages": [{"role": "user", "content": [PLAYLIST]}]}, "not a video"),
    ({"messages": asks("half of a pair: \ud800")}, "not valid"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named_in_one_sentence(shared: Live, change: dict[str, Any], words: str) -> None:
    status, answer = shared.post({**HELLO, **change})
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert re.search(words, answer["error"]["message"]), answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_request_beyond_the_memory_is_refused_in_the_server_s_words() -> None:
    with vlm("llama").batch(1, kv_memory=1) as batch, pytest.raises(InputError, match="raise kv_memory") as caught:
        batch.add("Hello")
    message = refusal_of(caught.value).message
    assert message.endswith("; raise the server's --kv-memory, shorten the prompt, or lower max_tokens.")


def test_what_python_and_the_command_line_name_otherwise_has_its_field_s_name() -> None:
    with pytest.raises(InputError) as caught:
        vlm("llama").generate("Tell", do_sample=True, temperature=-1.0)
    assert refusal_of(caught.value).message.endswith("not -1.0; use temperature 0 for greedy.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1100)}}, "1000 optional prop"),
        ({"$ref": "#"}, "must lead to something else than itself"),
    ],
    ids=["large", "recursive"],
)
def test_a_schema_that_cannot_be_followed_is_refused_before_the_stream_begins(
    shared: Live, schema: dict[str, Any], words: str, stream: bool
) -> None:
    pytest.importorskip("llguidance", reason="schemas need the serve or grammar extra")
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    status, answer = shared.post({**HELLO, "response_format": form, "stream": stream})
    assert status == 400
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "modalities": ["text"]},
        {"temperature": None, "stop": None, "seed": None, "logit_bias": {}},
        {"something_new": None, "prompt_cache_key": "a", "verbosity": "medium", "priority": 0},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"messages": [{**asks("Hello")[0], "refusal": None, "annotations": [], "provider_data": {}}]},
        {"messages": [*asks("Hello"), {"role": "assistant", "content": None}, *asks("Hello")]},
    ],
)
def test_fields_that_change_nothing_are_ignored(shared: Live, change: dict[str, Any]) -> None:
    assert shared.call("POST", "/v1/chat/completions", json.dumps({**HELLO, **change}).encode())[0] == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"a":' * 50_000],
    ids=lambda content: repr(content[:12]),
)
def test_a_body_that_is_no_object_is_refused(shared: Live, content: bytes) -> None:
    status, answer = shared.post(content)
    assert status == 400
    assert "JSON" in answer["error"]["message"]


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt_is_refused(shared: Live, prompt: Any) -> None:
    status, answer = shared.post({"model": "words", "prompt": prompt}, "/v1/completions")
    assert status == 400, answer


def test_other_paths_methods_and_content_types_have_errors_in_the_same_form(shared: Live) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/chat/completions", 405)):
        answered, _, body = shared.call(method, path)
        assert answered == status
        assert json.loads(body)["error"]["code"] == "not_found"
    for path in ("/v1/files", "/v1/batches"):
        status, _, body = shared.call("POST", path, b"{}")
        assert status == 404
        assert "`saccade batch FILE" in json.loads(body)["error"]["message"]
    status, _, body = shared.call(
        "POST", "/v1/chat/completions", json.dumps(HELLO).encode(), {"content-type": "text/plain"}
    )
    assert status == 415
    assert "application/json" in json.loads(body)["error"]["message"]


def test_a_large_body_is_refused_before_it_is_read() -> None:
    with live(max_body_mib=1) as server:
        status, answer = server.post({**HELLO, "messages": asks("x" * 2**21)})
        assert status == 413
        assert "1 MiB" in answer["error"]["message"]


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["whole", "unfinished"])
def test_a_head_of_a_hundred_kilobytes_is_431(shared: Live, end: bytes) -> None:
    answer = shared.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"x" * 100_000 + end)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("The head is larger than 64 KiB")


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_several_host_headers_are_refused(shared: Live, path: str) -> None:
    answer = shared.raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nHost: evil.example\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("The request has several Host")


def test_what_is_no_http_gets_an_error_in_the_same_form(shared: Live) -> None:
    answer = shared.raw(b"EHLO example.com\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(shared: Live, stream: bool) -> None:
    body = json.dumps({**HELLO, "max_tokens": 20, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    answer = shared.raw(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    head, _, answer = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    expected = shared.post({**HELLO, "max_tokens": 20})[1]["choices"][0]["message"]["content"]
    if not stream:
        assert json.loads(answer)["choices"][0]["message"]["content"] == expected
        return
    lines = answer.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == expected


def test_keys_are_required_and_hosts_are_checked(keys: str) -> None:
    body = json.dumps(HELLO).encode()
    with live(api_key_file=keys) as server:
        path = "/v1/chat/completions"
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
            status, headers, answer = server.call("POST", path, body, header)
            assert status == 401, answer
            assert headers["www-authenticate"] == "Bearer"
        assert server.call("POST", path, body, {"authorization": "Bearer second"})[0] == 200
        assert server.call("GET", "/v1/models")[0] == 401
        assert server.call("GET", "/health")[0] == server.call("GET", "/")[0] == 200
        bearer = {"authorization": "Bearer first"}
        assert server.call("GET", "/v1/models", b"", {**bearer, "host": "evil.example"})[0] == 403
        assert server.call("GET", "/v1/models", b"", {**bearer, "host": "localhost:1"})[0] == 200


# -- fuzz --------------------------------------------------------------------------------------------------

VALUES: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**64, 1.5, -0.0, 1e308, "", "x", "\u0000", "🙂" * 50, "off"]
VALUES += [[], {}, [[]], [{}], {"type": "text"}, {"url": "data:,"}, ["a"], {"method": {}}, "data:image/png;base64,%%"]
VALUES += ["data:video/mp4;base64,AAAA", uri(1), {"type": "json_object"}, {"trace": 1}, {"include_usage": "yes"}]
NAMES = [
    *("model", "messages", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "logprobs", "top_logprobs", "response_format", "speculation", "saccade", "num_frames", "fps"),
    *("prompt", "best_of", "echo", "tools", "min_tokens", "input", "text", "include", "previous_response_id"),
]


def mutated(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value with some of its parts replaced, removed or wrapped."""
    if rng.random() < 0.15:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        changed = {k: mutated(v, rng, depth + 1) for k, v in value.items() if rng.random() > 0.05}
        if depth == 0:
            changed |= {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.randint(0, 3))}
        return changed
    if isinstance(value, list):
        return [mutated(v, rng, depth + 1) for v in value if rng.random() > 0.05]
    return value


def fuzz(server: Live, count: int, seed: int) -> dict[int, int]:
    """Statuses of malformed requests."""
    rng, statuses = random.Random(seed), dict[int, int]()
    whole = {"model": "tiny", "messages": asks("Hello", uri(1)), "max_tokens": 1, "stop": ["a"], "seed": 1}
    raw = {"model": "words", "prompt": ["Hello"], "max_tokens": 1}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    items = [*asks("Hello"), {"type": "reasoning", "summary": [{"text": "b"}]}, answer, *asks("Hello", uri(1))]
    response = {"model": "tiny", "input": items, "max_output_tokens": 1, "text": {"format": {"type": "text"}}}
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": uri(1).partition(",")[2]}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "b"}, shown]}
    turns = [*asks("Hello"), {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    message = {"model": "tiny", "messages": turns, "max_tokens": 1, "system": [{"type": "text", "text": "c"}]}
    message |= {"thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto"}, "stop_sequences": ["a"]}
    paths = [
        ("/v1/chat/completions", whole),
        ("/v1/messages", message),
        ("/v1/completions", raw),
        ("/v1/responses", response),
    ]
    for _ in range(count):
        path, body = rng.choice(paths)
        body = mutated(body, rng)
        if isinstance(body, dict):
            most = "max_output_tokens" if "responses" in path else "max_tokens"
            body[most] = 1 if rng.random() < 0.9 else body.get(most)
        content = json.dumps(body).encode()
        if rng.random() < 0.1:
            cut = rng.randrange(len(content) + 1)
            content = content[:cut] + bytes(rng.randrange(256) for _ in range(rng.randint(0, 3))) + content[cut + 1 :]
        status, _, answer = server.call("POST", path, content)
        assert status < 500, (content, answer)
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_malformed_requests_never_fail_the_server(shared: Live, count: int) -> None:
    statuses = fuzz(shared, count, seed=count)
    assert statuses[400] > count // 3
    assert shared.post(HELLO)[0] == 200
