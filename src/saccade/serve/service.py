"""Parts of a server that its routes share: models, owner, metrics, and who may send how many requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import sys
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers

from saccade.errors import SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.serve.configuration import MIB, ServerConfig
from saccade.serve.models import ServedModel
from saccade.serve.monitoring import Metrics
from saccade.serve.owner import Owner
from saccade.serve.refusals import Json, Refusal, refusal_of, too_many
from saccade.serve.workers import PromptWorkers
from saccade.wording import unknown_name

if TYPE_CHECKING:
    from saccade.vlm import VLM

Result = TypeVar("Result")
MOST_CLIENTS = 10_000  # clients whose counts are remembered; the longest unseen idle one is forgotten first
MINUTE = 60.0


class Service:
    def __init__(self, config: ServerConfig, vlms: Sequence[VLM]) -> None:
        self.config = config  # of the server
        limits = config.limits
        processors = [each for vlm in vlms for each in (vlm.processor, vlm.draft_processor) if each is not None]
        sees = any(each.image_processor is not None or each.composite is not None for each in processors)
        self._workers: PromptWorkers | None = None  # for media, where they are decoded in their own processes
        if sees and config.media.own_process and PromptWorkers.are_possible():
            self._workers = PromptWorkers(processors, limits.media_seconds, limits.media_memory_mib * MIB)
        reading = MediaOptions(limits=config.media, text_as_text=config.text_as_text)
        self.models = dict[str, ServedModel]()
        for entry, vlm in zip(config.models, vlms, strict=True):
            for adapter in (None, *entry.adapters):
                chosen = vlm if adapter is None else vlm.using(adapter=adapter)
                made = ServedModel(entry, chosen, limits, reading, self._workers)
                self.models[made.label] = made
        self.is_leaving = False  # from the first signal on
        self.replica = ""  # of several: its name and a hyphen, with which the ids of responses begin
        self.gate = Gate(config)
        self.owner = Owner(limits, self._post)
        self.metrics = Metrics(self.owner, [m.labels(m.vlm) for m in self.models.values()], config.vllm_metrics)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._preparers = ThreadPoolExecutor(limits.prepare_threads, "saccade-prepare")
        self._media_preparers = ThreadPoolExecutor(limits.media_workers, "saccade-media")
        self._preparing = 0

    @asynccontextmanager
    async def running(self, _: Any) -> AsyncIterator[None]:
        """Run the owner's thread as long as the application."""
        self._loop = asyncio.get_running_loop()
        self.owner.start()
        if self._workers is not None:
            self._media_preparers.submit(self._workers.start)
        try:
            yield
        finally:
            await asyncio.to_thread(self.owner.stop)
            for pool in (self._preparers, self._media_preparers):
                pool.shutdown(wait=False, cancel_futures=True)
            if self._workers is not None:
                await asyncio.to_thread(self._workers.close)

    def _post(self, deliver: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)

    def sharing(self, client: str) -> str | None:
        """With whose requests alone a client's share cached prefixes; empty: with those of all; None: with none."""
        if not self.config.reuse_prefixes:
            return None
        return client if self.gate.has_keys and not self.config.share_prefixes else ""

    def model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            message = f"This server has no model {unknown_name(name[:100], self.models)}."
            raise Refusal(404, message, "not_found", code="model_not_found", param="model")
        return self.models[name]

    def check_room(self, count: int) -> None:
        """Refuse a request early, before its media are decoded."""
        self.owner.check_room(count, self._preparing)

    async def prepare(self, function: Callable[..., Result], *arguments: Any, media: bool = False) -> Result:
        """Run a function in the threads for requests with or without media, so that neither wait for the others."""
        self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            pool = self._media_preparers if media else self._preparers
            return await loop.run_in_executor(pool, partial(function, *arguments))
        except SaccadeError as problem:
            raise refusal_of(problem) from problem
        finally:
            self._preparing -= 1

    def health(self) -> tuple[int, Json]:
        """Status and body of ``/health``: 503 once a step is stuck or the owner's thread has ended."""
        stuck = self.owner.stuck_for
        if not self.owner.is_alive:
            return 503, {"status": "failed", "reason": "the owner thread has ended"}
        if stuck > self.config.limits.stuck_seconds:
            return 503, {"status": "stuck", "reason": f"a step has run for {stuck:.0f} s"}
        return 200, {"status": "ok"}


@dataclass(slots=True)
class _Client:
    running: int = 0  # concurrent ones
    times: deque[float] = field(default_factory=deque)  # of those of the last minute


class Gate:
    """Accepted hosts, API keys, and limits per client."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts, self._limits, self._clock = config.hosts, config.limits, clock
        keys = config.keys()
        self._digests, self.has_keys = [_digest(key) for key in keys], bool(keys)
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def client(self, scope: MutableMapping[str, Any]) -> str:
        """Check host and key of a request; return the name that counts it: its key's digest, or its address.

        Hosts are checked so that no web site can point a name at this server.
        """
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] or host
        if host.startswith("["):  # IPv6
            name = host[1:].partition("]")[0]
        if self._hosts and name not in self._hosts:
            message = "The host name of this request is not served; list it in server.allowed_hosts."
            raise Refusal(403, message, "host", "permission_error", "host_not_allowed")
        if not self._digests:
            return str((scope.get("client") or ("unknown", 0))[0])
        scheme, _, key = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, each) for each in self._digests]  # all of them, always
        if scheme.lower() != "bearer" or not any(matches):
            message = "The API key is missing or wrong; send it as the header Authorization: Bearer KEY, or x-api-key."
            raise Refusal(401, message, "authentication", "authentication_error", "invalid_api_key")
        return digest.hex()

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Count a request of a client while the context is open."""
        client = self._clients.setdefault(name, _Client())
        self._clients.move_to_end(name)
        for other in list(self._clients) if len(self._clients) > MOST_CLIENTS else ():
            if len(self._clients) > MOST_CLIENTS and not self._clients[other].running:
                del self._clients[other]
        self._check(client)
        client.running += 1
        try:
            yield
        finally:
            client.running -= 1

    def _check(self, client: _Client) -> None:
        concurrent, per_minute = self._limits.requests_per_key, self._limits.requests_per_minute
        if concurrent and client.running >= concurrent:
            raise too_many(f"its {concurrent} concurrent requests", 1)
        if per_minute:
            now = self._clock()
            while client.times and client.times[0] <= now - MINUTE:
                client.times.popleft()
            if len(client.times) >= per_minute:
                wait = math.ceil(client.times[0] + MINUTE - now)
                raise too_many(f"its {per_minute} requests per minute", max(wait, 1))
            client.times.append(now)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class AccessLog:
    """ASGI middleware that writes a line per request to standard error, without queries, headers and bodies.

    Its status is 499 where the client left before the answer began. `Exchange` sets ``scope["saccade.tokens"]``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
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
