"""Errors that clients receive, in OpenAI's form or in Anthropic's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import KilledError, MethodError, SaccadeError
from saccade.target_model.token_blocks import ContextError
from saccade.wording import renamed

Json = dict[str, Any]  # an object of JSON
RETRY_SECONDS = 2  # default of ``Retry-After`` where the server cannot tell
DONE = b"data: [DONE]\n\n"
MESSAGES = "/v1/messages"  # begin of the paths whose errors are in Anthropic's form
OF_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Statuses -> Anthropic's types of errors."""


@dataclass(eq=False)
class Refusal(Exception):
    status: int  # of HTTP
    message: str  # one sentence
    kind: str = "invalid_request"  # label of the error counter
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None  # seconds; None where a repetition would not help

    def body(self, path: str = "") -> Json:
        """The error in the form of a path's API: OpenAI's, or Anthropic's."""
        if path.startswith(MESSAGES):
            kind = OF_ANTHROPIC.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def event(self, path: str = "") -> bytes:
        """The end of a stream that fails."""
        data = f"data: {json.dumps(self.body(path))}\n\n".encode()
        return b"event: error\n" + data if path.startswith(MESSAGES) else data + DONE

    def renamed(self, names: Mapping[str, str]) -> Refusal:
        """The refusal for an API that has other names for some fields."""
        if not names or self.code == "unknown_parameter":  # of the client's own words
            return self
        words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        message = words.sub(lambda found: names[found[0]], self.message)
        param = words.sub(lambda found: names[found[0]], self.param or "")
        return replace(self, message=message, param=param or None)

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    return Refusal(400, message, param=param, code=code)


def overloaded(waiting: int) -> Refusal:
    message = f"The server is overloaded ({waiting} requests wait already); try again in {RETRY_SECONDS} s."
    return Refusal(503, message, "queue_full", "server_error", "overloaded", retry_after=RETRY_SECONDS)


def draining() -> Refusal:
    """A request that came, or still waited, when the server was shutting down."""
    message = "The server is shutting down; send the request to another one."
    return Refusal(503, message, "draining", "server_error", "shutting_down", retry_after=RETRY_SECONDS)


def killed() -> Refusal:
    """A request whose images or videos were being read by a process that something else killed."""
    message = f"The process that read this request's images and videos was killed; try again in {RETRY_SECONDS} s."
    return Refusal(503, message, "media_killed", "server_error", "overloaded", retry_after=RETRY_SECONDS)


def too_many(what: str, retry_after: int) -> Refusal:
    message = f"This API key or address exceeds {what}; try again in {retry_after} s."
    return Refusal(429, message, "rate_limit", "rate_limit_error", "rate_limit_exceeded", retry_after=retry_after)


def broken() -> Refusal:
    """A request that failed for reasons of the server; the log has them."""
    message = "The server failed while it answered this request; its log has the details."
    return Refusal(500, message, "engine", "server_error", "internal_error")


NAMES = {
    r"give (?:one|its folder) with [^()]* \((--[^()]*) on the command line\)": r"start the server with \1",
    r" \([^()]*on the command line[^()]*\)": "",
    r"\bdo_sample=False\b": "temperature 0",
    r"\bmax_new_tokens\b": "max_tokens",
    r"\bstop_strings\b": "stop",
    r"\braise kv_memory\b": "raise the server's --kv-memory",
}
"""Names in messages to users of Python and of the command line, and what they are for clients."""


def refusal_of(error: BaseException) -> Refusal:
    """Translate an error of the engine or of the input pipeline.

    Sentences of `SaccadeError` reach the client where the request was wrong; everything else stays in the log.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, KilledError):
        return killed()
    if isinstance(error, ContextError):
        return invalid(renamed(str(error), NAMES), "messages", "context_length_exceeded")
    if isinstance(error, MethodError):
        return invalid(renamed(str(error), NAMES), "speculation")
    if isinstance(error, SaccadeError):
        return invalid(renamed(str(error), NAMES))
    return broken()
