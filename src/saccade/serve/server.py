"""Running of the application: sockets, slow heads of requests, signals, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from saccade.serve.app import make_app
from saccade.serve.configuration import ConfigError, ServerConfig
from saccade.serve.refusals import Refusal, invalid
from saccade.target_model.exact import caveat

if TYPE_CHECKING:
    from fastapi import FastAPI


log = logging.getLogger("saccade.serve")
MOST_HEAD_BYTES = 64 * 1024  # size of a request's line and headers, which the parser does not limit
LAST_WORDS = 5  # seconds for writing to clients that their answers end, once the time for running answers is over
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def guarded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol for HTTP with a limit on the time and the size of a request's head.

    Without it a client that sends a byte now and then would hold a connection without end. It also refuses several
    Host headers, in which a proxy and this server could read two hosts, and sends no chunks to HTTP/1.0.
    """

    large = Refusal(431, f"The head is larger than {MOST_HEAD_BYTES // 1024} KiB; send fewer or shorter headers.")

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _head_bytes = 0
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._guard()

        def data_received(self, data: bytes) -> None:
            if self._in_head():
                self._guard()
                self._head_bytes += len(data)
            super().data_received(data)
            if not self._in_head():
                self._release()
            elif self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(large)

        def on_headers_complete(self) -> None:
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD_BYTES:
                raise replace(large)
            if sum(name == b"host" for name, _ in self.headers) > 1:
                raise invalid("The request has several Host headers; send one.")
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                _end_by_closing(self.cycle)

        def send_400_response(self, msg: str) -> None:
            """Answer what the parser, or `on_headers_complete` within it, refuses; the handled exception says which."""
            problem = getattr(sys.exception(), "__context__", None)
            self._refuse(problem if isinstance(problem, Refusal) else invalid(msg))

        def _refuse(self, refusal: Refusal) -> None:
            if self.transport.is_closing():
                return
            body = json.dumps(refusal.body())
            head = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\ncontent-type: application/json"
            head += f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write((head + body).encode())
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._release()
            super().connection_lost(exc)

        def _in_head(self) -> bool:
            """Whether no request is under way."""
            return self.cycle is None or self.cycle.response_complete

        def _guard(self) -> None:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(seconds, self.transport.close)

        def _release(self) -> None:
            self._head_bytes = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Guarded


def _end_by_closing(cycle: Any) -> None:
    """Leave an answer of uvicorn without chunks: the end of the connection, which HTTP/1.0 has anyway, is its end."""
    cycle.chunked_encoding, send = False, cycle.send

    async def plain(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain


class Server(uvicorn.Server):
    """A server whose first signal drains it, and whose second one ends the process at once."""

    def __init__(self, config: ServerConfig, app: FastAPI, announcement: str = "") -> None:
        limits, self._announcement = config.limits, announcement
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=guarded_protocol(limits.header_seconds),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=limits.connections,
                timeout_keep_alive=max(int(limits.header_seconds), 1),
                timeout_graceful_shutdown=math.ceil(limits.drain_seconds) + LAST_WORDS,
            )
        )
        self._service, self._limits = app.state.service, limits
        self._ends_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._announcement:
            print(self._announcement, file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers finish; those that still run after the time for it end with a refusal."""
        refusing = asyncio.get_running_loop().call_later(self._limits.drain_seconds, self._service.owner.end)
        await super().shutdown(sockets)
        refusing.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while the server runs; unlike uvicorn's it leaves the exit code at 0."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, after the delay in which ``/ready`` is false; end the process at the second."""
        if self._ends_at is not None:
            os._exit(128 + sig)
        delay = self._limits.drain_delay_seconds
        wait = f" in {delay:g} s" if delay else ""
        log.warning("Draining%s: running answers finish, no new ones begin. A second signal ends at once.", wait)
        self._service.is_leaving = True
        self._ends_at = time.monotonic() + delay

    async def on_tick(self, counter: int) -> bool:
        """End the acceptance of requests once the delay is over."""
        if self._ends_at is not None and time.monotonic() >= self._ends_at and not self.should_exit:
            self.should_exit = True
            self._service.owner.drain()
        return await super().on_tick(counter)


def bind(config: ServerConfig) -> socket.socket:
    """Bind the address, so that a taken port is reported before anything loads."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
    except OSError as problem:
        listening.close()
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port} ({problem.strerror or problem}); choose another --port or "
            "--host."
        ) from problem
    return listening


def serve(config: ServerConfig) -> None:
    """Check everything, load the models, and serve until a signal."""
    keys, loaders, listening = config.keys(), config.check(), bind(config)
    host, port = listening.getsockname()[:2]
    vlms = [load() for load in loaders]
    names = ", ".join(config.labels)
    address = f"http://{host}:{port}"
    announcement = f"Serving {names} on {address}/v1, the page on {address} (Ctrl-C drains and ends)"
    caveats = dict.fromkeys(caveat(vlm.target, vlm.lossless) for vlm in vlms)
    server = Server(config, make_app(config, vlms), "\n".join([announcement, *filter(None, caveats)]))
    if not keys and not config.is_loopback:
        log.warning("No API key is set: everyone who reaches %s may use the models.", host)
    server.run(sockets=[listening])
