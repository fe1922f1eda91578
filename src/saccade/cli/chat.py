"""`saccade chat`: a conversation in the terminal, with images and videos, with a model here or behind a server."""

from __future__ import annotations

import base64
import http.client
import json
import mimetypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from saccade.cli import screen
from saccade.cli.option_groups import DecodingOptions, ModelOptions, ReadingOptions, option
from saccade.errors import InputError, SaccadeError
from saccade.files import expanded
from saccade.wording import count

if TYPE_CHECKING:
    from saccade.vlm import VLM

HELP = """\
  /image FILE   attach an image to your next message (may be repeated)
  /video FILE   attach a video to your next message
  /reset        start a new conversation
  /help         this list
  /quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


def chat(
    *,
    image: list[str] | None = option(None, "Image for the first message; may be repeated.", "-i", metavar="FILE"),
    system: str | None = option(None, "System message."),
    marks: bool = option(False, "Mark accepted draft tokens: green or ‹ ›, loosely accepted ones yellow or « »."),
    url: str | None = option(None, "Talk to a server such as http://127.0.0.1:8000/v1.", metavar="URL"),
    reading: ReadingOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Chat with a model about images and videos.

    Later turns reuse the KV cache of the earlier ones: only new tokens are prefilled. `/help` lists the commands.
    With `--url`, --target and --method name the server's models and methods, and SACCADE_API_KEY has its key.
    """
    files: dict[str, list[str]] = {"image": image or [], "video": []}  # of the next message
    screen.check_media(**files)
    talker: LocalChat | RemoteChat
    if url is not None:
        if reading != ReadingOptions() or models != ModelOptions(target=models.target, method=models.method):
            raise InputError(
                "--drafter, --head, --set, --text-as-text and options of frames, devices, number formats and --exact "
                "are for models loaded here; leave them out with --url."
            )
        options = {"model": models.target, "speculation": models.method, "seed": decoding.seed, **decoding.options()}
        talker = RemoteChat(url, system, options, marks)
        screen.note(f"{url}. /help lists commands, Ctrl-D leaves.")
    else:
        from saccade.target_model.lean import caveat

        options = {"seed": decoding.seed, **asdict(reading), **decoding.checked()}
        models = models.or_pocket()
        vlm = models.load()
        talker = LocalChat(vlm, system, options, marks)
        screen.note(f"{models.target} with method {vlm.method}. /help lists commands, Ctrl-D leaves.")
        if warning := caveat(vlm.target, vlm.lossless):
            screen.note(warning)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then has history and cursor keys)
    while (line := _line()) not in (None, "/quit", "/exit"):
        try:
            _take(line or "", talker, files)
        except SaccadeError as problem:
            screen.note(str(problem), "red")


def _line() -> str | None:
    """Return the next line of input; None at its end."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            return input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            screen.note("\nCtrl-D leaves.")


def _take(line: str, talker: LocalChat | RemoteChat, files: dict[str, list[str]]) -> None:
    """Run a command, or send the line as a message and print the answer."""
    command, _, argument = line.partition(" ")
    kind = command.removeprefix("/")
    if line and not line.startswith("/"):
        images, videos = files["image"], files["video"]
        files |= {"image": [], "video": []}  # even if they are refused, or every later message would fail
        screen.note(talker.send(line, images, videos))
    elif kind in files:
        file = argument.strip().strip("'\"")
        if not file:
            raise InputError(f"/{kind} needs a file, such as /{kind} holiday.{'jpg' if kind == 'image' else 'mp4'}.")
        screen.check_media(**{kind: [file]})  # reported now, not with the next message
        files[kind] = [*files[kind], file]
        screen.note(f"{file} is attached to your next message.")
    elif line == "/reset":
        talker.reset()
        files |= {"image": [], "video": []}
        screen.note("A new conversation.")
    elif line == "/help":
        screen.note(HELP)
    elif line:
        raise InputError(f"{line} is not a command; /help lists the commands.")


class LocalChat:
    """A conversation with a model of this process."""

    def __init__(self, vlm: VLM, system: str | None, options: dict[str, Any], marks: bool) -> None:
        self._vlm, self._system, self._options, self._marks = vlm, system, options, marks
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._chat = self._vlm.chat(self._system)

    def send(self, text: str, images: list[str], videos: list[str]) -> str:
        """Send a message, print the answer, and return a line of statistics."""
        turn = self._chat.stream(text, images, videos, **self._options)
        painter = screen.Painter(self._vlm.processor.tokenizer, screen.out(), self._marks)
        return screen.summary(screen.answer(turn, painter), self._vlm.method)


NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
"""Generation options -> fields of requests, where the names differ."""


class RemoteChat:
    """A conversation with an OpenAI-compatible server."""

    def __init__(self, url: str, system: str | None, options: dict[str, Any], marked: bool) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            _ = parts.port, (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
            is_usable = parts.scheme in ("http", "https") and parts.hostname and " " not in url and url.isprintable()
        except ValueError:  # a wrong port, bracket or dot, or letters that a path cannot have
            is_usable = False
        if not is_usable:
            raise InputError(f"{url} is no address of a server; give one such as http://127.0.0.1:8000/v1.")
        self._place = parts.netloc
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._url = f"{parts.scheme}://{parts.netloc}{path}"
        self._body = {NAMES.get(name, name): value for name, value in options.items() if value is not None}
        sampled = self._body.pop("do_sample", None)
        if sampled is not None:  # a server samples where it gets a field of sampling
            self._body.setdefault("temperature", int(sampled))
        self._body |= {"stream": True, "stream_options": {"include_usage": True}}
        if marked:
            self._body["saccade"] = {"trace": True}
        self._marked, self._system = marked, system
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        system: dict[str, Any] = {"role": "system", "content": self._system}
        self._messages = [system] if self._system is not None else []

    def send(self, text: str, images: Sequence[str], videos: Sequence[str]) -> str:
        """Send a message, print the answer as it comes, and return a line of statistics; Ctrl-C ends it early."""
        content = [_medium("image", file) for file in images] + [_medium("video", file) for file in videos]
        turn = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        body = {**self._body, "messages": [*self._messages, turn]}
        printer, answer, used = screen.Painter(None, screen.out(), marked=False), "", dict[str, Any]()
        stopped = False
        try:
            for event in self._events(body):
                used = event.get("usage") or used
                pieces = [(choice.get("delta") or {}).get("content") or "" for choice in event.get("choices", ())]
                answer += "".join(pieces)
                if not self._marked:
                    printer.put("".join(pieces), "target")
                for token in (event.get("saccade") or {}).get("tokens", ()):
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
        headers = {"content-type": "application/json"}
        if key := os.environ.get("SACCADE_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        request = Request(self._url, json.dumps(body).encode(), headers)
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=600) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise InputError(f"The server {self._place} failed: {_reason(line[6:], 500)}")
                        yield event
        except HTTPError as problem:
            raise InputError(f"The server {self._place} refuses: {_reason(problem.read(), problem.code)}") from problem
        except (OSError, http.client.HTTPException) as problem:
            reason = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or problem
            raise InputError(f"The server {self._place} cannot be reached ({reason}); check --url.") from problem


def _reason(content: bytes, status: int) -> str:
    """The sentence of an error in OpenAI's form."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}, without a reason in OpenAI's form."


def _medium(kind: str, file: str) -> dict[str, Any]:
    """A part of a message with a file's content."""
    url = file
    if not file.startswith("data:"):
        try:
            content = base64.b64encode(expanded(file).read_bytes()).decode()
        except OSError as problem:
            raise InputError(f"Cannot read the {kind} {file}: {problem.strerror}.") from problem
        url = f"data:{mimetypes.guess_type(file)[0] or f'{kind}/*'};base64,{content}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
