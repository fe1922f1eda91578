"""`saccade chat`: a conversation in the terminal, with images and videos, with a model here or behind a server."""

from __future__ import annotations

import base64
import http.client
import json
import mimetypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from saccade.cli import screen
from saccade.cli.option_groups import DecodingOptions, MarkOptions, ModelOptions, option, spread
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


@spread
def chat(
    *,
    image: list[str] | None = option(None, "Image for the first message; may be repeated.", "-i", metavar="FILE"),
    system: str | None = option(None, "System message."),
    shown: MarkOptions,
    url: str | None = option(
        None, "Talk to a server such as http://127.0.0.1:8000/v1, by its models and methods.", metavar="URL"
    ),
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Chat with a model about images and videos.

    Later turns reuse the KV cache of the earlier ones: only new tokens are prefilled. `/help` lists the commands.
    With `--url`, --target and --method name the server's models and methods, and SACCADE_API_KEY has its key.
    """
    screen.check_media(image or [], [])
    talker: _Local | RemoteChat
    if url is not None:
        if shown.text_as_text or models != ModelOptions(target=models.target, method=models.method):
            raise InputError(
                "--drafter, --head, --set, --text-as-text and options of devices, number formats and --exact are for "
                "models loaded here; leave them out with --url."
            )
        options = {"model": models.target, "speculation": models.method, "seed": decoding.seed, **decoding.options()}
        talker = RemoteChat(url, system, options, shown.marks)
        screen.note(f"{url}. /help lists commands, Ctrl-D leaves.")
    else:
        from saccade.target_model.lean import caveat

        options = {"text_as_text": shown.text_as_text, "seed": decoding.seed, **decoding.checked()}
        models = models.or_pocket()
        vlm = models.load()
        talker = _Local(vlm, system, options, shown.marks)
        screen.note(f"{models.target} with method {vlm.method}. /help lists commands, Ctrl-D leaves.")
        if warning := caveat(vlm.target, vlm.lossless):
            screen.note(warning)
    talk = _Talk(talker, image or [])
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then has history and cursor keys)
    while (line := _line()) is not None:
        try:
            if line in ("/quit", "/exit"):
                return
            talk.take(line)
        except SaccadeError as problem:
            screen.note(str(problem), "red")


def _line() -> str | None:
    """Return the next line of input; None at its end."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            screen.note("\nCtrl-D leaves.")


class _Local:
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


class _Talk:
    """A conversation, and the files attached to its next message."""

    def __init__(self, talker: _Local | RemoteChat, images: list[str]) -> None:
        self._talker = talker
        self._files: dict[str, list[str]] = {"/image": images, "/video": []}

    def take(self, line: str) -> None:
        """Run a command, or send the line as a message and print the answer."""
        name, _, argument = line.partition(" ")
        if not line:
            return
        if not line.startswith("/"):
            files = self._files
            self._files = {"/image": [], "/video": []}  # even if they are refused, or every later message would fail
            screen.note(self._talker.send(line, files["/image"], files["/video"]))
        elif name in self._files:
            file = argument.strip().strip("'\"")
            if not file:
                raise InputError(f"{name} needs a file, such as {name} holiday.{'jpg' if name == '/image' else 'mp4'}.")
            attached = {"/image": [], "/video": [], name: [file]}
            screen.check_media(attached["/image"], attached["/video"])  # reported now, not with the next message
            self._files[name] = [*self._files[name], file]
            screen.note(f"{file} is attached to your next message.")
        elif line == "/reset":
            self._talker.reset()
            self._files = {"/image": [], "/video": []}
            screen.note("A new conversation.")
        elif line == "/help":
            screen.note(HELP)
        else:
            raise InputError(f"{line} is not a command; /help lists the commands.")


NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
"""Generation options -> fields of requests, where the names differ."""


class RemoteChat:
    """A conversation with an OpenAI-compatible server."""

    def __init__(self, url: str, system: str | None, options: dict[str, Any], marked: bool) -> None:
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
        self._body = {NAMES.get(name, name): value for name, value in options.items() if value is not None}
        sampled = self._body.pop("do_sample", None)
        if sampled is not None:  # a server samples where it gets a field of sampling
            self._body.setdefault("temperature", int(sampled))
        self._body["stream"] = True
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
        printer, answer, used = screen.Painter(None, screen.out(), marked=False), "", dict[str, Any]()
        stopped = False
        try:
            for event in self._events(body):
                used = event.get("usage") or used
                for choice in event.get("choices", ()):
                    piece = (choice.get("delta") or {}).get("content") or ""
                    answer += piece
                    if not self._marked:
                        printer.put(piece, "target")
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
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        where, key = self._address.netloc, os.environ.get("SACCADE_API_KEY")
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            with closing(kind(str(self._address.hostname), self._address.port, timeout=600)) as connection:
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
            content = expanded(file).read_bytes()
        except OSError as problem:
            raise InputError(f"Cannot read the {kind} {file}: {problem.strerror}.") from problem
        form = mimetypes.guess_type(file)[0] or f"{kind}/*"
        url = f"data:{form};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
