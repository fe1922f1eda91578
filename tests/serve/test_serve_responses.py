"""The Responses API, by OpenAI's package and its types."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from live_server import CALLS, PAINT, Live, asks, calling, live, uri
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from saccade.serve.answers import Choice, Piece
from saccade.serve.front import key_of_response
from saccade.serve.refusals import Refusal
from saccade.serve.responses import ResponseForm, ResponseRequest, chat_request, messages_of

PATH = "/v1/responses"
CALL = {"type": "function_call", "name": "f", "call_id": "1"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO = {"model": "tiny", "input": "Hello", "max_output_tokens": 4}
OWN = ("id", "created_at", "completed_at", "usage", "metrics", "saccade")  # fields that differ between equal answers


def shown(words: str, *images: str) -> list[dict[str, Any]]:
    """One user message in the form of the API, images first."""
    parts: list[dict[str, Any]] = [{"type": "input_image", "image_url": image, "detail": "auto"} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": words}]}]


def events_of(content: bytes) -> list[dict[str, Any]]:
    """Events of a stream, each of which is valid and has the next number."""
    found = []
    for number, event in enumerate(content.decode().split("\n\n")[:-1]):
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        assert EVENTS.validate_python(found[-1]).type == found[-1]["type"]
    return found


def alike(response: dict[str, Any]) -> dict[str, Any]:
    """What two equal answers have in common."""
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    return {**{name: value for name, value in response.items() if name not in OWN}, "output": items}


@pytest.mark.parametrize("images", [(), (uri(3), uri(4, (60, 40)))], ids=["text", "pictures"])
def test_an_answer_is_that_of_the_chat_and_has_the_form_of_openai(shared: Live, images: tuple[str, ...]) -> None:
    fields = {"model": "tiny", "temperature": 0.7, "seed": 5}
    body = {"input": shown("What is it?", *images), "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me"}
    status, answer = shared.post({**fields, **body, "max_output_tokens": 20}, PATH)
    messages = [{"role": "system", "content": "Be brief."}, *asks("What is it?", *images)]
    chat = shared.client().chat.completions.create(messages=messages, max_tokens=20, **fields)
    found = Response.model_validate(answer)
    assert (status, found.output_text) == (200, chat.choices[0].message.content)
    assert (found.status, found.output[0].status) == ("incomplete", "incomplete")
    assert found.incomplete_details.reason == "max_output_tokens"
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    assert (found.metadata, found.temperature, found.instructions) == ({"a": "b"}, 0.7, "Be brief.")
    assert shared.client().responses.retrieve(found.id).to_dict() == answer


def test_events_come_in_order_and_end_with_the_whole(shared: Live) -> None:
    _, whole = shared.post({**HELLO, "max_output_tokens": 20}, PATH)
    text = whole["output"][0]["content"][0]["text"]
    body = {**HELLO, "max_output_tokens": 20, "stop": text[9:12], "saccade": {"trace": True}}
    _, stopped = shared.post(body, PATH)
    status, headers, content = shared.call("POST", PATH, json.dumps({**body, "stream": True}).encode())
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = events_of(content)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * len(deltas)
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(deltas) == events[-4]["text"] == text[: text.index(text[9:12])]
    last = events[-1]["response"]
    assert alike(last) == alike(stopped)
    assert last["id"] == events[0]["response"]["id"]
    assert last["saccade"]["steps"] == stopped["saccade"]["steps"]
    assert last["saccade"]["stats"]["method"] == stopped["saccade"]["stats"]["method"]
    with shared.client().responses.stream(
        model="tiny", input="Hello", max_output_tokens=20, extra_body={"stop": text[9:12]}
    ) as stream:
        assert [event.type.removeprefix("response.") for event in stream] == kinds
        assert stream.get_final_response().output_text == "".join(deltas)


class Thing(BaseModel):
    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=99)
    sure: bool


def test_answers_are_parsed_into_the_clients_class(writer: Live) -> None:
    client = writer.client()
    answer = client.responses.parse(model="words", input="Thing 1", text_format=Thing, max_output_tokens=120)
    assert isinstance(answer.output_parsed, Thing)
    assert (answer.status, answer.text.format.name) == ("completed", "Thing")
    with client.responses.stream(model="words", input="Thing 1", text_format=Thing, max_output_tokens=120) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    _, found = writer.post({"input": "Any", "max_output_tokens": 40, "text": {"format": {"type": "json_object"}}}, PATH)
    assert found["output"][0]["content"][0]["text"].startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_later_turns_are_those_of_the_whole_conversation(shared: Live, stream: bool) -> None:
    client, conversation, previous = shared.client(), list[dict[str, Any]](), None
    items: list[Any] = []
    for number, (words, images) in enumerate([("What is it?", (uri(5),)), ("And?", ()), ("This?", (uri(6),))]):
        system = [{"role": "system", "content": f"Rule {number}."}] * (number < 2)
        conversation += asks(words, *images)
        chat = client.chat.completions.create(model="tiny", messages=[*system, *conversation], max_tokens=12)
        conversation.append({"role": "assistant", "content": chat.choices[0].message.content})
        instructions = system[0]["content"] if system else None
        body = {"model": "tiny", "instructions": instructions, "max_output_tokens": 12}
        body |= {"input": shown(words, *images), "previous_response_id": previous}
        answer = client.responses.create(**body, stream=True) if stream else client.responses.create(**body)
        found = list(answer)[-1].response if stream else answer
        assert found.output_text == chat.choices[0].message.content
        assert found.usage.input_tokens == chat.usage.prompt_tokens
        assert found.previous_response_id == previous
        previous = found.id
        items += shown(words, *images)
        again = client.responses.create(**{**body, "input": items, "previous_response_id": None, "store": False})
        assert (again.output_text, again.usage.input_tokens) == (found.output_text, found.usage.input_tokens)
        items += again.output


def test_the_input_of_a_response_is_listed_page_by_page(shared: Live) -> None:
    responses = shared.client().responses
    call = {**CALL, "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "two"}
    given: list[Any] = [*shown("What is it?", uri(1)), {"role": "assistant", "content": "A cat."}, call, result]
    made = responses.create(model="tiny", input=given, max_output_tokens=2)
    items = list(responses.input_items.list(made.id, order="asc"))
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert items[0].content[0].image_url == uri(1)
    assert [item.content[-1].text for item in items[:2]] == ["What is it?", "A cat."]
    assert [item.id for item in items] == [item.id for item in responses.input_items.list(made.id)][::-1]
    first = responses.input_items.list(made.id, order="asc", limit=3)
    assert (len(first.data), first.has_more, first.first_id, first.last_id) == (3, True, items[0].id, items[2].id)
    assert [item.id for item in first] == [item.id for item in items], "with the pages behind"
    after = responses.create(model="tiny", input="And?", previous_response_id=made.id, max_output_tokens=2)
    assert [item.content[0].text for item in responses.input_items.list(after.id)] == ["And?"]
    for query in ("limit=0", "limit=101", "order=up", "after=nothing", "include=a"):
        status, _, answer = shared.call("GET", f"{PATH}/{made.id}/input_items?{query}")
        assert (status, query.split("=")[0] in json.loads(answer)["error"]["message"]) == (400, True), answer


def test_tokens_of_an_input_are_those_of_its_response(shared: Live) -> None:
    responses = shared.client().responses
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    previous = responses.create(model="tiny", input="What?", max_output_tokens=2).id
    body: Any = {"model": "tiny", "input": shown("What is it?", uri(1)), "instructions": "Be brief.", "tools": tools}
    for change in ({}, {"previous_response_id": previous}, {"tool_choice": "none"}, {"instructions": None}):
        asked = {**body, **change}
        counted = responses.input_tokens.count(**asked)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == responses.create(**asked, max_output_tokens=2).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="personality is unknown"):
        responses.input_tokens.count(**body, personality="friendly")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens is unknown"):
        responses.input_tokens.count(**body, extra_body={"max_output_tokens": 5})


def missing(server: Live, name: str, key: str = "none") -> str:
    """The sentence of the errors of a response that is not there."""
    client, sentences = server.client(key), set()
    for call in (
        lambda: client.responses.retrieve(name),
        lambda: client.responses.delete(name),
        lambda: client.responses.cancel(name),
        lambda: client.responses.input_items.list(name),
        lambda: client.responses.input_tokens.count(input="x", previous_response_id=name),
        lambda: client.responses.create(model="tiny", input="x", previous_response_id=name),
    ):
        with pytest.raises(openai.NotFoundError) as problem:
            call()
        assert problem.value.code == "response_not_found"
        sentences.add(problem.value.body["message"])
    (sentence,) = sentences
    return str(sentence).replace(name, "")


def test_responses_are_kept_up_to_the_limits_and_until_they_are_deleted() -> None:
    with live(stored_responses=2, stored_responses_mib=1) as server:
        responses = server.client().responses

        def made(words: str, **more: Any) -> str:
            return responses.create(model="tiny", input=words, max_output_tokens=2, **more).id

        unknown = missing(server, "resp_unknown")
        assert missing(server, made("One", store=False)) == unknown
        first = made("One")
        second, third = made("Two", previous_response_id=first), made("Three")
        assert missing(server, first) == unknown, "two are kept"
        fourth = made("Four", previous_response_id=second)
        assert missing(server, second) == unknown
        assert {responses.retrieve(name).id for name in (third, fourth)} == {third, fourth}
        with pytest.raises(openai.BadRequestError, match="Only responses in the background can be cancelled"):
            responses.cancel(third)
        responses.delete(third)
        assert missing(server, third) == unknown
        assert "send the whole conversation" in unknown
        large = shown("Big", uri(1, (32, 32)) + " " * 700_000)
        fifth = responses.create(model="tiny", input=large, max_output_tokens=2).id
        sixth = made("Six", previous_response_id=fifth)
        assert {responses.retrieve(name).id for name in (fifth, sixth)} == {fifth, sixth}, "its picture counts once"
        seventh = responses.create(model="tiny", input=large, max_output_tokens=2).id
        assert missing(server, fifth) == missing(server, sixth) == unknown
        assert responses.retrieve(seventh).id == seventh


def test_responses_belong_to_the_key_that_made_them(keys: str) -> None:
    with live(api_key_file=keys) as server:
        server.service.replica = "r1-"
        mine = server.client("first").responses.create(model="tiny", input="Hi", max_output_tokens=2).id
        assert key_of_response(mine) == "replica r1"
        assert missing(server, mine, "second") == missing(server, "resp_unknown", "first")
        assert server.client("first").responses.retrieve(mine).id == mine
        assert server.call("GET", f"{PATH}/{mine}")[0] == server.call("DELETE", f"{PATH}/{mine}")[0] == 401


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", "The field input is missing."),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "input[0].role must be one of"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call' is not supported here"),
        ({"input": [{**CALL, "arguments": None}]}, "input[0].arguments", "must be text"),
        ({"input": [*shown("x"), {**CALL, "arguments": "x"}]}, None, "input[1].tool_calls[0].function.arguments must"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].content", "content is missing"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "name is wrong"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among the tools"),
        ({"input": [*shown("x"), {"role": "user", "content": [{"type": "input_image"}]}]}, None, "input[1].content[0]"),
        ({"input": shown("x", "/etc/passwd")}, None, "path"),
        ({"include": ["x"]}, "include.0", "should be 'message.output_text.logprobs' or"),
        ({"input": [{"role": "assistant"}]}, "input[0].content", "content is missing"),
        ({"max_output_tokens": 5000}, "input", "or lower max_output_tokens."),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is wrong"),
        ({"max_output_token": 4}, "max_output_token", "max_output_tokens may be meant"),
        ({"max_tokens": 4}, "max_tokens", "max_output_tokens may be meant"),
        ({"messages": asks("x")}, "messages", "input may be meant"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema is missing"),
        ({"text": {"format": "json"}}, "text.format", "must be an object|should be an object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity is wrong"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort", "reasoning.efort is unknown"),
        ({"include": ["message.output_text.logprob"]}, "include.0", "include.0 is wrong"),
        ({"something_new": 1}, "something_new", "something_new is unknown"),
        ({"top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs in include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "must be function"),
        ({"background": True}, "background", "background is not supported"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt is not supported"),
        ({"n": 2}, "n", "leave n out"),
        ({"truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
        ({"temperature": -1}, "temperature", "temperature is wrong"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named_by_its_own_name(
    shared: Live, change: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    status, answer = shared.post({**HELLO, "stream": stream, **change}, PATH)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert any(each in answer["error"]["message"] for each in words.split("|")), answer
    assert param in (None, answer["error"]["param"])


def test_fields_that_change_nothing_are_ignored(shared: Live) -> None:
    change = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    change |= {"include": ["reasoning.encrypted_content"]}
    change |= {"truncation": "auto", "service_tier": "auto", "prompt_cache_key": "a", "reasoning": {"summary": "auto"}}
    change |= {"client_metadata": {"a": "b"}}
    change |= {"background": False, "conversation": None, "text": {"verbosity": "medium"}, "safety_identifier": "b"}
    status, answer = shared.post({**HELLO, **change}, PATH)
    assert (status, answer["truncation"]) == (200, "disabled")
    assert answer["output"][0]["content"] == shared.post(HELLO, PATH)[1]["output"][0]["content"]


def test_log_probabilities_come_with_the_text(shared: Live) -> None:
    body = {**HELLO, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = shared.post(body, PATH)[1]["output"]
    entries = item["content"][0]["logprobs"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    _, expected = shared.post({**chat, "logprobs": True, "top_logprobs": 2})
    assert entries == expected["choices"][0]["logprobs"]["content"]
    events = events_of(shared.call("POST", PATH, json.dumps({**body, "stream": True}).encode())[2])
    assert [entry for event in events if "delta" in event for entry in event["logprobs"]] == entries


# -- reasoning and tool calls ------------------------------------------------------------------------------


def test_calls_and_their_results_are_those_of_the_chat(shared: Live) -> None:
    pytest.importorskip("llguidance", reason="schemas need the serve or grammar extra")
    client, messages = shared.client(), asks("Paint it.", uri(2))
    chat: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", "function": PAINT}], "temperature": 0}
    chat |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    expected = client.chat.completions.create(messages=messages, **chat).choices[0].message
    body: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", **PAINT, "strict": True}], "temperature": 0}
    forced = {**body, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    first = client.responses.create(input=shown("Paint it.", uri(2)), **forced)
    (call,) = first.output
    (known,) = expected.tool_calls
    assert (call.type, call.name, call.arguments) == ("function_call", "paint", known.function.arguments)
    assert (first.status, first.tool_choice, first.tools[0].name) == ("completed", "required", "paint")
    with client.responses.stream(input=shown("Paint it.", uri(2)), **forced) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.parsed_arguments == json.loads(call.arguments)
    assert kinds[2:4] == ["output_item.added", "function_call_arguments.delta"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    messages += [expected.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": known.id, "content": "Done."}]
    chat |= {"tool_choice": "auto", "max_tokens": 9}
    answer = client.chat.completions.create(messages=messages, **chat)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}
    body["max_output_tokens"] = 9
    items = [*shown("Paint it.", uri(2)), *first.output, result]
    for more in ({"input": [result], "previous_response_id": first.id}, {"input": items}):
        last = client.responses.create(**body, **more)
        assert last.output_text == answer.choices[0].message.content
        assert last.usage.input_tokens == answer.usage.prompt_tokens


def test_the_effort_of_reasoning_is_a_variable_of_the_template(shared: Live) -> None:
    asked = ResponseRequest(input="x", reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": True})
    body = chat_request(asked, [{"role": "user", "content": "x"}])
    options = shared.service.models["tiny"]._template(body)
    assert options.template_options == {"reasoning_effort": "low", "enable_thinking": True}


USED = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
USED |= {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 2}}


def called() -> tuple[ResponseForm, Choice, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The form of an answer that reasons, speaks and calls a tool twice, and what it has kept."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    repeated = {"model": "m", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    form = ResponseForm("resp_1", repeated, lambda body, answer: kept.append((json.loads(body), answer)))
    return form, calling()[0], kept


def test_reasoning_and_tool_calls_are_items_of_their_own() -> None:
    form, choice, kept = called()
    pieces = calling()[1]
    content = (
        form.begin(0) + b"".join(form.chunk(0, piece, None, (0, 0)) for piece in pieces) + form.end([choice], USED)
    )
    events = events_of(content)
    reader = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        reader.handle_event(EVENTS.validate_python(event))
    reasoning, message, *calls = events[-1]["response"]["output"]
    assert [item["type"] for item in (reasoning, message, *calls)] == ["reasoning", "message", *["function_call"] * 2]
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("Hm, so.", "I look.")
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        (call["id"], *call["function"].values()) for call in CALLS
    ]
    for kind, number in (("reasoning_text.delta", 2), ("output_text.delta", 2), ("function_call_arguments.done", 2)):
        assert sum(event["type"] == f"response.{kind}" for event in events) == number
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    form, choice, kept_whole = called()
    whole = json.loads(form.body([choice], USED, []))
    Response.model_validate(whole)
    assert alike(whole) == alike(events[-1]["response"])
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    ((_, answer),) = kept
    assert answer == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm, so.",
        "tool_calls": CALLS,
    }
    assert kept_whole[0] == (whole, answer)
    outputs = [{"type": "function_call_output", "call_id": "call_Oslo", "output": "Rain."}]
    given = [*shown("Weather?"), *whole["output"], *outputs]
    tool = {"role": "tool", "tool_call_id": "call_Oslo", "content": "Rain."}
    question, *rest = messages_of(given)
    assert question == shown("Weather?")[0]
    assert rest == [{**answer, "content": message["content"]}, tool]


def test_a_stream_that_breaks_ends_with_the_reason() -> None:
    form, _, kept = called()
    refusal = Refusal(500, "The server failed.", type="server_error", code="internal_error")
    content = form.begin(0, "So ")
    content += form.chunk(0, Piece("I", None, None, None), None, (0, 0))
    *_, reason, failed = events_of(content + form.broken(refusal))
    assert (reason["type"], reason["message"], reason["code"]) == ("error", "The server failed.", "internal_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "The server failed."}
    assert failed["response"]["output"][0]["content"][0]["text"] == "So I"
    assert not kept
