"""OpenAI's Responses API: its requests as chat requests, and the responses that are kept for later turns."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from saccade.serve.answers import Form
from saccade.serve.configuration import MIB, Limits
from saccade.serve.refusals import Json, Refusal, invalid
from saccade.serve.response_form import ResponseForm
from saccade.serve.schemas import (
    AnyRequest,
    ChatRequest,
    Count,
    Part,
    checked,
    prompting,
    refuse_renamed,
    template_message,
    validated,
)
from saccade.serve.service import Service
from saccade.serve.streaming import Exchange

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
        function = {name: _text(item, name, where) for name in ("name", "arguments")}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": item.get("output")}
    raise invalid(f"{where}.type {str(kind)[:60]!r} is not supported here; leave this item out.", f"{where}.type")


def _reasoning(item: Json, where: str) -> str:
    parts = item.get("content") or item.get("summary")
    if not isinstance(parts, list):
        return ""
    return "".join(_text(part, "text", f"{where}.content") for part in parts)


def _text(item: Any, name: str, where: str) -> str:
    text = item.get(name) if isinstance(item, Mapping) else None
    if not isinstance(text, str):
        raise invalid(f"{where}.{name} must be text.", f"{where}.{name}")
    return text


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
    """Return the items behind the one with an id, with what is said of a list's part."""
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


class ResponseExchange(Exchange):
    """Answer of ``/v1/responses``."""

    names = IN_CHAT

    def __init__(self, service: Service, kept: KeptResponses) -> None:
        super().__init__(service, ChatRequest)
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
