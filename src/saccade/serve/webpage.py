"""The page at ``/``: static files of this package, with headers that confine them to this server."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import PurePath
from typing import Any

from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"

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

    def __init__(self) -> None:
        folder = str(resources.files("saccade.serve") / "static")
        super().__init__(directory=folder)
        self._names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())

    def routes(self) -> list[Route]:
        """Return the routes, ``/`` for ``index.html`` included."""
        paths = {"/": INDEX, **{f"/{name}": name for name in self._names}}
        return [Route(path, self._responder(name), methods=["GET"]) for path, name in paths.items()]

    def _responder(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            return await self.get_response(name, request.scope)

        return respond

    def file_response(self, full_path: Any, *arguments: Any, **options: Any) -> Response:
        """Respond with a file, its type and the headers."""
        response = super().file_response(full_path, *arguments, **options)
        response.headers.update(HEADERS)
        kind = TYPES.get(PurePath(full_path).suffix)
        if kind is not None and "content-type" in response.headers:
            response.headers["content-type"] = kind
        return response
