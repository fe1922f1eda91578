"""Answers of OpenAI's Responses API: items, the events of their growth, and whole responses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from saccade.serve.answers import Choice, Form, Piece, metrics
from saccade.serve.refusals import Json, Refusal

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
