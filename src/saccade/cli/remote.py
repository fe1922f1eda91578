"""Conversations with a server, for `saccade chat --url`."""

from __future__ import annotations

import base64
import http.client
import json
import mimetypes
import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from saccade.cli import screen
from saccade.errors import InputError
from saccade.files import expanded
from saccade.wording import count

NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
"""Generation options -> fields of requests, where the names differ."""
KEY_VARIABLE = "SACCADE_API_KEY"


class RemoteChat:
    """A conversation with an OpenAI-compatible server."""

    def __init__(
        self,
        url: str,
        model: str | None,
        speculation: str | None,
        system: str | None,
        options: dict[str, Any],
        marked: bool,
    ) -> None:
        unusable = InputError(f"{url} is no address of a server; give one such as http://127.0.0.1:8000/v1.")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            _ = parts.port, (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
        except ValueError:  # a wrong port, bracket or dot, or letters that a path cannot have
            raise unusable from None
        if parts.scheme not in ("http", "https") or not parts.hostname or " " in url or not url.isprintable():
            raise unusable
        self._address = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        given = {NAMES.get(name, name): value for name, value in options.items() if value is not None}
        sampled = given.pop("do_sample", None)
        if sampled is not None:  # a server samples where it gets a field of sampling
            given.setdefault("temperature", int(sampled))
        self._body = {"stream": True, **given}
        for name, value in (("model", model), ("speculation", speculation)):
            if value is not None:
                self._body[name] = value
        if marked:
            self._body["saccade"] = {"trace": True}
        self._marked, self._system = marked, system
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._messages: list[dict[str, Any]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def send(self, text: str, images: Sequence[str], videos: Sequence[str]) -> str:
        """Send a message, print the answer as it comes, and return a line of statistics; Ctrl-C ends it early."""
        content = [_medium("image", file) for file in images] + [_medium("video", file) for file in videos]
        turn = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        body = {**self._body, "messages": [*self._messages, turn], "stream_options": {"include_usage": True}}
        printer, answer, used = screen.MarkPrinter(screen.out()), "", dict[str, Any]()
        stopped = False
        try:
            for event in self._events(body):
                used = event.get("usage") or used
                own = event.get("saccade") or {}
                for choice in event.get("choices", ()):
                    piece = (choice.get("delta") or {}).get("content") or ""
                    answer += piece
                    if not self._marked:
                        printer.put(piece, "target")
                for token in own.get("tokens", ()):
                    printer.put(token["text"], token["mark"])
        except KeyboardInterrupt:
            stopped = True  # what has come is kept, as of a model that is loaded here
        finally:
            printer.finish()
        if answer or not stopped:
            self._messages += [turn, {"role": "assistant", "content": answer}]
        accepted = (used.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
        drafted = "" if accepted is None else f", {accepted} of them drafted"
        return "interrupted" if stopped else f"{count(used.get('completion_tokens', 0), 'token')}{drafted}"

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a request and yield its server-sent events."""
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        where = self._address.netloc
        connection = kind(str(self._address.hostname), self._address.port, timeout=600)
        key = os.environ.get(KEY_VARIABLE)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            connection.request("POST", self._path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise InputError(f"The server {where} refuses: {_reason(response.read(), response.status)}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise InputError(f"The server {where} failed: {_reason(line[6:], 500)}")
                    yield event
        except (OSError, http.client.HTTPException) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise InputError(f"The server {where} cannot be reached ({reason}); check --url.") from problem
        finally:
            connection.close()


def _reason(content: bytes, status: int) -> str:
    """The sentence of an error in OpenAI's form."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}, without a reason in OpenAI's form."


def _medium(kind: str, file: str) -> dict[str, Any]:
    """A part of a message with a file's content."""
    if file.startswith("data:"):
        url = file
    else:
        try:
            content = expanded(file).read_bytes()
        except OSError as problem:
            raise InputError(f"Cannot read the {kind} {file}: {problem.strerror}.") from problem
        guessed = mimetypes.guess_type(file)[0] or f"{kind}/*"
        url = f"data:{guessed};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
