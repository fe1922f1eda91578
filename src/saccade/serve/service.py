"""Parts of a server that its routes share: models, owner, limits and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers

from saccade.errors import SaccadeError
from saccade.serve.access import Gate, Keys, check_host
from saccade.serve.configuration import MIB, ServerConfig
from saccade.serve.models import ServedModel
from saccade.serve.monitoring import Metrics
from saccade.serve.owner import Owner
from saccade.serve.refusals import refusal_of, unknown_model
from saccade.serve.workers import PromptWorkers

if TYPE_CHECKING:
    from saccade.vlm import VLM

Result = TypeVar("Result")


class Service:
    """Parts of a server that its routes share."""

    def __init__(self, config: ServerConfig, vlms: Sequence[VLM]) -> None:
        self.config = config  # of the server
        limits, self._workers = config.limits, _workers(config, vlms)
        self.models = {
            entry.label: ServedModel(entry, vlm, limits, config.media, config.text_as_text, self._workers)
            for entry, vlm in zip(config.models, vlms, strict=True)
        }
        self.clock = time.perf_counter
        self.is_leaving = False  # from the first signal on
        self.keys = Keys(config.keys())
        self.gate = Gate(config.limits.requests_per_key, config.limits.requests_per_minute)
        self.owner = Owner(config.limits, self._post)
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

    def admit(self, scope: MutableMapping[str, Any]) -> str:
        """Check host and key of a request, and return the client's name for its limits."""
        headers = Headers(scope=scope)
        check_host(headers, self.config.hosts)
        address = scope.get("client") or ("unknown", 0)
        return self.keys.client(headers.get("authorization"), str(address[0]))

    def sharing(self, client: str) -> str | None:
        """With whose requests alone a client's share cached prefixes; empty: with those of all; None: with none."""
        if not self.config.reuse_prefixes:
            return None
        return client if self.keys and not self.config.share_prefixes else ""

    def model(self, name: str | None) -> ServedModel:
        """Return the model of a request; the first one without a name."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise unknown_model(name, list(self.models))
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

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of ``/health``: 503 once a step is stuck or the owner's thread has ended."""
        stuck = self.owner.stuck_for
        if not self.owner.is_alive:
            return 503, {"status": "failed", "reason": "the owner thread has ended"}
        if stuck > self.config.limits.stuck_seconds:
            return 503, {"status": "stuck", "reason": f"a step has run for {stuck:.0f} s"}
        return 200, {"status": "ok"}


def _workers(config: ServerConfig, vlms: Sequence[VLM]) -> PromptWorkers | None:
    """Workers for the models that see; None where media are not to be decoded in processes of their own."""
    given = [each for vlm in vlms for each in (vlm.processor, vlm.draft_processor) if each is not None]
    sees = any(each.parts.image_processor is not None or each.parts.composite is not None for each in given)
    if not sees or not config.media.own_process or not PromptWorkers.are_possible():
        return None
    return PromptWorkers(given, config.limits.media_seconds, config.limits.media_memory_mib * MIB)
