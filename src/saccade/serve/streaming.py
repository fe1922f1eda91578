"""One exchange with a client: its body, its jobs, and its answer, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from saccade.serve.answers import DONE, Choice, Form, error_chunk, usage
from saccade.serve.configuration import Limits
from saccade.serve.jobs import Event, Job
from saccade.serve.messages import has_media
from saccade.serve.monitoring import Timing
from saccade.serve.refusals import Refusal, invalid, refusal_of
from saccade.serve.schemas import ChatRequest, CompletionRequest, parse
from saccade.serve.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client has closed the connection, or reads too slowly."""


async def body_of(receive: Receive, limits: Limits) -> bytes:
    """Read the body of a request."""
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
    """Read a body that must be JSON."""
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


class Inbox:
    """Events of a request that its writer has not taken yet."""

    def __init__(self, limit: int, overflow: Callable[[], None]) -> None:
        self._events: list[tuple[int, Event]] = []
        self._limit, self._overflow = limit, overflow
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, index: int, event: Event) -> None:
        """Append an event of a choice; in the event loop."""
        if self._closed:
            return
        self._events.append((index, event))
        if len(self._events) > self._limit:
            overflow = self._overflow
            self.close()
            overflow()
        self._wake()

    def close(self) -> None:
        """Drop all events and end the writer: the client has gone, or has its answer."""
        self._closed = True
        self._overflow = _ignore  # of the exchange that has this inbox: no cycle remains
        self._events.clear()
        self._wake()

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events and return all of them, oldest first."""
        if not self._events and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._closed:
            raise ClientGone
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ignore() -> None:
    pass


class Exchange(Response):
    """Answer of one of the two endpoints; an ASGI response that also reads the body and watches the connection."""

    def __init__(self, service: Service, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        self.background = None
        self._service, self._kind = service, kind
        self._limits = service.config.limits
        self._jobs: list[Job] = []
        self._inbox = Inbox(self._limits.stream_buffer, self._too_slow)
        self._began = 0.0
        self._is_slow = False
        self._tokens = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve the request."""
        service = self._service
        try:
            client = service.admit(scope)
            self._began = service.clock()
            with service.gate.request(client):
                body = parse(self._kind, await json_of(scope, receive, self._limits))
                await self._submit(body, service.sharing(client))
                await self._answer(receive, send, bool(body.stream))
        finally:  # jobs and inbox call back here; without the cycle, images are freed at once
            scope["saccade.tokens"] = self._tokens
            self._inbox.close()
            self._jobs = []

    async def _answer(self, receive: Receive, send: Send, stream: bool) -> None:
        """Write the answer, unless the client goes away."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream if stream else self._whole)(send)
        except ClientGone:
            self._service.metrics.failed("slow_reader" if self._is_slow else "client_gone")
        finally:
            watching.cancel()
            self._service.owner.cancel(self._jobs)

    async def _submit(self, body: ChatRequest | CompletionRequest, sharing: str | None) -> None:
        """Prepare the jobs outside of the event loop, and queue them; ``sharing`` as of `ServedModel.chat_jobs`."""
        service = self._service
        model = service.model(body.model)
        count = (body.n or 1) * (len(body.prompts) if isinstance(body, CompletionRequest) else 1)
        if not 1 <= count <= self._limits.max_choices:
            raise invalid(f"A request may have 1 to {self._limits.max_choices} answers, not {count}.", "n")
        service.check_room(count)
        if isinstance(body, ChatRequest):
            media = has_media(body.messages)
            self._jobs = await service.prepare(model.chat_jobs, body, self._inbox.put, sharing, media=media)
        else:
            self._jobs = await service.prepare(model.completion_jobs, body, self._inbox.put, sharing)
        own, vlm = body.saccade, self._jobs[0].vlm
        chat = isinstance(body, ChatRequest)
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._form = Form(chat, model.entry.label, self._with_usage)
        self._choices = [
            Choice(vlm.processor.tokenizer, body.stops, chat, body.num_logprobs, bool(own and own.trace))
            for _ in self._jobs
        ]
        self._timings = [Timing(model.labels(vlm), self._began) for _ in self._jobs]
        self._per_prompt, self._own = body.n or 1, own
        self._about = {"method": vlm.method, "lossless": vlm.lossless}
        service.owner.submit(self._jobs)

    async def _watch(self, receive: Receive) -> None:
        """Wait for the end of the connection, then cancel the jobs."""
        with suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self._service.owner.cancel(self._jobs)
            self._inbox.close()

    def _too_slow(self) -> None:
        self._is_slow = True
        self._service.owner.cancel(self._jobs)

    # -- answers -------------------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        traces: list[dict[str, Any]] = [{"steps": []} for _ in self._choices]
        left = len(self._choices)
        while left:
            for index, event in await self._inbox.take():
                if event.error is not None:
                    raise refusal_of(event.error)
                piece = self._add(index, event)
                if piece.trace is not None:
                    traces[index]["steps"].append(piece.trace)
                left -= event.is_last
        own = []
        if self._own is not None:
            for choice, trace in zip(self._choices, traces, strict=True):
                own.append({**(trace if self._own.trace else {}), "stats": self._stats(choice)})
        body = self._form.body(self._choices, usage(self._choices, self._per_prompt), own)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._begin(send, headers)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        events = await self._inbox.take()
        first = next((event.error for _, event in events if event.error is not None), None)
        if first is not None:
            raise refusal_of(first)
        await self._begin(send, SSE_HEADERS)
        parts = [self._form.begin(index) for index in range(len(self._choices))]
        left = len(self._choices)
        while True:
            for index, event in events:
                if event.error is not None:
                    refusal = refusal_of(event.error)
                    self._service.metrics.failed(refusal.kind)
                    await self._write(send, b"".join([*parts, error_chunk(refusal.body()), DONE]), last=True)
                    return
                piece = self._add(index, event)
                stats = None
                if event.is_last:
                    left -= 1
                    if self._own is not None and (self._own.stats or self._own.trace):
                        stats = self._stats(self._choices[index])
                if piece.text or piece.trace or piece.finish or (piece.logprobs and event.tokens):
                    parts.append(self._form.chunk(index, piece, stats, self._used(index)))
            if not left:
                break
            if parts:
                await self._write(send, b"".join(parts))
            events, parts = await self._inbox.take(), []
        if self._with_usage:
            parts.append(self._form.usage_chunk(self._choices, usage(self._choices, self._per_prompt)))
        await self._write(send, b"".join([*parts, DONE]), last=True)

    def _add(self, index: int, event: Event) -> Any:
        """Take an event into its choice and into the metrics."""
        piece, timing, metrics = self._choices[index].add(event), self._timings[index], self._service.metrics
        self._tokens += len(event.tokens)
        if event.tokens:
            metrics.tokens(timing, event)
        if event.output is not None:
            metrics.finished(timing, event.output, event.at)
        return piece

    def _used(self, index: int) -> dict[str, int] | None:
        """Usage of a choice so far, where every chunk has it."""
        if not self._continuous:
            return None
        prompt, new = len(self._jobs[index].request.prompt), self._choices[index].count
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _stats(self, choice: Choice) -> dict[str, Any]:
        assert choice.output is not None
        return {**self._about, **choice.output.stats.as_dict()}

    async def _begin(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        own = (b"x-request-id", self._form.id.encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, own]})

    async def _write(self, send: Send, body: bytes, last: bool = False) -> None:
        """Write a part of a stream."""
        try:
            async with asyncio.timeout(self._limits.send_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not last})
        except TimeoutError:
            self._is_slow = True
            raise ClientGone from None
