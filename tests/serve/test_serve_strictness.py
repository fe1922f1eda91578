"""Every route honours a field or a parameter, or names it and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from live_server import Live, asks, uri

CANCEL = "/v1/responses/{name}/cancel"  # which cancels nothing
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": asks("Hello"), "max_tokens": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "Hello"},
    CANCEL: {},
    "/v1/messages": {"messages": asks("Hello"), "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": asks("Hello")},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/ping": {},
}
"""Bodies that are answered."""


def routes(server: Live) -> Iterator[tuple[str, str, str]]:
    """Methods, paths, and templates of paths of all routes."""
    made = server.post({**BODIES["/v1/responses"], "model": "tiny"}, "/v1/responses")[1]["id"]
    names = {"name:path": "tiny", "name": made}
    for route in server.server.config.app.routes:
        if isinstance(route, APIRoute):
            path = route.path
            for name, value in names.items():
                path = path.replace(f"{{{name}}}", value)
            for method in sorted(route.methods - {"HEAD"}, key="POST GET DELETE".index):
                yield method, path, route.path


def sentence(server: Live, method: str, path: str, body: Any = None) -> tuple[int, str]:
    content = b"" if body is None else json.dumps(body).encode()
    status, _, answer = server.call(method, path, content)
    return status, answer.decode()


def test_an_unknown_parameter_of_a_query_is_refused_by_every_route(shared: Live) -> None:
    checked = set()
    for method, path, template in routes(shared):
        body = BODIES[template] if method == "POST" else None
        status, answer = sentence(shared, method, f"{path}?nonsense=1", body)
        assert (status, "The query parameter nonsense is unknown" in answer) == (400, True), (method, path, answer)
        assert sentence(shared, method, path, body)[0] == (400 if template == CANCEL else 200), (method, path)
        checked.add(template)
    assert checked >= {"/metrics", "/health", "/v1/models", "/v1/responses/{name}", *BODIES}


def test_an_unknown_field_is_refused_by_every_route_with_a_body(shared: Live) -> None:
    paths = [(path, template) for method, path, template in routes(shared) if method == "POST"]
    assert {template for _, template in paths} == BODIES.keys()
    for path, template in paths:
        status, answer = sentence(shared, "POST", path, {**BODIES[template], "nonsense": 1})
        assert (status, "The field nonsense is unknown" in answer) == (400, True), (path, answer)


def test_an_unknown_field_of_a_picture_is_refused_by_every_route_with_pictures(shared: Live) -> None:
    part = {"type": "image_url", "image_url": {"url": uri(1), "nonsense": 1}}
    for path, name in [
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/tokenize", "messages"),
    ]:
        body = {key: value for key, value in BODIES[path].items() if key != "prompt"}
        status, answer = sentence(shared, "POST", path, {**body, name: [{"role": "user", "content": [part]}]})
        assert status == 400, (path, answer)


@pytest.mark.parametrize("query", ["stream=true", "include=a", "starting_after=1"])
def test_a_kept_response_is_given_as_a_whole(shared: Live, query: str) -> None:
    made = shared.post({**BODIES["/v1/responses"], "model": "tiny"}, "/v1/responses")[1]["id"]
    status, answer = sentence(shared, "GET", f"/v1/responses/{made}?{query}")
    assert (status, query.partition("=")[0] in json.loads(answer)["error"]["message"]) == (400, True)
