"""A live server in the test process, and questions for it with the calls of `generate` that must agree."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from typing import Any

from openai import OpenAI

from checkpoints import picture, tokenizer, vlm
from media_files import data_uri, encoded
from saccade import VLM
from saccade.inputs.media import SERVER
from saccade.serve.answers import Choice, Piece
from saccade.serve.app import make_app
from saccade.serve.configuration import Limits, ModelEntry, ServerConfig
from saccade.serve.server import Server, bind
from saccade.serve.service import Service

TIMEOUT = 60.0
TINY = ModelEntry("tiny", profiles={"short": {"method": "chain", "gamma": 2}})
WORDS = ModelEntry("words")
PAINT = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "layers": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["colour", "layers"],
        "additionalProperties": False,
    },
}
"""A function that clients offer."""

CALLS = [
    {"id": f"call_{city}", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    for city in ("Oslo", "Rome")
]
"""Two calls of one tool."""


def calling() -> tuple[Choice, list[Piece]]:
    """An answer that reasons, speaks and calls a tool twice, and the pieces in which it is streamed."""
    choice = Choice(tokenizer(), (), True, None, False, text="I look.", finish="tool_calls", reasoning="Hm, so.")
    choice.calls = CALLS
    pieces = [Piece("", None, None, None, reasoning=part) for part in ("Hm", ", so.")]
    pieces += [Piece(part, None, None, None) for part in ("I ", "look.")]
    for index, call in enumerate(CALLS):
        name, arguments = call["function"].values()
        parts = [{**call, "index": index, "function": {"name": name, "arguments": ""}}]
        parts += [{"index": index, "function": {"arguments": part}} for part in (arguments[:5], arguments[5:])]
        pieces += [Piece("", None, None, None, calls=(part,)) for part in parts]
    return choice, [*pieces, Piece("", None, None, "tool_calls")]


@dataclass
class Live:
    """A running server."""

    server: Server
    service: Service
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=TIMEOUT)

    def call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def post(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        """Status and parsed body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _, answer = self.call("POST", path, content)
        return status, json.loads(answer)

    def stream(self, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
        """Parsed events of a stream, without the last, which says that it is done."""
        status, _, answer = self.call("POST", path, json.dumps(body).encode())
        events = answer.decode().split("\n\n")
        assert (status, events[-2:]) == (200, ["data: [DONE]", ""])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def raw(self, content: bytes) -> bytes:
        """Everything that is answered to these bytes, to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), TIMEOUT) as connection:
            connection.sendall(content)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def until(self, condition: Any, seconds: float = 30.0) -> None:
        """Wait for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the server did not reach the expected state in time"
            time.sleep(0.01)

    @property
    def is_idle(self) -> bool:
        owner = self.service.owner
        return not owner.counts.running and not any(map(owner.waiting_for, self.service.models))


@contextmanager
def live(models: Sequence[tuple[ModelEntry, VLM]] = (), send_buffer: int = 0, **settings: Any) -> Iterator[Live]:
    """A server on a free port; settings of `Limits` and `ServerConfig`, and bytes that its sockets may buffer."""
    settings.setdefault("media", replace(SERVER, own_process=False))  # a fork server takes seconds to start
    models = models or [(TINY, vlm("qwen", "qwen-draft"))]
    of_server = {name: settings.pop(name) for name in list(settings) if name in ServerConfig.__dataclass_fields__}
    limits = Limits(**{"kv_memory_mib": 256, "media_cache_mib": 16, **settings})
    config = ServerConfig(tuple(entry for entry, _ in models), port=0, limits=limits, **of_server)
    app = make_app(config, [model for _, model in models])
    listening = bind(config)
    if send_buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(config, app)
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    running = Live(server, app.state.service, listening.getsockname()[1], thread)
    running.until(lambda: server.started)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def _no_signals() -> Iterator[None]:
    """Signals belong to the main thread."""
    yield


def uri(number: int, size: tuple[int, int] = (32, 32)) -> str:
    """A picture as a data URI."""
    return data_uri(encoded("PNG", picture(number, size)))


def asks(words: str, *images: str) -> list[dict[str, Any]]:
    """One user message, images first."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def unmarked(server: Live) -> dict[str, int]:
    """Biases against thoughts that the model begins or ends by itself."""
    marks = ["<think>", "</think>"]
    ids = server.service.models["thinker"].vlm.processor.tokenizer.convert_tokens_to_ids(marks)
    return dict.fromkeys(map(str, ids), -100)


@dataclass(frozen=True)
class Question:
    """A request to the server, and the call of `generate` with the same answer."""

    body: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def expected(self, model: VLM) -> str:
        return model.generate(self.body["messages"], **self.options).text

    def with_(self, **fields: Any) -> Question:
        return replace(self, body={**self.body, **fields})


def questions(count: int, seed: int = 0) -> list[Question]:
    """Mixed requests: text and pictures, greedy and sampled, penalties and biases, short and long."""
    rng, made = random.Random(seed), []
    for number in range(count):
        words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 40))) + "?"
        images = [uri(rng.randint(0, 5)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
        most = rng.choice((1, 3, 8, 17, 30))
        body: dict[str, Any] = {"model": "tiny", "messages": asks(words, *images), "max_tokens": most}
        options: dict[str, Any] = {"max_new_tokens": most}
        if number % 3 == 1:
            body |= {"temperature": rng.choice((0.5, 1.0, 1.5)), "seed": number, "top_p": 0.9}
            options |= {"do_sample": True, "temperature": body["temperature"], "top_p": 0.9, "top_k": 0}
            options |= {"seed": number}
        if number % 5 == 2:
            body["repetition_penalty"] = options["repetition_penalty"] = 1.2
        if number % 7 == 3:
            body["logit_bias"] = {"40": 5.0}
            options["sequence_bias"] = {(40,): 5.0}
        made.append(Question(body, options))
    return made
