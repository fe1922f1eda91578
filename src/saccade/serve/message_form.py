"""Answers of Anthropic's Messages API: blocks, the events of their growth, and whole messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from saccade.serve.answers import Choice, Form, Piece, metrics
from saccade.serve.refusals import Json, Refusal

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
            about = {"id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
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


def _input(arguments: str) -> Json:
    """Arguments of a call, those that are there where they were cut."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
