"""OpenAI's Responses API: its requests as chat requests, its items and events, and the responses that are kept."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from saccade.serve.answers import Choice, Form, Piece, metrics
from saccade.serve.configuration import MIB, Limits
from saccade.serve.refusals import Refusal, invalid
from saccade.serve.schemas import ChatRequest, CompletionRequest, Count, checked, conversation, object_of, validated
from saccade.serve.service import Service
from saccade.serve.streaming import Exchange, Message, Receive, Send


class ResponseRequest(BaseModel):
    """Fields of ``/v1/responses`` that chat requests do not have in this form; the others are as there."""

    model_config = ConfigDict(strict=True, extra="allow")

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Count | None = None
    text: dict[str, Any] = Field({"format": {"type": "text"}})
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    include: list[str] = Field([])
    reasoning: dict[str, Any] = Field({})
    truncation: Literal["auto", "disabled"] = "disabled"  # nothing is ever dropped
    metadata: dict[str, str] = Field({})


LOGPROBS = "message.output_text.logprobs"  # value of ``include``
IN_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    **dict.fromkeys(("logprobs: true", "logprobs"), f"{LOGPROBS} in include"),
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat requests -> where this API has them."""
_IN_CHAT = re.compile(rf"\b({'|'.join(map(re.escape, IN_CHAT))})\b")


def chat_request(asked: ResponseRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """Return the chat request with the same answer; errors as of `saccade.serve.schemas.parse`."""
    more = asked.model_extra or {}
    for name in more.keys() & IN_CHAT.keys():
        raise invalid(f"The field {name} is unknown; {IN_CHAT[name]} may be meant.", name, "unknown_parameter")
    choice = asked.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    fields = {
        "messages": list(messages),
        "max_tokens": asked.max_output_tokens,
        "response_format": _response_format(asked.text.get("format")),
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)] or None,
        "tool_choice": None if choice == "auto" else choice,
        "parallel_tool_calls": None if asked.parallel_tool_calls else False,
        "logprobs": LOGPROBS in asked.include,
        "reasoning_effort": asked.reasoning.get("effort"),
    }
    body = checked(ChatRequest, {**more, **fields}, list(ResponseRequest.model_fields))
    if body.n not in (None, 1):
        raise invalid("A request for a response has one answer; leave n out.", "n")
    return body


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": form, "whitespace": form.get("whitespace")}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"{where}.type must be function: there are no other tools here; leave it out.", where)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of ``input``; an answer's reasoning, text and calls are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    reasoning = ""  # before the next item
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.get("type") == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        new, last = _message_of(item, where), messages[-1] if messages else {}
        if "tool_calls" in new and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(new["tool_calls"])
        elif new["role"] == "assistant" and reasoning:
            messages.append({**new, "reasoning_content": reasoning})
        else:
            messages.append(new)
        reasoning = ""
    return messages


def _message_of(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        message = {"role": item.get("role"), "content": item.get("content")}
        try:
            conversation([message])
        except Refusal as refusal:
            words, param = (text.replace("messages[0]", where) for text in (refusal.message, refusal.param or where))
            raise invalid(words, param) from None
        return message
    if kind == "function_call":
        function = {name: _text(item, name, where) for name in ("name", "arguments")}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, list) else _text(item, "output", where)
        return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content}
    raise invalid(f"{where}.type {str(kind)[:60]!r} is not supported here; leave this item out.", f"{where}.type")


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary")
    return "".join(_text(part, "text", f"{where}.content") for part in (parts if isinstance(parts, list) else ()))


def _text(item: Any, name: str, where: str) -> str:
    text = item.get(name) if isinstance(item, Mapping) else None
    if not isinstance(text, str):
        raise invalid(f"{where}.{name} must be text.", f"{where}.{name}")
    return text


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """A question and its answer."""

    messages: Sequence[dict[str, Any]]
    size: int  # bytes


@dataclass(frozen=True)
class KeptResponse:
    """A response."""

    client: str  # whose it is
    body: bytes
    turns: tuple[KeptTurn, ...]  # of its conversation, the last with its answer; shared with other responses


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


_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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

    def __init__(self, name: str, repeated: Mapping[str, Any], keep: Callable[[bytes, dict[str, Any]], None]) -> None:
        self.id, self._repeated, self._keep = name, repeated, keep
        self._created, self._events = int(time.time()), 0
        self._output: list[dict[str, Any]] = []  # items so far
        self._item: dict[str, Any] = {}  # the last of them while it is in progress
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back
        self._details: dict[str, Any] = {}  # traces and statistics

    def begin(self, index: int) -> bytes:
        response = self._response("in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def chunk(self, index: int, piece: Piece, stats: dict[str, Any] | None, used: tuple[int, int]) -> bytes:
        """Events of a piece; its trace and statistics are in the whole alone."""
        if piece.trace is not None:
            self._details.setdefault("steps", []).append(piece.trace)
        if stats is not None:
            self._details["stats"] = stats
        self._logprobs += (piece.logprobs or {}).get("content") or ()
        events = self._grow("reasoning", piece.reasoning) if piece.reasoning else b""
        events += self._grow("message", piece.text) if piece.text else b""
        for call in piece.calls:
            begin = {"call_id": call["id"], "name": call["function"]["name"]} if call.get("id") else {}
            events += self._grow("function_call", call["function"].get("arguments") or "", **begin)
        if piece.finish is not None:
            if not self._output or (self._logprobs and self._item.get("type") == "message"):
                events += self._grow("message", "")
            events += self._close("incomplete" if piece.finish == "length" else "completed")
        return events

    def end(self, choices: Sequence[Choice], used: dict[str, Any]) -> bytes:
        response = self._finished(choices[0], used)
        return self._event(response["status"], response=response)

    def broken(self, error: dict[str, Any]) -> bytes:
        about = {name: error["error"][name] for name in ("code", "message", "param")}
        cause = {"code": "server_error", "message": about["message"]}
        return self._event("error", **about) + self._event("failed", response=self._response("failed", error=cause))

    def body(self, choices: Sequence[Choice], used: dict[str, Any], details: list[dict[str, Any]]) -> bytes:
        choice = choices[0]
        whole = Piece(choice.text, choice.logprobs, None, choice.finish, choice.reasoning, tuple(choice.calls))
        self.chunk(0, whole, None, (0, 0))
        self._details = details[0] if details else {}
        return json.dumps(self._finished(choice, used)).encode()

    def _finished(self, choice: Choice, used: Mapping[str, Any]) -> dict[str, Any]:
        is_cut = choice.finish == "length"
        counts = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }
        response = self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            usage=counts,
            **metrics([choice]),
            **({"saccade": self._details} if self._details else {}),
        )
        more = {"reasoning_content": choice.reasoning, "tool_calls": choice.calls}
        given = {name: value for name, value in more.items() if value}
        self._keep(json.dumps(response).encode(), {"role": "assistant", "content": choice.text, **given})
        return response

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "response", "created_at": self._created, "status": status}
        ends = {"error": None, "incomplete_details": None, "usage": None, **fields}
        return {**head, **self._repeated, "output": self._output, **ends}

    def _grow(self, kind: str, text: str, **begin: Any) -> bytes:
        """Append to the item in progress; begin another where that is of another kind, or with ``begin``."""
        events = self._open(kind, **begin) if begin or self._item.get("type") != kind else b""
        if kind == "function_call":
            self._item["arguments"] += text
            return events + self._of_item("function_call_arguments.delta", delta=text)
        (part,) = self._item["content"]
        part["text"] += text
        new = {}
        if kind == "message":
            new["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += new["logprobs"]
        return events + self._of_item(f"{part['type']}.delta", delta=text, **new)

    def _open(self, kind: str, **fields: Any) -> bytes:
        events = self._close("completed")
        prefix, own, part = deepcopy(_ITEMS[kind])
        self._item = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **own, **fields}
        self._output.append(self._item)
        events += self._of_item("output_item.added", item=self._item)
        if not part:
            return events
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
            events = self._of_item(f"{part['type']}.done", **whole) + self._of_item("content_part.done", part=part)
        events += self._of_item("output_item.done", item=self._item)
        self._item = {}
        return events

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the item in progress."""
        place: dict[str, Any] = {"output_index": len(self._output) - 1}
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

    def __init__(self, service: Service, kept: KeptResponses) -> None:
        super().__init__(service, ChatRequest)
        self._kept = kept

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer; refusals name the fields of this API."""
        try:
            await super().__call__(scope, receive, send)
        except Refusal as refusal:
            if refusal.code == "unknown_parameter":  # of the client's own words
                raise
            texts = (refusal.message, refusal.param or "")
            message, param = (_IN_CHAT.sub(lambda found: IN_CHAT[found[0]], text) for text in texts)
            raise replace(refusal, message=message, param=param or None) from refusal

    def _read(self, content: bytes, client: str) -> ChatRequest:
        asked = self._asked = validated(ResponseRequest, object_of(content))
        name = asked.previous_response_id
        before = () if name is None else self._kept.find(name, client).turns
        system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        question = messages_of(asked.input)
        name = self._name = f"resp_{self._service.replica}{uuid.uuid4().hex}"
        kept, size = self._kept, len(content)

        def keep(response: bytes, answer: dict[str, Any]) -> None:
            if asked.store:
                kept.add(name, KeptResponse(client, response, (*before, KeptTurn((*question, answer), size + len(response)))))

        self._keep = keep
        return chat_request(asked, [*system, *(each for turn in before for each in turn.messages), *question])

    def _make_form(self, body: ChatRequest | CompletionRequest, model: str) -> Form:
        asked = self._asked.model_dump(exclude={"input", "include", *(self._asked.model_extra or ())})
        used = {name: getattr(body, name) for name in ("temperature", "top_p", "top_logprobs")}
        used |= {"model": model, "truncation": "disabled", "background": False}
        return ResponseForm(self._name, {**asked, **used}, self._keep)
