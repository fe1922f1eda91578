"""The application: its routes and its errors."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata, resources
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import Route

from saccade.errors import InputError
from saccade.serve.configuration import Limits, ServerConfig
from saccade.serve.messages import MessageExchange, request_to_count
from saccade.serve.models import ServedModel
from saccade.serve.refusals import Json, Refusal, broken, invalid, refusal_of
from saccade.serve.responses import KeptResponses, ResponseExchange, page
from saccade.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NoFields,
    to_tokenize,
    unknown,
    validated,
)
from saccade.serve.service import Exchange, Service, body_of, json_of
from saccade.target_model.exact import caveat

if TYPE_CHECKING:
    from saccade.vlm import VLM


log = logging.getLogger("saccade.serve")
PROBES = ["GET", "HEAD"]
Limit = Annotated[int, Query(ge=1, le=1000)]
Beta = Annotated[bool, Query(alias="beta")]
"""Parameter of Anthropic's clients, for whom no route differs by it."""


def make_app(config: ServerConfig, vlms: Sequence[VLM]) -> FastAPI:
    """Make the application; its state has the `Service` as ``service``."""
    service = Service(config, vlms)
    pages: Any = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = FastAPI(title="Saccade", lifespan=service.running, dependencies=[Depends(_known_query)], **pages)
    app.state.service = service
    kept = KeptResponses(config.limits)
    if config.access_log:
        app.add_middleware(AccessLog)

    def answering(path: str, make: Callable[[], Exchange]) -> None:
        @app.post(path)
        async def answer() -> Response:
            return make()

    async def prepared(
        request: Request, read: Callable[[bytes], Any], work: Callable[[ServedModel, Any], Any]
    ) -> Response:
        with service.gate.request(service.gate.client(request.scope)):
            body = read(await json_of(request.scope, request.receive, config.limits))
            service.check_room(1)
            return JSONResponse(await service.prepare(work, service.model(body.model), body))

    async def take_no_body(request: Request) -> None:
        content = await body_of(request.receive, config.limits)
        if content:
            validated(NoFields, content)

    answering("/v1/chat/completions", lambda: Exchange(service, ChatRequest))
    answering("/v1/completions", lambda: Exchange(service, CompletionRequest))
    answering("/v1/responses", lambda: ResponseExchange(service, kept))

    @app.post("/v1/messages")
    async def messages(_: Beta = True) -> Response:
        return MessageExchange(service)

    async def counted(
        request: Request, exchange: type[Exchange], read: Callable[[bytes], ChatRequest], **more: str
    ) -> Response:
        def work(model: ServedModel, body: ChatRequest) -> Json:
            return {**more, "input_tokens": len(model.ids(body))}

        try:
            return await prepared(request, read, work)
        except Refusal as refusal:
            raise refusal.renamed(exchange.names) from None

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, _: Beta = True) -> Response:
        return await counted(request, MessageExchange, partial(request_to_count, service))

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request) -> Response:
        read = partial(kept.request_to_count, client=service.gate.client(request.scope))
        return await counted(request, ResponseExchange, read, object="response.input_tokens")

    @app.post("/v1/responses/{name}/cancel", dependencies=[Depends(take_no_body)])
    async def cancel(name: str, request: Request) -> Response:
        kept.find(name, service.gate.client(request.scope))
        raise invalid(
            "Only responses in the background can be cancelled, of which there are none here; close the stream."
        )

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(
        name: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> Response:
        items = kept.find(name, service.gate.client(request.scope)).items
        if order == "desc":
            items = items[::-1]
        return JSONResponse(page(items, limit, after))

    @app.get("/v1/responses/{name}")
    async def response(name: str, request: Request) -> Response:
        return Response(kept.find(name, service.gate.client(request.scope)).body, media_type="application/json")

    @app.delete("/v1/responses/{name}")
    async def delete_response(name: str, request: Request) -> Response:
        kept.find(name, service.gate.client(request.scope))
        kept.drop(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await prepared(request, to_tokenize, ServedModel.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await prepared(request, partial(validated, DetokenizeRequest), ServedModel.detokenize)

    @app.api_route("/version", methods=PROBES)
    async def version() -> Response:
        return JSONResponse({"version": metadata.version("saccade")})

    @app.get("/v1/models")
    async def models(request: Request, limit: Limit = 1000, after_id: str = "", _: Beta = True) -> Response:
        service.gate.client(request.scope)
        found = [_about(model, config.limits) for model in service.models.values()]
        return JSONResponse(page(found, limit, after_id))

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request, _: Beta = True) -> Response:
        service.gate.client(request.scope)
        return JSONResponse(_about(service.model(name), config.limits))

    @app.api_route("/health", methods=PROBES)
    @app.api_route("/ping", methods=[*PROBES, "POST"], dependencies=[Depends(take_no_body)])
    async def health() -> Response:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.api_route("/ready", methods=PROBES)
    async def ready() -> Response:
        status, body = service.health()
        if status == 200 and (service.is_leaving or service.owner.is_draining):
            status, body = 503, {"status": "draining"}
        return JSONResponse(body, status)

    @app.api_route("/metrics", methods=PROBES)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def respond(request: Request, refusal: Refusal) -> Response:
        service.metrics.failed(refusal.kind)
        return JSONResponse(refusal.body(request.url.path), refusal.status, refusal.headers())

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return respond(request, error)

    @app.exception_handler(InputError)  # of messages that are read before there is a job
    async def unusable(request: Request, error: InputError) -> Response:
        return respond(request, refusal_of(error))

    @app.exception_handler(RequestValidationError)
    async def wrong_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return respond(request, invalid(f"The query parameter {name} is wrong: {first['msg']}.", name))

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
        if request.url.path.startswith(("/v1/files", "/v1/batches")):
            message = "Files and batches are not served; `saccade batch FILE -t MODEL -o ANSWERS` answers such a file."
        return respond(request, Refusal(error.status_code, message, "not_found", code="not_found"))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        log.error("A request failed.", exc_info=error)
        return respond(request, broken())

    app.router.routes.extend(Page(directory=str(resources.files("saccade.serve") / "static")).routes())
    return app


def _known_query(request: Request) -> None:
    """Refuse parameters of a query that the request's route does not declare."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params.keys() - set(known):
        raise unknown(name, known, "query parameter")


def _about(model: ServedModel, limits: Limits) -> Json:
    """A model in OpenAI's form and Anthropic's, with its context, and the methods and media that requests may have."""
    return {
        "id": model.label,
        "object": "model",
        "type": "model",
        "display_name": model.label,
        "created": model.created,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "owned_by": "saccade",
        "root": model.entry.label if os.path.exists(model.entry.target) else model.entry.target,
        "parent": None if model.vlm.adapter is None else model.entry.label,
        "max_model_len": model.planner.context,
        "saccade": {
            "method": model.vlm.method,
            "lossless": model.vlm.lossless,
            "exact": model.vlm.target.exact,
            "executor": model.vlm.target.executor.name,
            "weights": model.vlm.target.weights,
            "caveat": caveat(model.vlm.target, model.vlm.lossless),
            "profiles": list(model.profiles),
            "methods": model.open_methods,
            "lossy": model.lossy,
            "media": model.vlm.processor.kinds,
            "max_body_mib": limits.max_body_mib,
        },
    }


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


TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
"""Content types by suffix; those of the machine differ."""

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' blob:",
    "media-src": "blob:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
"""Content Security Policy: own files alone, nothing inline, no text parsed as HTML; ``blob:`` has chosen media."""

HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-cache",
}
"""Headers of every file of the page. Camera pictures come from the device's own dialogue, without a permission."""


class Page(StaticFiles):
    """Files of the page, one route each: other paths are left to the routes of the API."""

    def routes(self) -> list[Route]:
        names = sorted(entry.name for entry in os.scandir(str(self.directory)) if entry.is_file())
        paths = {"/": "index.html", **{f"/{name}": name for name in names}}
        return [Route(path, partial(self._respond, name), methods=["GET"]) for path, name in paths.items()]

    async def _respond(self, name: str, request: Request) -> Response:
        response = await self.get_response(name, request.scope)
        response.headers.update(HEADERS)
        if "content-type" in response.headers:
            response.headers["content-type"] = TYPES[PurePath(name).suffix]
        return response
