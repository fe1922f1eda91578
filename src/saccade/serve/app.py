"""The application: routes, and the parts of a server that they share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from saccade.errors import SaccadeError
from saccade.serve.access import Gate, Keys, check_host
from saccade.serve.config import ServerConfig
from saccade.serve.metrics import Metrics
from saccade.serve.models import ServedModel
from saccade.serve.owner import Owner
from saccade.serve.refusals import Refusal, broken, overloaded, refusal_of, unknown_model
from saccade.serve.schemas import ChatRequest, CompletionRequest
from saccade.serve.streaming import Exchange

if TYPE_CHECKING:
    from saccade.vlm import VLM

log = logging.getLogger("saccade.serve")
Result = TypeVar("Result")
PAGE = "static"
"""Folder of this package with the page that is served at ``/``, where there is one."""


class Service:
    """Parts of a server that its routes share.

    Args:
        config: of the server.
        vlms: the loaded models, in the order of ``config.models``.
    """

    def __init__(self, config: ServerConfig, vlms: Sequence[VLM]) -> None:
        self.config = config
        self.models = {
            entry.label: ServedModel(entry, vlm, config.limits, config.media)
            for entry, vlm in zip(config.models, vlms, strict=True)
        }
        self.clock = time.perf_counter
        self.keys = Keys(config.keys())
        self.gate = Gate(config.limits.requests_per_key, config.limits.requests_per_minute)
        self.owner = Owner(config.limits, self._post)
        self.metrics = Metrics(self.owner)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._preparers = ThreadPoolExecutor(config.limits.prepare_threads, "saccade-prepare")
        self._preparing = 0

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Run the owner's thread as long as the application."""
        self._loop = asyncio.get_running_loop()
        self.owner.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.owner.stop)
            self._preparers.shutdown(wait=False, cancel_futures=True)

    def _post(self, deliver: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)

    def admit(self, scope: MutableMapping[str, Any]) -> str:
        """Check host and key of a request, and return the client's name for its limits.

        Raises:
            Refusal: 401 or 403.
        """
        headers = Headers(scope=scope)
        check_host(headers, self.config.hosts)
        address = scope.get("client") or ("unknown", 0)
        return self.keys.client(headers.get("authorization"), str(address[0]))

    def model(self, name: str | None) -> ServedModel:
        """Return the model of a request; the first one without a name.

        Raises:
            Refusal: 404; it is not served.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise unknown_model(name, list(self.models))
        return self.models[name]

    def check_room(self, count: int) -> None:
        """Refuse a request early, before its media are decoded.

        Raises:
            Refusal: 503; the queue is full, or as many requests are being prepared.
        """
        waiting = self.owner.waiting + self._preparing
        if waiting + count > self.config.limits.max_queue + self.config.limits.max_rows:
            raise overloaded(waiting)

    async def prepare(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function in the threads that decode media and tokenize.

        Raises:
            Refusal: as the function; errors of Saccade are translated.
        """
        self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._preparers, partial(function, *arguments))
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


def make_app(config: ServerConfig, vlms: Sequence[VLM]) -> FastAPI:
    """Make the application; its state has the `Service` as ``service``.

    Args:
        vlms: the loaded models, in the order of ``config.models``.
    """
    service = Service(config, vlms)
    app = FastAPI(title="Saccade", lifespan=service.running, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return Exchange(service, ChatRequest)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return Exchange(service, CompletionRequest)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service.admit(request.scope)
        return JSONResponse({"object": "list", "data": [_about(m) for m in service.models.values()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        service.admit(request.scope)
        return JSONResponse(_about(service.model(name)))

    @app.get("/health")
    async def health() -> Response:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/ready")
    async def ready() -> Response:
        status, body = service.health()
        if status == 200 and service.owner.is_draining:
            status, body = 503, {"status": "draining"}
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_errors(app, service)
    page = resources.files("saccade.serve") / PAGE
    if page.is_dir():
        app.mount("/", StaticFiles(directory=str(page), html=True), name="page")
    return app


def _about(model: ServedModel) -> dict[str, Any]:
    """A model in OpenAI's form, with its context and the methods that requests may choose."""
    return {
        "id": model.entry.label,
        "object": "model",
        "created": model.created,
        "owned_by": "saccade",
        "max_model_len": model.planner.context,
        "saccade": {
            "method": model.vlm.method,
            "lossless": model.vlm.lossless,
            "profiles": model.names,
            "methods": model.open_methods,
        },
    }


def _add_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in OpenAI's form."""

    def respond(refusal: Refusal) -> Response:
        service.metrics.failed(refusal.kind)
        return JSONResponse(refusal.body(), refusal.status, refusal.headers())

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
        refusal = Refusal(error.status_code, message, "not_found", code="not_found")
        return respond(refusal)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        log.error("A request failed.", exc_info=error)
        return respond(broken())
