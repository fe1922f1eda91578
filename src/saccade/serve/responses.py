"""OpenAI's Responses API: requests as chat requests, answers as items and events, responses kept for later turns."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from saccade.serve.answers import Choice, Form, Piece, metrics
from saccade.serve.configuration import MIB, Limits
from saccade.serve.refusals import Json, Refusal, invalid
from saccade.serve.schemas import (
    AnyRequest,
    ChatRequest,
    Count,
    Part,
    checked,
    prompting,
    refuse_renamed,
    template_message,
    text_field,
    validated,
)
from saccade.serve.service import Exchange, Service

LOGPROBS = "message.output_text.logprobs"  # value of ``include``
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""Parts of responses that can be asked for; reasoning is never encrypted."""


class TextOptions(Part):
    """Form of a response's text."""

    format: Json = Field(default={"type": "text"})
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Part):
    """Effort for a response's reasoning, which is shown as it is, without summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsePrompt(BaseModel):
    """Fields of ``/v1/responses`` that decide the prompt; others are those of chats."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input: str | Annotated[list[Json], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions = TextOptions()
    tools: list[Json] = Field([])
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["auto", "disabled"] = "disabled"  # nothing is ever dropped


class ResponseRequest(ResponsePrompt):
    store: bool = True
    max_output_tokens: Count | None = None
    include: list[Included] = Field([])
    metadata: dict[str, str] = Field({})


IN_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "function.name": "name",
    **{f"allowed_tools.{name}": name for name in ("mode", "tools")},
    LOGPROBS: LOGPROBS,  # whose last word is no field
    **dict.fromkeys(("logprobs: true", "logprobs"), f"{LOGPROBS} in include"),
}
"""Fields of chat requests -> where this API has them."""


def chat_request(asked: ResponsePrompt, messages: Sequence[Json]) -> ChatRequest:
    """Return the chat request with the same answer; errors as of `saccade.serve.schemas.checked`."""
    more = asked.model_extra or {}
    refuse_renamed(more, IN_CHAT)
    fields = {
        "model": asked.model,
        "messages": list(messages),
        "response_format": _response_format(asked.text.format),
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)],
        "tool_choice": None if asked.tool_choice == "auto" else _tool_choice(asked.tool_choice),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "reasoning_effort": asked.reasoning.effort,
    }
    if isinstance(asked, ResponseRequest):
        fields |= {"max_tokens": asked.max_output_tokens, "logprobs": LOGPROBS in asked.include}
    body = checked(ChatRequest, {**more, **fields}, list(ResponseRequest.model_fields))
    if body.n != 1:
        raise invalid("A request for a response has one answer; leave n out.", "n")
    return body


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name not in ("type", "whitespace")}
    return {"type": "json_schema", "json_schema": schema, "whitespace": form.get("whitespace")}


def _tool_choice(choice: str | Json) -> Any:
    if isinstance(choice, str) or choice.get("type") not in ("function", "allowed_tools"):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [_tool_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        raise invalid(f"{where}.type must be function: there are no other tools here; leave it out.", where)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def messages_of(given: str | Sequence[Json]) -> list[Json]:
    """Return the messages of ``input``; an answer's reasoning, text and calls are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    reasoning = ""  # before the next item
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.get("type") == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        new, last = _message_of(item, where), messages[-1] if messages else {}
        template_message(new, where)  # which refuses what is no message
        if "tool_calls" in new and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(new["tool_calls"])
        elif new["role"] == "assistant" and reasoning:
            messages.append({**new, "reasoning_content": reasoning})
        else:
            messages.append(new)
        reasoning = ""
    return messages


def _message_of(item: Json, where: str) -> Json:
    kind = item.get("type", "message")
    if kind == "message":
        return {name: item[name] for name in ("role", "content") if name in item}
    if kind == "function_call":
        function = {name: text_field(item, name, where) for name in ("name", "arguments")}
        call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": text_field(item, "call_id", where), "content": item.get("output")}
    raise invalid(f"{where}.type {str(kind)[:60]!r} is not supported here; leave this item out.", f"{where}.type")


def _reasoning(item: Json, where: str) -> str:
    parts = item.get("content") or item.get("summary")
    if not isinstance(parts, list):
        return ""
    return "".join(text_field(part, "text", f"{where}.content") for part in parts)


def items_of(given: str | Sequence[Json]) -> tuple[Json, ...]:
    """Return the items of ``input`` as they are listed."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for item in given:
        kind, content = item.get("type", "message"), item.get("content")
        name = f"{_IDS.get(kind, 'item')}_{uuid.uuid4().hex}"
        made = {"type": kind, "id": name, "status": "completed", **item}
        if isinstance(content, str):
            part: Json = {"type": "input_text", "text": content}
            if item.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": []}
            made["content"] = [part]
        items.append(made)
    return tuple(items)


_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""Types of items -> begins of their ids."""


def page(items: Sequence[Json], limit: int, after: str) -> Json:
    """Return the items after the one with an id, with what is said of a list's part."""
    begin = next((number for number, item in enumerate(items, 1) if item["id"] == after), 0)
    if after and not begin:
        raise invalid(f"after: the list has no {after[:100]!r}; leave it out, or give an id of the list.", "after")
    found = items[begin : begin + limit]
    listed: Json = {"object": "list", "data": found, "first_id": None, "last_id": None}
    listed["has_more"] = begin + len(found) < len(items)
    if found:
        listed["first_id"] = found[0]["id"]
        listed["last_id"] = found[-1]["id"]
    return listed


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """A question and its answer."""

    messages: Sequence[Json]
    size: int  # bytes


@dataclass(frozen=True)
class KeptResponse:
    """A response."""

    client: str  # whose it is
    body: bytes
    turns: tuple[KeptTurn, ...]  # of its conversation, the last with its answer; shared with other responses
    items: tuple[Json, ...]  # of its input, with ids


def _whole(asked: ResponsePrompt, before: Sequence[KeptTurn], question: Sequence[Json]) -> list[Json]:
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    return [*system, *(each for turn in before for each in turn.messages), *question]


class KeptResponses:
    """Responses for later turns, the oldest of which are dropped first. For the event loop alone."""

    def __init__(self, limits: Limits) -> None:
        self._most, self._most_bytes = limits.stored_responses, limits.stored_responses_mib * MIB
        self._kept: dict[str, KeptResponse] = {}
        self._uses: Counter[KeptTurn] = Counter()
        self._size = 0  # bytes of all turns

    def find(self, name: str, client: str) -> KeptResponse:
        """Return a client's response; 404 where it is not here, or another client's."""
        kept = self._kept.get(name)
        if kept is None or kept.client != client:
            message = f"The response {name[:100]!r} is not kept here, or not any more; send the whole conversation."
            raise Refusal(404, message, "not_found", code="response_not_found")
        return kept

    def before(self, asked: ResponsePrompt, client: str) -> tuple[KeptTurn, ...]:
        """Turns of the conversation that a request goes on with."""
        name = asked.previous_response_id
        return () if name is None else self.find(name, client).turns

    def request_to_count(self, content: bytes, client: str) -> ChatRequest:
        """Return the chat request whose prompt ``/v1/responses/input_tokens`` counts."""
        asked = prompting(ResponsePrompt, content)
        return chat_request(asked, _whole(asked, self.before(asked, client), messages_of(asked.input)))

    def add(self, name: str, kept: KeptResponse) -> None:
        self._kept[name] = kept
        for turn in kept.turns:
            self._size += 0 if turn in self._uses else turn.size
            self._uses[turn] += 1
        while len(self._kept) > self._most or self._size > self._most_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, name: str) -> None:
        for turn in self._kept.pop(name).turns:
            self._uses[turn] -= 1
            if not self._uses[turn]:
                del self._uses[turn]
                self._size -= turn.size


_ITEMS: dict[str, tuple[str, Json, Json]] = {
    "message": (
        "msg",
        {"role": "assistant", "content": []},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}),
    "function_call": ("fc", {"arguments": ""}, {}),
}
"""Kinds of items -> how their ids begin, their own fields, and their only part, as they begin."""


class ResponseForm(Form):
    """One answer as OpenAI's ``Response``: its events while it grows, and the whole.

    Args:
        name: its id.
        repeated: fields of the request that it has as well.
        keep: called at its end with its body, and with the answer as a message of a chat.
    """

    def __init__(self, name: str, repeated: Json, keep: Callable[[bytes, Json], None]) -> None:
        self.id = name
        self._repeated, self._keep = repeated, keep
        self._created = int(time.time())
        self._events = 0  # so far
        self._output: list[Json] = []  # items so far
        self._item: Json = {}  # the last of them while it is in progress
        self._logprobs: list[Json] = []  # of tokens whose text is held back

    def begin(self, index: int, echo: str = "") -> bytes:
        """The first events, with the text that the answer continues."""
        response = self._response("in_progress")
        events = self._event("created", response=response)
        events += self._event("in_progress", response=response)
        return events + (self._grow("message", echo) if echo else b"")

    def chunk(self, index: int, piece: Piece, stats: Json | None, used: tuple[int, int]) -> bytes:
        """Events of a piece; its trace and statistics are in the whole alone."""
        if piece.logprobs is not None:
            self._logprobs += piece.logprobs.get("content", ())
        events = b""
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            events += self._grow(kind, text) if text else b""
        for call in piece.calls:
            events += self._grow_call(call)
        if piece.finish is not None:
            if not self._output or (self._logprobs and self._item.get("type") == "message"):
                events += self._grow("message", "")
            events += self._close("incomplete" if piece.finish == "length" else "completed")
        return events

    def end(self, choices: Sequence[Choice], used: Json, details: Sequence[Json] = ()) -> bytes:
        response = self._finished(choices[0], used, details)
        return self._event(response["status"], response=response)

    def broken(self, refusal: Refusal) -> bytes:
        about = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
        cause = {"code": "server_error", "message": about["message"]}
        response = self._response("failed", error=cause)
        return self._event("error", **about) + self._event("failed", response=response)

    def body(self, choices: Sequence[Choice], used: Json, details: Sequence[Json]) -> bytes:
        choice = choices[0]
        whole = Piece(choice.text, choice.logprobs, None, choice.finish, choice.reasoning, tuple(choice.calls))
        self.chunk(0, whole, None, (0, 0))
        return json.dumps(self._finished(choice, used, details)).encode()

    def _finished(self, choice: Choice, used: Json, details: Sequence[Json]) -> Json:
        counts = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }
        cut, more = choice.finish == "length", metrics([choice])
        more |= {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        if details:
            more["saccade"] = details[0]
        response = self._response("incomplete" if cut else "completed", usage=counts, **more)
        self._keep(json.dumps(response).encode(), choice.message)
        return response

    def _response(self, status: str, **fields: Any) -> Json:
        return {
            **self._repeated,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
            **fields,
        }

    def _grow(self, kind: str, text: str) -> bytes:
        """Append to the text of the item in progress; one of another kind ends before."""
        events = b""
        if self._item.get("type") != kind:
            events = self._open(kind)
        (part,) = self._item["content"]
        part["text"] += text
        new = {}
        if kind == "message":
            new["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += new["logprobs"]
        return events + self._of_item(f"{part['type']}.delta", delta=text, **new)

    def _grow_call(self, call: Json) -> bytes:
        """Append to the arguments of the call in progress; one with an id is the next call."""
        events, function = b"", call["function"]
        if call.get("id"):
            events = self._open("function_call", call_id=call["id"], name=function["name"])
        arguments = function.get("arguments")
        if not arguments:
            return events
        self._item["arguments"] += arguments
        return events + self._of_item("function_call_arguments.delta", delta=arguments)

    def _open(self, kind: str, **fields: Any) -> bytes:
        events = self._close("completed")
        prefix, own, part = deepcopy(_ITEMS[kind])
        name = f"{prefix}_{uuid.uuid4().hex}"
        self._item = {"type": kind, "id": name, "status": "in_progress", **own, **fields}
        self._output.append(self._item)
        events += self._of_item("output_item.added", item=self._item)
        if part:
            events += self._of_item("content_part.added", part=part)
            self._item["content"].append(part)
        return events

    def _close(self, status: str) -> bytes:
        """End the item in progress, where there is one."""
        if not self._item:
            return b""
        self._item["status"] = status
        if self._item["type"] == "function_call":
            events = self._of_item("function_call_arguments.done", arguments=self._item["arguments"])
        else:
            (part,) = self._item["content"]
            whole = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._of_item(f"{part['type']}.done", **whole)
            events += self._of_item("content_part.done", part=part)
        events += self._of_item("output_item.done", item=self._item)
        self._item = {}
        return events

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the item in progress."""
        place: Json = {"output_index": len(self._output) - 1}
        if "item" not in fields:
            place["item_id"] = self._item["id"]
            place |= {"content_index": 0} if "content" in self._item else {}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = kind if kind == "error" else f"response.{kind}"
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()


class ResponseExchange(Exchange):
    """Answer of ``/v1/responses``."""

    names = IN_CHAT

    def __init__(self, service: Service, kept: KeptResponses) -> None:
        super().__init__(service)
        self._kept = kept

    def _read(self, content: bytes, client: str) -> ChatRequest:
        asked = self._asked = validated(ResponseRequest, content)
        before, question = self._kept.before(asked, client), messages_of(asked.input)
        name = self._name = f"resp_{self._service.replica}{uuid.uuid4().hex}"
        kept, size = self._kept, len(content)

        def keep(response: bytes, answer: Json) -> None:
            if asked.store:
                turn = KeptTurn((*question, answer), size + len(response))
                kept.add(name, KeptResponse(client, response, (*before, turn), items_of(asked.input)))

        self._keep = keep
        return chat_request(asked, _whole(asked, before, question))

    def _make_form(self, body: AnyRequest, model: str) -> Form:
        asked = self._asked.model_dump(exclude={"model", "input", "include", *(self._asked.model_extra or ())})
        used = {name: getattr(body, name) for name in ("temperature", "top_p", "top_logprobs")}
        used |= {"model": model, "truncation": "disabled", "background": False}
        return ResponseForm(self._name, {**asked, **used}, self._keep)
