"""Front of several replicas: an ASGI application that passes requests on, and repeats them where a replica is lost.

Requests are read whole, so that their place can be chosen and they can be sent again. An answer that has begun cannot
be taken back: it ends with an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response

from saccade.serve.configuration import ServerConfig
from saccade.serve.owner import PREFIX
from saccade.serve.refusals import Refusal, invalid, overloaded
from saccade.serve.service import ClientGone, Gate, Message, Receive, Send, body_of, disconnected

log = logging.getLogger("saccade.serve")
ATTEMPTS = 3  # replicas that a request is sent to before it fails
KEY = b"x-saccade-affinity"  # header by which a client names what belongs together, in place of the front's own guess
RESPONSES = "/v1/responses/"  # begin of the paths of responses that a replica keeps
KEEPER = "replica "  # begin of the keys that one replica alone can answer, before its name
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
COUNTED = {
    "requests": "Requests of clients.",
    "repeated": "Requests sent again because their replica had ended.",
    "broken": "Answers that broke off with their replica.",
    "refused": "Requests that met full queues.",
    "clients_gone": "Requests whose client left before the end.",
}
"""Counters of the front, with their help."""


class ReplicaLost(Exception):
    """A replica has ended before it had answered."""


class QueueFull(Exception):
    """All replicas have as many requests as they may, and as many wait."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    scope: dict[str, Any]  # what ASGI says about it
    body: bytes
    key: str  # of what belongs together: the client's, or that of `saccade.serve.front.key_of_body`


Call = Callable[[Forwarded], AsyncGenerator[list[Message]]]
"""Yields the messages of a replica's answer, those of a step together; raises `ReplicaLost` or `QueueFull`."""


class Front:
    def __init__(self, config: ServerConfig, call: Call, texts: Callable[[], Awaitable[dict[str, str]]]) -> None:
        self._call, self._texts = call, texts
        self._limits, self._gate, self._registry = config.limits, Gate(config), CollectorRegistry()
        disable_created_metrics()
        self.counts = {
            name: Counter(f"{PREFIX}front_{name}", text, registry=self._registry) for name, text in COUNTED.items()
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        self.counts["requests"].inc()
        answer = _Answer(send, scope["path"])
        try:
            if scope["path"] == "/metrics":
                if scope.get("query_string"):
                    raise invalid("/metrics takes no query; leave it out.", code="unknown_parameter")
                text = merged(await self._texts()) + generate_latest(self._registry)
                kind = "text/plain; version=0.0.4; charset=utf-8"
                await Response(text, media_type=kind)(scope, receive, send)
                return
            client = self._gate.client(scope)  # before a body is read
            with self._gate.request(client) if scope["method"] == "POST" else nullcontext():
                body = await body_of(receive, self._limits)
                path = scope["path"]
                key = key_of_response(path[len(RESPONSES) :]) if path.startswith(RESPONSES) else ""
                key = key or key_of_body(body)
                if not key.startswith(KEEPER):
                    key = dict(scope["headers"]).get(KEY, b"").decode("latin-1") or key
                forwarded = Forwarded({name: scope[name] for name in _SCOPE if name in scope}, body, key)
                await self._until_gone(receive, self._forward(forwarded, answer))
        except Refusal as refusal:
            await JSONResponse(refusal.body(scope["path"]), refusal.status, refusal.headers())(scope, receive, send)
        except ClientGone:
            if not answer.is_whole:
                self.counts["clients_gone"].inc()

    async def _until_gone(self, receive: Receive, work: Any) -> None:
        answering = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientGone
            await answering
        finally:
            for task in (answering, watching):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _forward(self, forwarded: Forwarded, answer: _Answer) -> None:
        """Send a request to one replica after another, until one of them has answered."""
        for _ in range(ATTEMPTS):
            try:
                async with aclosing(self._call(forwarded)) as messages:
                    async for group in messages:
                        for message in group:
                            await answer.add(message)
                return
            except QueueFull:
                self.counts["refused"].inc()
                raise overloaded(self._limits.max_queue) from None
            except ReplicaLost:
                if answer.has_begun:
                    self.counts["broken"].inc()
                    await answer.end_broken()
                    return
                self.counts["repeated"].inc()
                log.warning("A replica ended before its answer had begun; the request goes to another one.")
        raise lost()


class _Answer:
    """An answer as the client sees it; its head waits for the first piece of its body."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._head: Message | None = None
        self._is_stream = self.has_begun = self.is_whole = False

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            self._head = message
            return
        if self._head is not None:
            self.has_begun = True
            await self._send(self._head)
            self._head = None
        await self._send(message)
        self.is_whole = not message.get("more_body", False)

    async def end_broken(self) -> None:
        """End an answer whose replica is lost: a stream by an event, others by their connection."""
        if not self._is_stream:
            raise ReplicaLost
        await self._send({"type": "http.response.body", "body": lost().event(self._path)})


def lost() -> Refusal:
    message = "The replica that answered this request has ended; send the request again."
    return Refusal(503, message, "replica_lost", "server_error", "replica_lost", retry_after=1)


def merged(texts: dict[str, str]) -> bytes:
    """Join metrics in Prometheus' text format; every sample gets the label ``replica``."""
    families = _Families()
    for replica, text in sorted(texts.items()):
        for each in text_string_to_metric_families(text):
            family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
            for sample in each.samples:
                family.add_sample(sample.name, {"replica": replica, **sample.labels}, sample.value)
    return generate_latest(families)


class _Families(dict[str, Metric]):
    def collect(self) -> Iterable[Metric]:
        return self.values()


async def _live(receive: Receive, send: Send) -> None:
    for _ in ("startup", "shutdown"):
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})


# -- affinity: a request goes to the replica that has its conversation or pictures in its caches, while it has room --
#
# A conversation keeps its first question, so a key made of that question sends every later turn to the same replica,
# where the turns before are in the KV cache. Where the question brings media, the key is made of them alone: other
# questions about a picture go where its features are. Keys choose among replicas by rendezvous hashing (Thaler and
# Ravishankar, 1998), which needs no table, is the same in every process, and moves only the keys of a lost replica.

_PROMPT = 1024  # characters or ids of a raw prompt that are compared: later ones may differ


def key_of_body(body: bytes) -> str:
    """Return the key of a request; empty where nothing of it could be in a cache, or it is not valid."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    if key := key_of_response(request.get("previous_response_id")):
        return key
    prompt, listed = request.get("prompt"), request.get("messages") or request.get("input")
    if isinstance(listed, str):
        listed = [{"role": "user", "content": listed}]
    messages: list[Any] = listed if isinstance(listed, list) else []
    content: Any = prompt[:_PROMPT] if isinstance(prompt, (str, list)) else None
    for number, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            content = _media(message.get("content")) or messages[: number + 1]
            break
    if not content:
        return ""
    whole = json.dumps([request.get("model"), content], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def key_of_response(name: Any) -> str:
    """Return the key of the replica that keeps a response; empty where the response's id has none."""
    replica = name.removeprefix("resp_").rpartition("-")[0] if isinstance(name, str) else ""
    return f"{KEEPER}{replica}" if replica else ""


def _media(content: Any) -> list[Any]:
    """Addresses of a message's images and videos; data: URIs are their content."""
    addresses = []
    for part in content if isinstance(content, list) else []:
        for kind in ("image_url", "video_url", "source"):
            source = part.get(kind) if isinstance(part, dict) else None
            if source is not None:
                addresses.append(source.get("url", source.get("data")) if isinstance(source, dict) else source)
    return addresses


def ranked(key: str, loads: Mapping[str, int | None], rows: int) -> list[list[str]]:
    """Return the replicas by their loads in groups, the best group first."""
    names, keeper = sorted(loads), key.removeprefix(KEEPER)
    groups = [names]
    if keeper != key and keeper in loads:
        groups = [[keeper]]
    elif keeper == key and key and names:
        home = max(names, key=lambda name: hashlib.blake2b(f"{key}/{name}".encode(), digest_size=8).digest())
        if (loads[home] or 0) < rows:
            groups = [[home], [name for name in names if name != home]]
    return [group for group in groups if group]
