"""Front of several replicas: an ASGI application that passes requests on, and repeats them where a replica is lost.

Requests are read whole, so that their place can be chosen and they can be sent again. An answer that has begun cannot
be taken back: it ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from saccade.serve.access import Gate, Keys, check_host
from saccade.serve.affinity import key_of_body
from saccade.serve.answers import DONE, error_chunk
from saccade.serve.configuration import ServerConfig
from saccade.serve.monitoring import PREFIX
from saccade.serve.refusals import Refusal, overloaded
from saccade.serve.streaming import ClientGone, Message, Receive, Send, body_of

log = logging.getLogger("saccade.serve")
ATTEMPTS = 3
"""Replicas that a request is sent to before it fails."""
KEY = b"x-saccade-affinity"
"""Header by which a client names what belongs together, in place of the front's own guess."""
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
_EVENTS = b"text/event-stream"


class ReplicaLost(Exception):
    """A replica has ended before it had answered."""


class QueueFull(Exception):
    """All replicas have as many requests as they may, and as many wait."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request on its way to a replica."""

    scope: dict[str, Any]  # what ASGI says about it
    body: bytes
    key: str  # of what belongs together: the client's, or that of `saccade.serve.affinity.key_of_body`


Call = Callable[[Forwarded], AsyncGenerator[list[Message]]]
"""Yields the messages of a replica's answer, those of a step together; raises `ReplicaLost` or `QueueFull`."""


class Front:
    """The application."""

    def __init__(self, config: ServerConfig, call: Call, texts: Callable[[], Awaitable[dict[str, str]]]) -> None:
        self._call, self._texts = call, texts
        self._hosts, self._keys, self._limits = config.hosts, Keys(config.keys()), config.limits
        self._gate = Gate(config.limits.requests_per_key, config.limits.requests_per_minute)
        self._counts: Counter[str] = Counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request, or run through the application's life."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        self._counts["requests"] += 1
        answer = _Answer(send)
        try:
            if scope["path"] == "/metrics":
                await _send_whole(send, 200, b"text/plain; version=0.0.4; charset=utf-8", await self._metrics())
                return
            with self._gate.request(self._client(scope)) if scope["method"] == "POST" else nullcontext():
                body = await body_of(receive, self._limits)
                key = dict(scope["headers"]).get(KEY, b"").decode("latin-1") or key_of_body(body)
                forwarded = Forwarded({name: scope[name] for name in _SCOPE if name in scope}, body, key)
                await self._until_gone(receive, self._forward(forwarded, answer))
        except Refusal as refusal:
            await _refuse(send, refusal)
        except ClientGone:
            self._counts["clients_gone"] += not answer.is_whole

    def _client(self, scope: Message) -> str:
        """Check host and key before a body is read."""
        headers = Headers(scope=scope)
        check_host(headers, self._hosts)
        address = scope.get("client") or ("unknown", 0)
        return self._keys.client(headers.get("authorization"), str(address[0]))

    async def _until_gone(self, receive: Receive, work: Any) -> None:
        """Work until the client goes away."""
        answering = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(_gone(receive))
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
                self._counts["refused"] += 1
                raise overloaded(self._limits.max_queue) from None
            except ReplicaLost:
                if answer.has_begun:
                    self._counts["broken"] += 1
                    await answer.end_broken()
                    return
                self._counts["repeated"] += 1
                log.warning("A replica ended before its answer had begun; the request goes to another one.")
        raise lost()

    async def _metrics(self) -> bytes:
        """Metrics of all replicas with a label ``replica``, and those of the front."""
        own = [f"# TYPE {PREFIX}front_{name} counter\n{PREFIX}front_{name}_total {self._counts[name]}" for name in _OWN]
        return (merged(await self._texts()) + "\n".join(own) + "\n").encode()


_OWN = ("requests", "repeated", "broken", "refused", "clients_gone")


class _Answer:
    """An answer as the client sees it; its head waits for the first piece of its body."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self._is_stream = self.has_begun = self.is_whole = False

    async def add(self, message: Message) -> None:
        """Pass a message of the replica on."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(_EVENTS)
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
        await self._send({"type": "http.response.body", "body": error_chunk(lost().body()) + DONE})


def lost() -> Refusal:
    """A request whose replica has ended."""
    message = "The replica that answered this request has ended; send the request again."
    return Refusal(503, message, "replica_lost", "server_error", "replica_lost", retry_after=1)


def merged(texts: dict[str, str]) -> str:
    """Join metrics in Prometheus' text format; every sample gets the label ``replica``."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in sorted(texts.items()):
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith("#"):
                is_new = line.startswith("# HELP")
                family = families.setdefault(line.split(" ", 3)[2], ([], [])) if is_new else family
                if line not in family[0]:
                    family[0].append(line)
                continue
            name, brace, labels = line.partition("{")
            if brace:
                family[1].append(f'{name}{{replica="{replica}",{labels}')
            else:
                name, _, value = line.partition(" ")
                family[1].append(f'{name}{{replica="{replica}"}} {value}')
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _send_whole(send: Send, status: int, kind: bytes, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers().items()]
    await _send_whole(send, refusal.status, b"application/json", json.dumps(refusal.body()).encode(), *headers)
