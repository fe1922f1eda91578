"""Anthropic's Messages API: its requests as chat requests, and its answers as blocks and events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from saccade.serve.answers import Choice, Form, Piece, metrics
from saccade.serve.refusals import Json, Refusal, invalid
from saccade.serve.schemas import (
    AnyRequest,
    ChatRequest,
    Count,
    Part,
    arguments_of,
    checked,
    prompting,
    refuse_renamed,
    text_field,
    validated,
)
from saccade.serve.service import Exchange, Service
from saccade.serve.tools import ReplyFormat

IN_CHAT = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "function.parameters": "input_schema",
    "function.name": "name",
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), "messages"),
}
"""Fields of chat requests -> where this API has them."""
FOREIGN = ("logprobs", "top_logprobs", "n", "stream_options", "echo")
"""Fields of chat requests that answers of this API have no place for."""
BILLING = "x-anthropic-billing-header"
"""Begin of a block that agents put before their system prompt: another one every time, and no part of the prompt."""
BLOCKS = {"user": ("text", "image", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
"""Roles -> kinds of blocks that their messages may have."""
FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("source",),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""Kinds of blocks -> their fields besides ``type`` and ``cache_control``."""
SOURCES = {"base64": ("media_type", "data"), "url": ("url",)}


class CacheControl(Part):
    """Mark of a prefix that will come again. Every prefix is kept here, so that it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None  # whether the answer has the text of its thoughts


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Part):
    effort: str | None = None
    format: OutputFormat | None = None


class ClientTool(Part):
    """A function of the client's; those that hosts run are not known here."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Json
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments always stream as they grow
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagePrompt(BaseModel):
    """Fields that decide the prompt; others are those of chats."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, max_length=10_000)]
    system: str | list[Json] = ""
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    tools: list[ClientTool] = Field([])
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None


class MessageRequest(MessagePrompt):
    max_tokens: Count
    stop_sequences: list[str] | None = None


def chat_request(asked: MessagePrompt, replies: ReplyFormat) -> ChatRequest:
    """Return the chat request with the same answer; errors as of `saccade.serve.schemas.checked`."""
    more = dict(asked.model_extra or {})
    refuse_renamed(more, IN_CHAT)
    for name in more:
        if name in FOREIGN:
            raise invalid(f"The field {name} is not supported here; leave it out.", name, "unsupported_parameter")
    variables, choice, form = more.pop("chat_template_kwargs", {}), asked.tool_choice, asked.output_config.format
    if isinstance(variables, dict):
        variables = {**_thinking(asked, replies), **variables}
    messages = messages_of(asked)
    fields = {
        "model": asked.model,
        "messages": messages,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "chat_template_kwargs": variables,
        "reasoning_effort": asked.output_config.effort,
        "thinking_token_budget": asked.thinking and asked.thinking.budget_tokens,
        "response_format": form and {"type": "json_schema", "json_schema": {"schema": form.schema_}},
        "tools": [_tool(tool) for tool in asked.tools],
        "tool_choice": choice and _choice(choice),
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
    }
    if isinstance(asked, MessageRequest):
        fields |= {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences}
    return checked(ChatRequest, {**more, **fields}, list(MessageRequest.model_fields))


def request_to_count(service: Service, content: bytes) -> ChatRequest:
    """Return the chat request whose prompt ``/v1/messages/count_tokens`` counts."""
    asked = prompting(MessagePrompt, content)
    return chat_request(asked, service.model(asked.model).planner.replies)


def _thinking(asked: MessagePrompt, replies: ReplyFormat) -> Json:
    """Variables of the chat template that let the model think, or not."""
    thinking = asked.thinking
    if thinking is None:
        return {}
    if thinking.type == "enabled" and not replies.thinks:
        raise invalid("thinking: this model writes no thoughts; leave it out, or say disabled.", "thinking")
    if thinking.type == "disabled" and replies.thinks and replies.switch is None:
        raise invalid("thinking: this model always thinks, by its chat template; leave it out.", "thinking")
    if replies.switch is None:
        return {}
    return {replies.switch: thinking.type != "disabled"}


def _tool(tool: ClientTool) -> Json:
    about = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**about, "parameters": tool.input_schema}}


def _choice(choice: ToolChoice) -> str | Json:
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice needs name exactly when its type is tool.", "tool_choice.name")
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


# -- messages ----------------------------------------------------------------------------------------------


def messages_of(asked: MessagePrompt) -> list[Json]:
    """Return the messages of a chat: turns of the same side are one, and results come before other content.

    Chat templates take a system message at the begin alone: later ones belong to the user's turn.
    """
    system = _blocks(asked.system, "system", BLOCKS["system"])
    turns: list[Json] = []
    for number, message in enumerate(asked.messages):
        where = f"messages[{number}]"
        _only(message, where, ("role", "content"))
        role = message.get("role")
        if not isinstance(role, str) or role not in BLOCKS:
            raise invalid(f"{where}.role must be user, assistant or system.", f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content", BLOCKS[role])
        if role == "system" and not turns:
            system += blocks
            continue
        for place, block in enumerate(blocks):
            _add(turns, "assistant" if role == "assistant" else "user", block, f"{where}.content[{place}]")
    if not turns:
        raise invalid("messages has no message of the user; give one.", "messages")
    if turns[-1]["role"] == "assistant" and ("tool_calls" in turns[-1] or not turns[-1]["content"]):
        raise invalid("messages ends with a turn that cannot be continued; give its tool_result or text.", "messages")
    texts = [text_field(block, "text", "system") for block in system]
    told = "".join(text for text in texts if not text.startswith(BILLING))
    turns = [{**turn, "content": _content(turn["content"], turn["role"] != "user")} for turn in turns]
    if told:
        turns.insert(0, {"role": "system", "content": told})
    return turns


def _blocks(content: Any, where: str, kinds: Sequence[str]) -> list[Json]:
    """Blocks of a content, without fields that are null."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{where} must be text or a list of blocks.", where)
    blocks = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise invalid(f"{place}.type must be {' or '.join(kinds)}, not {str(kind)[:60]!r}.", f"{place}.type")
        blocks.append(_only(block, place, ("type", "cache_control", *FIELDS[kind])))
        if "cache_control" in blocks[-1]:
            validated(_Marked, {"cache_control": blocks[-1]["cache_control"]})
    return blocks


class _Marked(Part):
    cache_control: CacheControl


def _only(fields: Any, where: str, known: Sequence[str]) -> Json:
    """Fields that are not null, all of which must be known."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() - set(known):
        raise invalid(f"The field {where}.{name[:60]} is unknown; leave it out.", where, "unknown_parameter")
    return given


def _add(turns: list[Json], role: str, block: Json, where: str) -> None:
    """Add a block to a conversation, in the last turn where that is of its side."""
    if block["type"] == "tool_result":
        at = len(turns)
        if turns and turns[-1]["role"] == "user":
            at -= 1
        turns.insert(at, _result(block, where))
        return
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    turn = turns[-1]
    if block["type"] == "thinking":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text_field(block, "thinking", where)
    elif block["type"] == "tool_use":
        turn.setdefault("tool_calls", []).append(_call(block, where))
    else:
        turn["content"].append(_part(block, where))


def _part(block: Json, where: str) -> Json:
    if block["type"] == "text":
        return {"type": "text", "text": text_field(block, "text", where)}
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or not isinstance(kind, str) or kind not in SOURCES:
        raise invalid(f"{where}.source.type must be base64 or url.", f"{where}.source.type")
    _only(source, f"{where}.source", ("type", *SOURCES[kind]))
    first, *data = [text_field(source, name, f"{where}.source") for name in SOURCES[kind]]
    url = f"data:{first};base64,{data[0]}" if data else first
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: Json, where: str) -> Json:
    if not isinstance(block.get("input"), dict):
        raise invalid(f"{where}.input must be an object.", f"{where}.input")
    if block.get("caller", {"type": "direct"}) != {"type": "direct"}:
        raise invalid(f"{where}.caller must be direct: there are no other callers here.", f"{where}.caller")
    name, number = (text_field(block, field, where) for field in ("name", "id"))
    function = {"name": name, "arguments": json.dumps(block["input"])}
    return {"id": number, "type": "function", "function": function}


def _result(block: Json, where: str) -> Json:
    place = f"{where}.content"
    parts = [_part(part, place) for part in _blocks(block.get("content", ""), place, ("text", "image"))]
    if block.get("is_error"):
        parts = [{"type": "text", "text": "Error: "}, *parts]
    return {"role": "tool", "tool_call_id": text_field(block, "tool_use_id", where), "content": parts}


def _content(parts: list[Json], joined: bool) -> str | list[Json]:
    """Content of a message: text where it is one, or is to be joined to one."""
    is_text = all(part["type"] == "text" for part in parts)
    if is_text and (joined or len(parts) == 1):
        return "".join(part["text"] for part in parts)
    return parts


SIGNATURE = "unsigned"  # of thoughts, which need none to be sent back
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
BEGINS: dict[str, Json] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Kinds of blocks -> their fields as they begin."""


class MessageForm(Form):
    """One answer as Anthropic's ``Message``: its events while it grows, and the whole.

    Args:
        model: its name.
        prompt_tokens: length of its prompt.
        shows_thoughts: whether it has the text of its thoughts.
    """

    def __init__(self, model: str, prompt_tokens: int, shows_thoughts: bool) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens, self._shows_thoughts = prompt_tokens, shows_thoughts
        self._count, self._kind = 0, ""  # blocks so far, and the kind of the one in progress

    def begin(self, index: int, echo: str) -> bytes:
        used = {"prompt_tokens": self._prompt_tokens, "completion_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(used)}
        start = _event("message_start", message=message)
        return start + _event("ping")

    def chunk(self, index: int, piece: Piece, stats: Json | None, used: tuple[int, int]) -> bytes:
        """Events of a piece; its trace and statistics are at the end."""
        events = b""
        if piece.reasoning:
            text = piece.reasoning if self._shows_thoughts else ""
            events += self._open("thinking")
            if text:
                events += self._delta("thinking", thinking=text)
        if piece.text:
            events += self._open("text")
            events += self._delta("text", text=piece.text)
        for call in piece.calls:
            function = call["function"]
            if call.get("id"):
                events += self._close()
                events += self._open("tool_use", id=call["id"], name=function["name"])
            if function.get("arguments"):
                events += self._delta("input_json", partial_json=function["arguments"])
        if piece.finish:
            events += self._close()
        return events

    def end(self, choices: Sequence[Choice], used: Json, details: Sequence[Json] = ()) -> bytes:
        ended = _ended(choices[0], details)
        delta = {name: ended.pop(name) for name in ("stop_reason", "stop_sequence")}
        last = _event("message_delta", delta=delta, usage=_usage(used), **ended)
        return last + _event("message_stop")

    def broken(self, refusal: Refusal) -> bytes:
        return refusal.event("/v1/messages")

    def body(self, choices: Sequence[Choice], used: Json, details: Sequence[Json]) -> bytes:
        choice = choices[0]
        content: list[Json] = []
        if choice.reasoning:
            thoughts = choice.reasoning if self._shows_thoughts else ""
            content.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            function = call["function"]
            about = {"id": call["id"], "name": function["name"], "input": arguments_of(function["arguments"]) or {}}
            content.append({"type": "tool_use", **about})
        whole = {**self._head, "content": content, **_ended(choice, details), "usage": _usage(used)}
        return json.dumps(whole).encode()

    def _open(self, kind: str, **fields: Any) -> bytes:
        """Begin a block of a kind, unless one is in progress."""
        if self._kind == kind:
            return b""
        events = self._close()
        self._kind = kind
        block = {"type": kind, **BEGINS[kind], **fields}
        return events + _event("content_block_start", index=self._count, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._count, delta={"type": f"{kind}_delta", **fields})

    def _close(self) -> bytes:
        """End the block in progress, where there is one."""
        if not self._kind:
            return b""
        events = self._delta("signature", signature=SIGNATURE) if self._kind == "thinking" else b""
        events += _event("content_block_stop", index=self._count)
        self._kind = ""
        self._count += 1
        return events


def _ended(choice: Choice, details: Sequence[Json]) -> Json:
    reason, stop = STOP_REASONS.get(choice.finish or "", "end_turn"), None
    if reason == "end_turn" and choice.stop is not None:
        reason, stop = "stop_sequence", choice.stop
    ended = {"stop_reason": reason, "stop_sequence": stop, **metrics([choice])}
    if details:
        ended["saccade"] = details[0]
    return ended


def _usage(used: Json) -> Json:
    """Counts as this API divides them: the prompt's cached tokens are no input tokens."""
    cached = used.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    thoughts = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thoughts},
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


class MessageExchange(Exchange):
    """Answer of ``/v1/messages``."""

    names = IN_CHAT

    def _read(self, content: bytes, client: str) -> ChatRequest:
        asked = self._asked = validated(MessageRequest, content)
        return chat_request(asked, self._service.model(asked.model).planner.replies)

    def _make_form(self, body: AnyRequest, model: str) -> Form:
        thinking, prompt = self._asked.thinking, self._jobs[0].request.prompt
        return MessageForm(model, len(prompt), thinking is None or thinking.display != "omitted")
