"""State that the routes of a server share, admission of requests, and one exchange with a client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response

from saccade.errors import SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.serve.answers import Choice, Form, Piece, usage
from saccade.serve.configuration import MIB, Limits, ServerConfig
from saccade.serve.models import ServedModel
from saccade.serve.owner import Event, Job, Metrics, Owner, Timing
from saccade.serve.refusals import Json, Refusal, invalid, refusal_of, too_many
from saccade.serve.schemas import AnyRequest, ChatRequest, Prompting, StreamOptions, checked
from saccade.serve.workers import PromptWorkers
from saccade.wording import unknown_name

if TYPE_CHECKING:
    from saccade.vlm import VLM

Result = TypeVar("Result")
MOST_CLIENTS = 10_000  # clients with counts; beyond them the idle one that was seen least recently is forgotten
MINUTE = 60.0
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(slots=True)
class _Client:
    running: int = 0  # requests that run
    times: deque[float] = field(default_factory=deque)  # when those of the last minute began


class Gate:
    """Accepted hosts, API keys, and limits per client."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts, self._limits, self._clock = config.hosts, config.limits, clock
        keys = config.keys()
        self._digests, self.has_keys = [_digest(key) for key in keys], bool(keys)
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def client(self, scope: MutableMapping[str, Any]) -> str:
        """Check host and key of a request; return its client's name: the digest of its key, or its address.

        The host is checked so that no web site can reach this server by a name of its own (DNS rebinding).
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
        matches = [hmac.compare_digest(digest, each) for each in self._digests]  # all: the time must reveal nothing
        if scheme.lower() != "bearer" or not any(matches):
            message = "The API key is missing or wrong; send it as the header Authorization: Bearer KEY, or x-api-key."
            raise Refusal(401, message, "authentication", "authentication_error", "invalid_api_key")
        return digest.hex()

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Count a client's request while the context is open; refuse one beyond the client's limits."""
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


class Service:
    def __init__(self, config: ServerConfig, vlms: Sequence[VLM]) -> None:
        self.config = config  # of the server
        limits = config.limits
        processors = [each for vlm in vlms for each in (vlm.processor, vlm.draft_processor) if each is not None]
        sees = any(each.image_processor is not None or each.composite is not None for each in processors)
        self._workers: PromptWorkers | None = None  # processes that decode media; None: threads do
        if sees and config.media.own_process and PromptWorkers.are_possible():
            self._workers = PromptWorkers(processors, limits.media_seconds, limits.media_memory_mib * MIB)
        reading = MediaOptions(limits=config.media, text_as_text=config.text_as_text)
        self.models = dict[str, ServedModel]()
        for entry, vlm in zip(config.models, vlms, strict=True):
            for adapter in (None, *entry.adapters):
                chosen = vlm if adapter is None else vlm.using(adapter=adapter)
                made = ServedModel(entry, chosen, limits, reading, self._workers)
                self.models[made.label] = made
        self.is_leaving = False  # whether a signal to end the server has come
        self.replica = ""  # prefix of response ids: the replica's name and a hyphen, where there are several
        self.gate = Gate(config)
        self.owner = Owner(limits, self._post)
        self.metrics = Metrics(self.owner, [m.labels(m.vlm) for m in self.models.values()], config.vllm_metrics)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._preparers = ThreadPoolExecutor(limits.prepare_threads, "saccade-prepare")
        self._media_preparers = ThreadPoolExecutor(limits.media_workers, "saccade-media")
        self._preparing = 0  # requests whose prompts are being made

    @asynccontextmanager
    async def running(self, _: Any) -> AsyncIterator[None]:
        """Run the owner's thread while the context is open, which is the application's lifespan."""
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
        """With whom a client shares cached prefixes: its name for itself alone; empty: with all; None: not at all."""
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
        """Refuse a request that the queue has no room for, before its media are decoded."""
        self.owner.check_room(count, self._preparing)

    async def prepare(self, work: Callable[..., Result], model: ServedModel, body: Any, *more: Any) -> Result:
        """Do a model's work in a thread; requests with media have their own threads, so that others need not wait."""
        self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            has_media = isinstance(body, Prompting) and body.has_media
            pool = self._media_preparers if has_media else self._preparers
            return await loop.run_in_executor(pool, partial(work, model, body, *more))
        except SaccadeError as problem:
            raise refusal_of(problem) from problem
        finally:
            self._preparing -= 1

    def health(self) -> tuple[int, Json]:
        """Status and body of ``/health``: 503 when a step is stuck or the owner's thread has ended."""
        stuck = self.owner.stuck_for
        if not self.owner.is_alive:
            return 503, {"status": "failed", "reason": "the owner thread has ended"}
        if stuck > self.config.limits.stuck_seconds:
            return 503, {"status": "stuck", "reason": f"a step has run for {stuck:.0f} s"}
        return 200, {"status": "ok"}


class ClientGone(Exception):
    """The client has closed the connection, or reads too slowly."""


async def disconnected(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(receive: Receive, limits: Limits) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.max_body_mib * 2**20:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refusal(408, "The body came too slowly; send it again.", "timeout") from None


async def json_of(scope: Message, receive: Receive, limits: Limits) -> bytes:
    headers = dict(scope["headers"])
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise Refusal(415, "The content type must be application/json; set that header.")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > limits.max_body_mib * 2**20:
        raise _too_large(limits)
    try:
        return await body_of(receive, limits)
    except ClientGone:
        raise Refusal(400, "The client has gone before the end of the body.", "client_gone") from None


def _too_large(limits: Limits) -> Refusal:
    return Refusal(413, f"The body is larger than {limits.max_body_mib} MiB; send smaller media.", "too_large")


class Exchange(Response):
    """One exchange with a client: an ASGI response that reads the body, queues the jobs and writes their answer."""

    names: Mapping[str, str] = MappingProxyType({})  # fields of chat requests -> the endpoint's names for them

    def __init__(self, service: Service, kind: type[AnyRequest] = ChatRequest) -> None:
        self.background = None
        self._service, self._kind = service, kind
        self._limits, self._metrics = service.config.limits, service.metrics
        self._jobs: list[Job] = []
        self._events: list[tuple[int, Event]] = []  # choice and event, to be written
        self._changed = asyncio.Event()  # set when there are events, or the exchange is closed
        self._is_closed = False  # whether the client has its answer or has left
        self._is_slow = False  # whether it was closed because the client reads too slowly
        self._tokens = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        service = self._service
        try:
            client, began = service.gate.client(scope), time.perf_counter()
            with service.gate.request(client):
                body = self._read(await json_of(scope, receive, self._limits), client)
                await self._submit(body, service.sharing(client), began)
                watching = asyncio.create_task(self._watch(receive))
                try:
                    await (self._stream if body.stream else self._whole)(send)
                except ClientGone:
                    self._metrics.failed("slow_reader" if self._is_slow else "client_gone")
                finally:
                    watching.cancel()
                    service.owner.cancel(self._jobs)
        except Refusal as refusal:
            raise refusal.renamed(self.names) from None  # an error that is its own cause is never freed
        finally:
            scope["saccade.tokens"] = self._tokens
            self._close()
            self._jobs = []  # they refer to this exchange; without the cycle, their images are freed at once

    def _read(self, content: bytes, client: str) -> AnyRequest:
        return checked(self._kind, content)

    def _make_form(self, body: AnyRequest, model: str) -> Form:
        return Form(isinstance(body, ChatRequest), model, body.stream_options or StreamOptions())

    async def _submit(self, body: AnyRequest, sharing: str | None, began: float) -> None:
        """Prepare the jobs in a thread and queue them; ``sharing`` as of `Service.sharing`."""
        service = self._service
        model = service.model(body.model)
        if not 1 <= body.answers <= self._limits.max_choices:
            raise invalid(f"A request may have 1 to {self._limits.max_choices} answers, not {body.answers}.", "n")
        service.check_room(body.answers)
        self._jobs = await service.prepare(ServedModel.jobs, model, body, self._deliver, sharing)
        self._vlm, self._extension = self._jobs[0].vlm, body.saccade
        self._form = self._make_form(body, model.label)
        self._choices = model.choices(body, self._jobs)
        self._timings = [Timing(model.labels(self._vlm), began) for _ in self._jobs]
        self._per_prompt, self._is_extended = body.n, "saccade" in body.model_fields_set
        service.owner.submit(self._jobs)

    async def _watch(self, receive: Receive) -> None:
        """Cancel the jobs when the client closes the connection."""
        with suppress(asyncio.CancelledError):
            await disconnected(receive)
            self._service.owner.cancel(self._jobs)
            self._close()

    def _deliver(self, index: int, event: Event) -> None:
        """Queue an event of a choice to be written; called in the event loop."""
        if self._is_closed:
            return
        self._events.append((index, event))
        self._changed.set()
        if len(self._events) > self._limits.stream_buffer:
            self._is_slow = True
            self._service.owner.cancel(self._jobs)
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._events.clear()
        self._changed.set()

    async def _next_events(self) -> list[tuple[int, Event]]:
        """Wait for events and return all that are there, oldest first."""
        await self._changed.wait()
        if self._is_closed:
            raise ClientGone
        self._changed.clear()
        events, self._events = self._events, []
        return events

    # -- answers -------------------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        left = len(self._choices)
        while left:
            for index, event in await self._next_events():
                if event.error is not None:
                    raise refusal_of(event.error)
                self._add(index, event)
                left -= event.is_last
        body = self._form.body(self._choices, usage(self._choices, self._per_prompt), self._details())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._begin(send, headers)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        events = await self._next_events()
        for _, event in events:
            if event.error is not None:
                raise refusal_of(event.error)
        await self._begin(send, SSE_HEADERS)
        parts = [self._form.begin(index, choice.text) for index, choice in enumerate(self._choices)]
        left = len(self._choices)
        while True:
            for index, event in events:
                if event.error is not None:
                    refusal = refusal_of(event.error)
                    self._metrics.failed(refusal.kind)
                    await self._write(send, b"".join([*parts, self._form.broken(refusal)]), last=True)
                    return
                piece, choice = self._add(index, event), self._choices[index]
                left -= event.is_last
                with_stats = event.is_last and (self._extension.stats or self._extension.trace)
                has_content = piece.text or piece.reasoning or piece.calls
                if has_content or piece.trace or piece.finish or (piece.logprobs and event.tokens):
                    used = len(self._jobs[index].request.prompt), choice.count
                    parts.append(self._form.chunk(index, piece, self._stats(choice) if with_stats else None, used))
            if not left:
                break
            if parts:
                await self._write(send, b"".join(parts))
            events, parts = await self._next_events(), []
        parts.append(self._form.end(self._choices, usage(self._choices, self._per_prompt), self._details()))
        await self._write(send, b"".join(parts), last=True)

    def _add(self, index: int, event: Event) -> Piece:
        self._tokens += len(event.tokens)
        if event.tokens:
            self._metrics.tokens(self._timings[index], event)
        if event.output is not None:
            self._metrics.finished(self._timings[index], event.output, event.at)
        return self._choices[index].add(event)

    def _details(self) -> list[Json]:
        """Traces and statistics of the choices, if the request asks for them."""
        details = []
        for choice in self._choices if self._is_extended else ():
            details.append({**({"steps": choice.steps} if choice.traced else {}), "stats": self._stats(choice)})
        return details

    def _stats(self, choice: Choice) -> Json:
        assert choice.output is not None
        return {"method": self._vlm.method, "lossless": self._vlm.lossless, **choice.output.stats.as_dict()}

    async def _begin(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        request = (b"x-request-id", self._form.id.encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, request]})

    async def _write(self, send: Send, body: bytes, last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._limits.send_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not last})
        except TimeoutError:
            self._is_slow = True
            raise ClientGone from None
