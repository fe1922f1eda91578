"""The Messages API in Anthropic's form, by raw HTTP; its package is in the suite of client packages."""

from __future__ import annotations

import json
from typing import Any

import live_server
import pytest
from live_server import CALLS, Live, asks, calling, live, unmarked, uri

from checkpoints import tokenizer
from saccade.serve.answers import Choice
from saccade.serve.messages import MessageForm, MessagePrompt, messages_of
from saccade.serve.refusals import broken
from saccade.serve.schemas import validated

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PAINT = {"name": "paint", "description": "Paint it.", "input_schema": live_server.PAINT["parameters"]}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def image(number: int) -> dict[str, Any]:
    media, _, data = uri(number).removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def joined(content: bytes) -> dict[str, Any]:
    """The message that a client makes of a stream's events, whose order it checks."""
    message: dict[str, Any] = {}
    is_open, begun = False, {}
    events = content.decode().split("\n\n")[:-1]
    for number, lines in enumerate(events):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        kind = event["type"]
        assert name == f"event: {kind}"
        assert (kind == "message_start", kind == "message_stop") == (number == 0, number == len(events) - 1)
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert (is_open, event["index"]) == (False, len(message["content"]))
            is_open, begun = True, {"json": ""}
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
            (field, part), block = list(event["delta"].items())[-1], message["content"][-1]
            if field == "partial_json":
                begun["json"] += part
                block["input"] = json.loads(begun["json"]) if begun["json"].endswith("}") else block["input"]
            else:
                block[field] += part
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    return message


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """What two equal answers have in common."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {"content": blocks, **{name: message[name] for name in ("stop_reason", "stop_sequence", "model", "role")}}


def both(server: Live, body: dict[str, Any]) -> dict[str, Any]:
    """An answer, which is that of its stream."""
    status, answer = server.post(body, PATH)
    assert status == 200, answer
    status, headers, content = server.call("POST", f"{PATH}?beta=true", json.dumps({**body, "stream": True}).encode())
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    streamed = joined(content)
    assert alike(streamed) == alike(answer)
    for message in (streamed, answer):
        used = message["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == counted(server, body)
    return answer


def counted(server: Live, body: dict[str, Any]) -> int:
    names = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")
    status, answer = server.post({name: body[name] for name in names if name in body}, COUNT)
    assert (status, list(answer)) == (200, ["input_tokens"]), answer
    return int(answer["input_tokens"])


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pictures", [0, 2])
def test_an_answer_is_that_of_the_chat(shared: Live, pictures: int) -> None:
    fields = {"model": "tiny", "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 5, "max_tokens": 20}
    system = [text(f"x-anthropic-billing-header: cch={pictures};"), text("Be ", **CACHED), text("brief.")]
    messages = [user(*map(image, range(pictures)), text("What is it?", **CACHED))]
    body = {**fields, "system": system, "messages": messages, "metadata": {"user_id": "me"}, **CACHED}
    body |= {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stop_sequences": [],
    }
    answer = both(shared, body)
    chat = [{"role": "system", "content": "Be brief."}, *asks("What is it?", *map(uri, range(pictures)))]
    _, expected = shared.post({**fields, "messages": chat})
    assert answer["content"] == [text(expected["choices"][0]["message"]["content"])]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 20)
    assert counted(shared, body) == expected["usage"]["prompt_tokens"]


def test_a_repeated_prompt_is_read_from_the_cache(shared: Live) -> None:
    body = {**HELLO, "messages": [user(text("Something that nobody else has asked for here"))]}
    before, after = (shared.post(body, PATH)[1]["usage"] for _ in range(2))
    assert after["cache_read_input_tokens"] > before["cache_read_input_tokens"]
    assert (after["input_tokens"], after["cache_creation_input_tokens"]) == (1, 0)


def test_a_stop_sequence_is_named(shared: Live) -> None:
    whole = shared.post({**HELLO, "max_tokens": 20}, PATH)[1]["content"][0]["text"]
    answer = both(shared, {**HELLO, "max_tokens": 20, "stop_sequences": ["never there", whole[9:12], whole[10:14]]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", whole[9:12])
    assert answer["content"] == [text(whole[: whole.index(whole[9:12])])]


def test_an_answer_goes_on_from_the_assistants_last_turn(shared: Live) -> None:
    turns = [user(text("What is it?")), {"role": "assistant", "content": "It is"}]
    answer = both(shared, {**HELLO, "messages": turns})
    chat = [*asks("What is it?"), turns[1]]
    _, expected = shared.post({"model": "tiny", "messages": chat, "max_tokens": 4, "continue_final_message": True})
    assert answer["content"] == [text(expected["choices"][0]["message"]["content"])]


def test_options_of_saccade_are_those_of_chats(shared: Live) -> None:
    body = {**HELLO, "speculation": "off", "saccade": {"stats": True}}
    answer = shared.post(body, PATH)[1]
    assert answer["saccade"]["stats"]["method"] == "plain"
    assert answer["content"] == shared.post(HELLO, PATH)[1]["content"]


# -- tools and thoughts --------------------------------------------------------------------------------------


def test_a_call_is_demanded_and_its_result_sent_back(thinker: Live) -> None:
    pytest.importorskip("llguidance", reason="forced calls need the serve or grammar extra")
    body = {"messages": [user(text("Paint it."))], "max_tokens": 80, "tools": [{**PAINT, **CACHED}]}
    body["logit_bias"] = unmarked(thinker)
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}):
        answer = both(thinker, {**body, "tool_choice": choice, "thinking": {"type": "disabled"}})
        assert answer["stop_reason"] == "tool_use"
        call = answer["content"][-1]
        assert (call["type"], call["name"], call["input"].keys()) == ("tool_use", "paint", {"colour", "layers"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("Done.")], "is_error": False}
    body["messages"] += [{"role": "assistant", "content": answer["content"]}, user(result, text("And?"))]
    answer = both(thinker, {**body, "tool_choice": {"type": "none"}})
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert counted(thinker, body) > counted(thinker, {**body, "tool_choice": {"type": "none"}})


@pytest.mark.parametrize(
    ("thinking", "kinds"),
    [
        ({"type": "enabled", "budget_tokens": 11}, ["thinking"]),
        ({"type": "adaptive", "display": "summarized"}, ["thinking"]),
        ({"type": "disabled"}, ["text"]),
        (None, ["text"]),
    ],
    ids=str,
)
def test_thoughts_are_blocks_and_can_be_switched(thinker: Live, thinking: Any, kinds: list[str]) -> None:
    body: dict[str, Any] = {"messages": [user(text("Hm?"))], "max_tokens": 12, "temperature": 0}
    body |= {"thinking": thinking} if thinking else {}
    body["logit_bias"] = unmarked(thinker)
    answer = both(thinker, body)
    assert [block["type"] for block in answer["content"]] == kinds
    assert bool(answer["usage"]["output_tokens_details"]["thinking_tokens"]) == (kinds == ["thinking"])
    if thinking and thinking["type"] == "adaptive":
        body |= {"thinking": {**thinking, "display": "omitted"}}
        assert both(thinker, body)["content"] == [{**answer["content"][0], "thinking": ""}]


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    used = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
    used["completion_tokens_details"] = {"reasoning_tokens": 2}
    choice, pieces = calling()
    form = MessageForm("m", 3, True)
    content = form.begin(0, "") + b"".join(form.chunk(0, piece, None, (0, 0)) for piece in pieces)
    streamed = joined(content + form.end([choice], used))
    whole = json.loads(MessageForm("m", 3, True).body([choice], used, []))
    assert alike(streamed) == alike(whole)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert streamed["usage"] == whole["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (2, 1)
    turns = [user(text("x")), {"role": "assistant", "content": whole["content"]}, user(text("Well?"))]
    sent = messages_of(validated(MessagePrompt, {"messages": turns}))
    assert sent[1] == {"role": "assistant", "content": "I look.", "reasoning_content": "Hm, so.", "tool_calls": CALLS}


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    form = MessageForm("m", 3, True)
    name, data = form.broken(broken()).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_a_call_that_was_cut_has_what_is_there_of_its_arguments() -> None:
    choice = Choice(tokenizer(), (), True, None, False, finish="length")
    choice.calls = [{**CALLS[0], "function": {"name": "weather", "arguments": '{"days": [1, 2'}}]
    whole = json.loads(MessageForm("m", 3, True).body([choice], {"prompt_tokens": 3, "completion_tokens": 4}, []))
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({"days": [1, 2]}, "max_tokens")


# -- conversations -------------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SEEN = {"type": "image_url", "image_url": {"url": uri(1)}}


CALLING = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
LATER = {"role": "system", "content": "S"}


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", **fields}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([user(text("a")), user(text("b"))], [user(text("a"), text("b"))]),
        ([LATER, user(text("a"))], [LATER, CALLING[0]]),
        ([user(text("a")), LATER], [user(text("a"), text("S"))]),
        (
            [user({"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}, text("a"))],
            asks("a", "https://a.example/b.png"),
        ),
        (
            [
                user(text("a")),
                {"role": "assistant", "content": [text("b", citations=None), USE, text("c")]},
                LATER,
                user(result(content=[text("d"), image(1)]), text("e")),
            ],
            [
                CALLING[0],
                {**CALLING[1], "content": "bc"},
                {"role": "tool", "tool_call_id": "t1", "content": [text("d"), SEEN]},
                user(text("S"), text("e")),
            ],
        ),
        (
            [user(text("a")), {"role": "assistant", "content": [USE]}, user(result(content="no", is_error=True))],
            [*CALLING, {"role": "tool", "tool_call_id": "t1", "content": "Error: no"}],
        ),
        (
            [user(text("a")), {"role": "assistant", "content": [USE]}, user(result())],
            [*CALLING, {"role": "tool", "tool_call_id": "t1", "content": ""}],
        ),
    ],
    ids=["turns", "system", "later system", "address", "round trip", "error", "empty"],
)
def test_messages_are_those_of_a_chat(given: list[Any], expected: list[Any]) -> None:
    assert messages_of(validated(MessagePrompt, {"messages": given})) == expected


# -- refusals --------------------------------------------------------------------------------------------------

ANSWERED = {"role": "assistant", "content": [USE]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "The field max_tokens is missing."),
    ({"max_tokens": 0}, "max_tokens is wrong"),
    ({"max_tokens": 5000}, "or lower max_tokens."),
    ({"messages": []}, "at least 1 item"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be user, assistant or system"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name is unknown"),
    ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type must be text or image or tool_result"),
    ({"messages": [user(text("x", citations=[{}]))]}, "messages[0].content[0].citations is unknown"),
    ({"messages": [user(text("x", cache_control={"type": "for ever"}))]}, "cache_control.type is wrong"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text must be text"),
    ({"messages": [user({"type": "image", "source": {"type": "file", "file_id": "x"}})]}, "must be base64 or url"),
    ({"messages": [user({"type": "image", "source": {"type": "url", "url": "/etc/passwd"}})]}, "path"),
    (
        {"messages": [user({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}})]},
        "none is fetched",
    ),
    ({"messages": [user(text("x")), {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "thinking or"),
    ({"messages": [user(text("x")), {"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "must be an object"),
    ({"messages": [user(text("x")), ANSWERED]}, "give its tool_result"),
    ({"messages": [{"role": "system", "content": "x"}]}, "no message of the user"),
    ({"system": [{"type": "image"}]}, "system[0].type must be text"),
    ({"stop": "x"}, "stop is unknown; stop_sequences may be meant"),
    ({"stop_sequences": ["x"] * 99}, "The field stop_sequences takes up to 16 strings"),
    ({"stop_sequence": ["x"]}, "stop_sequences may be meant"),
    ({"nonsense": 1}, "nonsense is unknown"),
    ({"logprobs": True}, "logprobs is not supported here"),
    ({"n": 2}, "n is not supported here"),
    ({"temperature": -1}, "temperature is wrong"),
    ({"speed": "fast"}, "speed is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is unknown"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management is not supported",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "this model writes no thoughts"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type is wrong"),
    ({"thinking": {"type": "adaptive", "effort": 1}}, "thinking.effort is unknown"),
    ({"tools": [{**PAINT, "type": "bash_20250124"}]}, "tools.0.type is wrong"),
    ({"tools": [{**PAINT, "defer_loading": True}]}, "tools.0.defer_loading is wrong"),
    ({"tools": [{**PAINT, "parameters": {}}]}, "tools.0.parameters is unknown"),
    ({"tools": [{**PAINT, "name": "a b"}]}, "tools.0.name is wrong"),
    ({"tools": [PAINT, PAINT]}, "tools has paint twice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice needs name exactly"),
    ({"tool_choice": {"type": "tool", "name": "wash"}, "tools": [PAINT]}, "not among the tools"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named_in_anthropics_form(shared: Live, change: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        status, answer = shared.post({**HELLO, "stream": stream, **change}, PATH)
        assert status == 400, answer
        assert (answer["type"], list(answer["error"])) == ("error", ["type", "message"])
        assert answer["error"]["type"] == "invalid_request_error"
        assert words in answer["error"]["message"]


def test_thoughts_of_a_model_without_any_can_be_disabled(shared: Live) -> None:
    assert shared.post({**HELLO, "thinking": {"type": "disabled"}}, PATH)[0] == 200


def test_only_what_decides_a_prompt_is_counted(shared: Live) -> None:
    for name, value in (("max_tokens", 4), ("temperature", 1), ("stream", True)):
        body = {"messages": HELLO["messages"], name: value}
        status, answer = shared.post(body, COUNT)
        assert (status, f"The field {name} is unknown" in answer["error"]["message"]) == (400, True)


def test_errors_of_every_kind_have_anthropics_form(keys: str) -> None:
    body = json.dumps(HELLO).encode()
    with live(api_key_file=keys, max_body_mib=1, requests_per_minute=4) as server:

        def error(status: int, path: str = PATH, body: bytes = body, **headers: str) -> str:
            answered, _, answer = server.call("POST", path, body, headers)
            found = json.loads(answer)
            assert (answered, found["type"]) == (status, "error"), answer
            return str(found["error"]["type"])

        key = {"x-api-key": "second"}
        assert error(401) == error(401, **{"x-api-key": "third"}) == "authentication_error"
        assert (
            server.call("POST", PATH, body, {**key, "anthropic-version": "2023-06-01", "anthropic-beta": "a"})[0] == 200
        )
        assert error(413, body=b" " * 2**21, **key) == "request_too_large"
        assert error(404, body=json.dumps({**HELLO, "model": "x"}).encode(), **key) == "not_found_error"
        assert error(404, f"{PATH}/batches", **key) == "not_found_error"
        assert error(400, body=b"{", **key) == "invalid_request_error"
        assert error(429, **key) == "rate_limit_error"
        server.service.owner.drain()
        assert error(503, **{"x-api-key": "first"}) == "overloaded_error"
