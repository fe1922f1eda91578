"""API keys, accepted hosts, limits per client, and the access log."""

from __future__ import annotations

import hashlib
import hmac
import math
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from saccade.serve.refusals import Refusal, too_many, unauthorized

MOST_CLIENTS = 10_000
"""Clients whose counts are remembered; the longest unseen idle one is forgotten first."""
MINUTE = 60.0


class Keys:
    """API keys, compared in a time that does not depend on their content."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client(self, authorization: str | None, address: str) -> str:
        """Return the name under which a client's requests are counted: its key's digest, or its address."""
        if not self._digests:
            return address
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them, always
        if scheme.lower() != "bearer" or not any(matches):
            raise unauthorized()
        return given.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(slots=True)
class _Client:
    """Requests of one client."""

    running: int = 0  # concurrent ones
    times: deque[float] = field(default_factory=deque)  # of those of the last minute


class Gate:
    """Limits per client."""

    def __init__(self, concurrent: int, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._concurrent, self._per_minute, self._clock = concurrent, per_minute, clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Count a request of a client while the context is open."""
        client = self._clients.setdefault(name, _Client())
        self._clients.move_to_end(name)
        self._forget()
        self._check(client)
        client.running += 1
        try:
            yield
        finally:
            client.running -= 1

    def _check(self, client: _Client) -> None:
        if self._concurrent and client.running >= self._concurrent:
            raise too_many(f"its {self._concurrent} concurrent requests", 1)
        if self._per_minute:
            now = self._clock()
            while client.times and client.times[0] <= now - MINUTE:
                client.times.popleft()
            if len(client.times) >= self._per_minute:
                wait = math.ceil(client.times[0] + MINUTE - now)
                raise too_many(f"its {self._per_minute} requests per minute", max(wait, 1))
            client.times.append(now)

    def _forget(self) -> None:
        for name in list(self._clients):
            if len(self._clients) <= MOST_CLIENTS:
                return
            if not self._clients[name].running:
                del self._clients[name]


def check_host(headers: Mapping[str, str], accepted: Sequence[str]) -> None:
    """Refuse names in the Host header that are not accepted, so that no web site can point a name at this server."""
    if not accepted:
        return
    given = headers.get("host", "").lower()
    name = given[1:].partition("]")[0] if given.startswith("[") else given.rpartition(":")[0] or given
    if name not in accepted:
        message = "The host name of this request is not served; list it in server.allowed_hosts."
        raise Refusal(403, message, "host", "permission_error", "host_not_allowed")


class AccessLog:
    """ASGI middleware that writes a line per request to standard error, without queries, headers and bodies.

    Its status is 499 where the client left before the answer began. `Exchange` sets ``scope["saccade.tokens"]``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve a request and write its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499

        async def watch(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["raw_path"].decode("latin-1")[:200]  # as it came: without line breaks
            seconds, tokens = time.perf_counter() - began, scope.get("saccade.tokens", 0)
            line = f"{scope['method']} {path} {status} {seconds:.3f} s {tokens} tokens"
            print(time.strftime("%Y-%m-%dT%H:%M:%S"), line, file=sys.stderr, flush=True)
