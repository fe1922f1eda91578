"""The front of replicas: where requests go, and what clients see when a replica ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from isolated import ROOT
from saccade.serve.configuration import ConfigError, Limits, ModelEntry, ServerConfig, read_config
from saccade.serve.front import ATTEMPTS, Forwarded, Front, QueueFull, ReplicaLost, key_of_body, key_of_response, ranked

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


def piece(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def chat(*texts: str, picture: str = "", **more: Any) -> bytes:
    """A conversation; the picture is in its first question."""
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        content: Any = text
        if picture and not number:
            content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
        messages.append({"role": "assistant" if number % 2 else "user", "content": content})
    return json.dumps({"messages": messages, **more}).encode()


# -- affinity ----------------------------------------------------------------------------------------------


def test_later_turns_and_other_questions_about_a_picture_have_the_key_of_the_first() -> None:
    first = key_of_body(chat("What is it?", picture="data:a"))
    assert first
    assert first == key_of_body(chat("What is it?", "A cat.", "Which colour?", picture="data:a", temperature=1))
    assert first == key_of_body(chat("How many?", picture="data:a"))
    assert first != key_of_body(chat("What is it?", picture="data:b"))
    assert first != key_of_body(chat("What is it?", picture="data:a", model="other"))
    assert key_of_body(chat("Hello", "Hi.", "And?")) == key_of_body(chat("Hello")) != key_of_body(chat("Hallo"))


def test_pictures_of_anthropics_form_have_a_key_of_their_own() -> None:
    def asked(words: str, **source: str) -> bytes:
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": words}]
        return json.dumps({"messages": [{"role": "user", "content": blocks}]}).encode()

    first = key_of_body(asked("What is it?", type="base64", media_type="image/png", data="a"))
    assert first == key_of_body(asked("And?", type="base64", media_type="image/png", data="a"))
    assert first != key_of_body(asked("What is it?", type="base64", media_type="image/png", data="b"))
    assert key_of_body(asked("A?", type="url", url="x")) == key_of_body(chat("What is it?", picture="x"))


def test_a_system_message_alone_ties_no_requests_together() -> None:
    def body(text: str) -> bytes:
        system = {"role": "system", "content": "Be brief."}
        return json.dumps({"messages": [system, {"role": "user", "content": text}]}).encode()

    assert key_of_body(body("One?")) != key_of_body(body("Two?"))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"a"', b"{}", b'{"messages": 3}', b'{"messages": [3]}', b'{"prompt": null}', b"[" * 10**5],
)
def test_bodies_that_are_no_requests_have_no_key(body: bytes) -> None:
    assert key_of_body(body) == ""


def test_prompts_with_the_same_beginning_go_together() -> None:
    long = "x" * 2000
    assert key_of_body(json.dumps({"prompt": long + "a"}).encode()) == key_of_body(
        json.dumps({"prompt": long}).encode()
    )
    assert key_of_body(b'{"prompt": [1, 2]}') != key_of_body(b'{"prompt": [1, 3]}')


def test_keys_spread_evenly_and_only_those_of_a_lost_replica_move() -> None:
    names, keys = ["a", "b", "c", "d"], [f"key {number}" for number in range(2000)]
    homes = {key: ranked(key, dict.fromkeys(names, 0), rows=2)[0][0] for key in keys}
    assert all(400 < count < 600 for count in Counter(homes.values()).values())
    after = {key: ranked(key, dict.fromkeys("abd", 0), rows=2)[0][0] for key in keys}
    assert all(after[key] == home for key, home in homes.items() if home != "c")


def test_a_request_goes_home_until_it_would_wait_there() -> None:
    home = ranked("key", {"a": 0, "b": 0}, rows=2)[0][0]
    other = "b" if home == "a" else "a"
    assert ranked("key", {home: 1, other: 0}, rows=2) == [[home], [other]]
    assert ranked("key", {home: None, other: 0}, rows=2) == [[home], [other]]
    assert ranked("key", {home: 2, other: 0}, rows=2) == [["a", "b"]], "the least loaded one of all"
    assert ranked("", {"a": 0, "b": 0}, rows=2) == [["a", "b"]]
    assert ranked("key", {}, rows=2) == []


def test_turns_of_kept_responses_go_to_the_replica_that_keeps_them() -> None:
    def body(**fields: Any) -> bytes:
        return json.dumps(fields).encode()

    shown = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:a"}]}]
    assert key_of_body(body(input="Hello")) == key_of_body(chat("Hello"))
    assert key_of_body(body(input=shown)) == key_of_body(chat("What is it?", picture="data:a"))
    assert key_of_body(body(input="Hello", previous_response_id="resp_12")) == key_of_body(chat("Hello"))
    key = key_of_body(body(input="Hello", previous_response_id="resp_b-12"))
    assert key == key_of_response("resp_b-34") != key_of_response("resp_a-12")
    assert ranked(key, {"a": 0, "b": 9}, rows=2) == [["b"]]
    assert ranked(key, {"a": 0, "c": 0}, rows=2) == [["a", "c"]], "which says that it is not there"
    assert ranked(key, {}, rows=2) == []


# -- the front ---------------------------------------------------------------------------------------------

Behaviour = Callable[[Forwarded], AsyncGenerator[list[Any]]]


def visit(
    *replicas: Behaviour,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    body: bytes = b"{}",
    path: str = "/v1/chat/completions",
    leave: bool = False,
    **config: Any,
) -> tuple[list[dict[str, Any]], Front]:
    """Messages that a client gets from replicas that are tried in turn."""
    left = list(replicas)

    async def texts() -> dict[str, str]:
        return {
            "r1": "# HELP x_total X.\n# TYPE x_total counter\nx_total 2.0\n",
            "r2": "# HELP x_total X.\n# TYPE x_total counter\nx_total 3.0\n",
        }

    config = {"allowed_hosts": ("here",), **config}
    front = Front(ServerConfig((ModelEntry("m"),), **config), lambda request: left.pop(0)(request), texts)
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if parts:
                return parts.pop()
            if leave and sent:
                return {"type": "http.disconnect"}
            await asyncio.sleep(0 if leave else 60)
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"host", b"here"), *headers]}
        await front(scope, receive, send)

    asyncio.run(run())
    return sent, front


def answering(*groups: list[Any], lost: bool = False, error: type[Exception] = ReplicaLost) -> Behaviour:
    async def behave(_: Forwarded) -> AsyncGenerator[list[Any]]:
        for group in groups:
            yield group
        if lost:
            raise error

    return behave


def counts(front: Front) -> dict[str, int]:
    values = {name: int(counter._value.get()) for name, counter in front.counts.items()}
    return {name: value for name, value in values.items() if value}


def test_an_answer_is_passed_on_as_it_comes() -> None:
    groups = [[HEAD, piece("a")], [piece("b")], [piece("c", more=False)]]
    sent, front = visit(answering(*groups))
    assert sent == [message for group in groups for message in group]
    assert counts(front) == {"requests": 1}


@pytest.mark.parametrize("begun", [[], [[HEAD]]])
def test_a_request_without_output_goes_to_another_replica(begun: list[Any]) -> None:
    sent, front = visit(answering(*begun, lost=True), answering([HEAD, piece("a", more=False)]))
    assert sent == [HEAD, piece("a", more=False)]
    assert counts(front) == {"requests": 1, "repeated": 1}


def test_a_stream_with_output_ends_with_an_error_event_and_is_not_repeated() -> None:
    sent, front = visit(answering([HEAD, piece("data: a\n\n")], lost=True), answering([HEAD, piece("never")]))
    assert [message["type"] for message in sent] == [HEAD["type"], *["http.response.body"] * 2]
    event, done, _ = sent[-1]["body"].split(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("replica_lost", "server_error")
    assert error["message"] == "The replica that answered this request has ended; send the request again."
    assert done == b"data: [DONE]"
    assert not sent[-1].get("more_body")
    assert counts(front) == {"requests": 1, "broken": 1}


def test_errors_of_the_front_have_the_form_of_the_path() -> None:
    path = "/v1/messages"
    sent, _ = visit(answering([HEAD, piece("data: a\n\n")], lost=True), path=path)
    name, data = sent[-1]["body"].decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    for config, kind in (({"allowed_hosts": ("elsewhere",)}, "permission_error"), ({}, "request_too_large")):
        sent, _ = visit(body=b"x" * (2 << 20), limits=Limits(max_body_mib=1), path=path, **config)
        assert json.loads(sent[1]["body"])["error"]["type"] == kind


def test_a_whole_answer_that_breaks_off_closes_the_connection() -> None:
    with pytest.raises(ReplicaLost):
        visit(answering([WHOLE, piece("half")], lost=True))


def test_a_request_that_ends_every_replica_fails_with_503() -> None:
    sent, front = visit(*[answering(lost=True)] * ATTEMPTS)
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "replica_lost"
    assert counts(front)["repeated"] == ATTEMPTS


def test_a_full_queue_is_503_with_a_time_to_wait() -> None:
    sent, front = visit(answering(lost=True, error=QueueFull))
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"2"
    assert json.loads(sent[1]["body"])["error"]["code"] == "overloaded"
    assert counts(front) == {"requests": 1, "refused": 1}


def test_a_client_may_name_what_belongs_together() -> None:
    keys = []

    async def behave(request: Forwarded) -> AsyncGenerator[list[Any]]:
        keys.append(request.key)
        yield [HEAD, piece("a", more=False)]

    visit(behave, body=chat("Hello"))
    header = (b"x-saccade-affinity", b"mine")
    visit(behave, body=chat("Hello"), headers=(header,))
    kept = ("/v1/responses/resp_b-12", "/v1/responses/resp_b-12/input_items")
    counted = ("/v1/responses/input_tokens", "/v1/responses")
    for path, previous in [*((path, "") for path in kept), *((path, "resp_b-12") for path in counted)]:
        visit(behave, body=chat("Hello", previous_response_id=previous), path=path, headers=(header,))
    assert keys == [key_of_body(chat("Hello")), "mine", *[key_of_response("resp_b-12")] * 4]


def test_a_client_that_leaves_ends_the_work_of_its_replica() -> None:
    ended = []

    async def endless(_: Forwarded) -> AsyncGenerator[list[Any]]:
        try:
            yield [HEAD, piece("a")]
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    _, front = visit(endless, leave=True)
    assert ended == [True]
    assert counts(front) == {"requests": 1, "clients_gone": 1}


def test_keys_hosts_and_sizes_are_checked_before_a_replica_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, _ = visit(body=b"x" * (2 << 20), limits=Limits(max_body_mib=1))
    assert sent[0]["status"] == 413
    sent, _ = visit(allowed_hosts=("elsewhere",))
    assert sent[0]["status"] == 403
    monkeypatch.setenv("SACCADE_API_KEYS", "secret")
    sent, _ = visit()
    assert sent[0]["status"] == 401
    assert dict(sent[0]["headers"])[b"www-authenticate"] == b"Bearer"


def test_metrics_of_replicas_take_no_query() -> None:
    scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"a=1", "headers": []}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def none(*_: Any) -> Any:
        return {}

    asyncio.run(Front(ServerConfig((ModelEntry("m"),)), answering(), none)(scope, none, send))
    assert (sent[0]["status"], b"takes no query" in sent[1]["body"]) == (400, True)


def test_metrics_of_all_replicas_have_their_names() -> None:
    sent, _ = visit(path="/metrics")
    lines = sent[1]["body"].decode().splitlines()
    assert lines[:4] == [
        "# HELP x_total X.",
        "# TYPE x_total counter",
        'x_total{replica="r1"} 2.0',
        'x_total{replica="r2"} 3.0',
    ]
    assert "saccade:front_requests_total 1.0" in lines


@pytest.mark.ray
def test_the_examples_of_serve_yaml_are_what_ray_reads(tmp_path: Path) -> None:
    """Schema, names of the deployments, and the application that the builder makes of the arguments."""
    schema = pytest.importorskip("ray.serve.schema", reason="needs saccade[ray]")
    from saccade.serve.replicas import application

    plain = yaml.safe_load((ROOT / "docker" / "serve.yaml").read_text())
    service = next(yaml.safe_load_all((ROOT / "docker" / "rayservice.yaml").read_text()))
    kubernetes = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert kubernetes == plain
    application_schema = schema.ServeDeploySchema.model_validate(plain).applications[0]
    (tmp_path / "serve.toml").write_text('[[models]]\ntarget = "pocket"\n')
    built = application({**application_schema.args, "config": str(tmp_path / "serve.toml")})
    fronts = built._bound_deployment
    behind = fronts.init_args[0]._bound_deployment
    assert [fronts.name, behind.name] == [deployment.name for deployment in application_schema.deployments]
    assert behind.ray_actor_options["num_gpus"] == 1
    with pytest.raises(ConfigError, match=r"args must have config, and may have cpus and gpus, not \['gpu'\]"):
        application({"config": "x", "gpu": 1})


@pytest.mark.ray
def test_an_update_keeps_the_address_of_the_server(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs saccade[ray]")
    from saccade.serve.replicas import _checked

    file = tmp_path / "serve.toml"
    for port in (8000, 8001):
        file.write_text(f'[server]\nport = {port}\n[[models]]\ntarget = "pocket"\n')
        if port == 8000:
            assert _checked(lambda: read_config(file), ("127.0.0.1", 8000)).port == 8000
    with pytest.raises(ConfigError, match="address of a running server cannot change"):
        _checked(lambda: read_config(file), ("127.0.0.1", 8000))
