"""A server under load: overload, limits, clients that leave or read slowly, steps that hang, and the end."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from live_server import TIMEOUT, Live, asks, live, questions, uri
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import ready, vlm
from saccade.serve.owner import Job, Owner
from saccade.serve.service import ClientGone, Exchange
from saccade.target_model.adapter import Target

LONG = {"model": "tiny", "messages": asks("Tell all."), "max_tokens": 400, "temperature": 0}


@contextmanager
def slowed(target: Target, seconds: float) -> Iterator[None]:
    """Forwards that take longer, so that answers are under way when the test acts."""
    forward = target.forward

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments, **options)

    target.forward = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.forward


def opened(server: Live, body: dict[str, Any]) -> HTTPConnection:
    """A connection on which a request was sent and nothing is read."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def test_a_step_is_read_while_the_next_one_is_computed_where_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by a processor that passes as one; answers are the same, and come in the same pieces."""
    bodies = [{**LONG, "messages": asks(f"Tell {n}."), "max_tokens": 12 + n, "logprobs": True} for n in range(3)]
    alike, during = [], list[bool]()
    for computes_beside in (False, True):
        monkeypatch.setattr("saccade.serve.owner._is_asynchronous", lambda _, told=computes_beside: told)
        with live() as server:
            owner = server.service.owner

            def post(deliver: Any, owner: Owner = owner, send: Any = owner._post) -> None:
                during.append(owner.counts.step_began is not None)
                send(deliver)

            owner._post = post  # type: ignore[method-assign]
            pieces = [[event["choices"] for event in server.stream({**body, "stream": True})] for body in bodies]
            alike.append((pieces, [server.post(body)[1]["choices"] for body in bodies]))
        assert any(during) == computes_beside
    assert alike[0] == alike[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(stream: bool) -> None:
    with live(max_rows=1) as server, slowed(vlm("qwen", "qwen-draft").target, 0.02):
        connection = opened(server, {**LONG, "stream": stream})
        server.until(lambda: server.service.owner.counts.running == 1)
        (lane,) = server.service.owner.counts.kv_usages
        assert 0 < server.service.owner.counts.kv_usages[lane] < 1
        if stream:
            assert connection.getresponse().read(10)
        connection.close()
        server.until(lambda: server.is_idle, 5)
        assert server.service.owner.counts.kv_usages[lane] == 0
        assert server.service.owner.counts.steps < 60, "the answer would have taken longer"
        assert server.post({**LONG, "max_tokens": 2})[0] == 200


def test_ended_requests_are_freed_without_the_garbage_collector() -> None:
    body = {**LONG, "messages": asks("Tell all.", uri(1)), "max_tokens": 3}
    gc.collect()
    gc.disable()
    try:
        with live() as server:
            assert [server.post(body)[0] for _ in range(2)] == [200, 200]
            assert server.call("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}).encode())[0] == 200
            assert server.post({**body, "stop": 3})[0] == 400
            server.until(lambda: not any(type(each) is Exchange for each in gc.get_objects()), 10)
    finally:
        gc.enable()


def test_a_full_queue_is_refused_and_what_was_accepted_is_answered() -> None:
    question = {**LONG, "max_tokens": 12}
    with live(max_rows=1, max_queue=2) as server, slowed(vlm("qwen", "qwen-draft").target, 0.05):
        with ThreadPoolExecutor(10) as pool:
            body = json.dumps(question).encode()
            answers = list(pool.map(lambda _: server.call("POST", "/v1/chat/completions", body), range(10)))
        served = [json.loads(body) for status, _, body in answers if status == 200]
        refused = [headers for status, headers, _ in answers if status == 503]
        assert all(b"(2 requests wait already)" in body for status, _, body in answers if status == 503)
        assert len(served) + len(refused) == 10
        assert refused
        assert 3 <= len(served) < 10
        assert all(int(headers["retry-after"]) >= 1 for headers in refused)
        texts = {answer["choices"][0]["message"]["content"] for answer in served}
    assert texts == {vlm("qwen", "qwen-draft").generate(LONG["messages"], max_new_tokens=12).text}


def test_limits_per_client_are_429_and_end_with_the_requests() -> None:
    with live(requests_per_key=1) as server, slowed(vlm("qwen", "qwen-draft").target, 0.05):
        connection = opened(server, {**LONG, "max_tokens": 20})
        server.until(lambda: server.service.owner.counts.running == 1)
        status, answer = server.post({**LONG, "max_tokens": 1})
        assert status == 429
        assert answer["error"]["type"] == "rate_limit_error"
        connection.getresponse().read()
        server.until(lambda: server.post({**LONG, "max_tokens": 1})[0] == 200, 5)
    with live(requests_per_minute=2) as server:
        statuses = [server.post({**LONG, "max_tokens": 1})[0] for _ in range(3)]
        assert statuses == [200, 200, 429]


def test_a_slow_reader_is_dropped_and_stalls_nobody() -> None:
    with live(stream_buffer=8, send_seconds=1.0, max_rows=2, send_buffer=4096) as server:
        body = {**LONG, "max_tokens": 900, "stream": True, "logprobs": True, "top_logprobs": 20}
        reader = socket.create_connection(("127.0.0.1", server.port))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        content = json.dumps({**body, "saccade": {"trace": True}}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader.sendall(head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        try:
            server.until(lambda: server.service.owner.counts.running == 1)
            for question in [q for q in questions(8, seed=5) if "temperature" not in q.body][:3]:
                status, answer = server.post(question.body)
                assert status == 200
                assert answer["choices"][0]["message"]["content"] == question.expected(vlm("qwen", "qwen-draft"))
            server.until(lambda: server.is_idle, 60)
            server.until(lambda: not server.server.server_state.tasks, 10)
            counted = server.call("GET", "/metrics")[2].decode().splitlines()
            assert [line for line in counted if "errors_total{" in line] == [
                'saccade:request_errors_total{kind="slow_reader"} 1.0'
            ]
        finally:
            reader.close()


def test_the_rows_of_an_exchange_that_breaks_off_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes too long ends it, although the connection is still there."""
    cancelled, cancel = list[Job](), Owner.cancel

    def noted(owner: Owner, jobs: Sequence[Job]) -> None:
        cancelled.extend(jobs)
        cancel(owner, jobs)

    async def too_slow(*_: Any, **__: Any) -> None:
        raise ClientGone

    monkeypatch.setattr(Owner, "cancel", noted)
    monkeypatch.setattr(Exchange, "_write", too_slow)
    with live() as server:
        content = json.dumps({**LONG, "max_tokens": 900, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        assert server.raw(head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content).endswith(b"\r\n\r\n")
        server.until(lambda: cancelled and server.is_idle)


def test_heads_and_bodies_that_come_too_slowly_end_their_connection() -> None:
    with live(header_seconds=0.5, body_seconds=0.5) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
            begin = time.monotonic()
            assert slow.recv(100) == b""
            assert time.monotonic() - begin < 5
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as half:
            half.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert b" 408 " in half.recv(1000)


def test_requests_for_more_methods_than_batches_are_all_answered() -> None:
    """The oldest batch runs dry for the others; nobody starves."""
    model = vlm("qwen", "qwen-draft")
    request = {**LONG, "max_tokens": 10}
    expected = model.generate(LONG["messages"], max_new_tokens=10).text
    methods = ["off", "chain", "prompt-lookup", "static-tree", "short"] * 3
    with live(batches=2, max_rows=2) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: server.post({**request, "speculation": name}), methods))
        assert [status for status, _ in answers] == [200] * len(methods)
        assert {answer["choices"][0]["message"]["content"] for _, answer in answers} == {expected}
        assert len(server.service.owner._lanes) <= 2


def test_a_step_that_hangs_makes_the_server_unhealthy() -> None:
    with live(stuck_seconds=0.3) as server:
        assert server.call("GET", "/health")[0] == 200
        with slowed(vlm("qwen", "qwen-draft").target, 1.5):
            connection = opened(server, {**LONG, "max_tokens": 1})
            server.until(lambda: server.call("GET", "/health")[0] == 503, 5)
            connection.getresponse().read()
        server.until(lambda: server.call("GET", "/health")[0] == 200, 5)


def test_the_time_in_the_queue_is_counted_from_the_request() -> None:
    with live(max_rows=1) as server, slowed(vlm("qwen", "qwen-draft").target, 0.05), ThreadPoolExecutor(2) as pool:
        body = {**LONG, "max_tokens": 10, "speculation": "off", "saccade": {"stats": True}}
        answers = [answer for _, answer in pool.map(server.post, [body, body])]
        stats = [answer["saccade"]["choices"][0]["stats"] for answer in answers]
        assert max(each["queue_seconds"] for each in stats) > 0.4
        assert max(each["first_token_seconds"] for each in stats) > 0.4
        metrics = server.call("GET", "/metrics")[2].decode().splitlines()
        total = next(line for line in metrics if line.startswith("saccade:request_queue_time_seconds_sum"))
        assert float(total.rpartition(" ")[2]) > 0.4


def test_answers_that_take_longer_than_the_end_of_the_server_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with (
        live(drain_seconds=0.3) as server,
        ThreadPoolExecutor(2) as pool,
        slowed(vlm("qwen", "qwen-draft").target, 0.05),
    ):
        whole = pool.submit(server.post, LONG)
        stream = pool.submit(server.call, "POST", "/v1/chat/completions", json.dumps({**LONG, "stream": True}).encode())
        server.until(lambda: server.service.owner.counts.running == 2)
        server.server.should_exit = True
        status, body = whole.result(TIMEOUT)
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert b"The server is shutting down" in stream.result(TIMEOUT)[2]
    assert "Traceback" not in caplog.text


def test_a_leaving_server_is_not_ready_but_serves_until_the_delay_is_over() -> None:
    with live(drain_delay_seconds=600.0) as server:
        assert server.call("GET", "/ready")[0] == 200
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.call("GET", "/ready")[0] == 503
        assert server.call("GET", "/health")[0] == 200
        time.sleep(0.3)  # several ticks of the server
        assert server.post({**LONG, "max_tokens": 2})[0] == 200
    with live(drain_delay_seconds=0.2) as server:
        server.server.handle_exit(signal.SIGTERM, None)
        server.until(lambda: not server.thread.is_alive())


def test_the_access_log_has_a_line_per_request_without_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with live(access_log=True) as server:
        capsys.readouterr()  # progress of loading
        for stream in (False, True):
            body = json.dumps({**LONG, "max_tokens": 20, "stream": stream}).encode()
            assert server.call("POST", "/v1/chat/completions", body)[0] == 200
        assert server.call("POST", "/v1/chat/completions?secret=1", body)[0] == 400
        server.call("GET", "/v1/models/a%0Ab")
    lines = re.sub(r"(?m)^\d{4}-\d\d-\d\dT[\d:]{8} ", "", re.sub(r"\d\.\d{3} s", "T", capsys.readouterr().err))
    assert lines.splitlines() == [
        *["POST /v1/chat/completions 200 T 20 tokens"] * 2,
        "POST /v1/chat/completions 400 T 0 tokens",
        "GET /v1/models/a%0Ab 404 T 0 tokens",
    ]


def samples(server: Live, prefix: str = "saccade:") -> Counter[tuple[str, str]]:
    """Values of the samples, per name without labels and model."""
    values = Counter[tuple[str, str]]()
    for family in text_string_to_metric_families(server.call("GET", "/metrics")[2].decode()):
        for sample in family.samples:
            values[sample.name.removeprefix(prefix), sample.labels.get("model_name", "")] += sample.value
    return values


def test_metrics_count_what_was_served(shared: Live) -> None:
    before = samples(shared)
    _, answer = shared.post({**LONG, "max_tokens": 20})
    shared.post({**LONG, "max_tokens": 0})
    after = samples(shared)
    names = ["prompt_tokens_total", "generation_tokens_total", "spec_decode_num_accepted_tokens_total"]
    names += ["spec_decode_num_draft_tokens_total", "time_to_first_token_seconds_count"]
    names += ["e2e_request_latency_seconds_count"]
    used, drafts = answer["usage"], answer["metrics"]["speculative_decoding"]
    rise = [after[name, "tiny"] - before[name, "tiny"] for name in names]
    assert rise == [used["prompt_tokens"], 20, drafts["num_accepted_draft_tokens"], drafts["num_draft_tokens"], 1, 1]
    assert after["request_errors_total", ""] == before["request_errors_total", ""] + 1
    assert after["num_requests_running", "tiny"] == after["num_requests_waiting", "tiny"] == 0


@pytest.mark.parametrize("method", ["chain", "dynamic-tree", "lookup-merge", "lvspec", "off"])
def test_accepted_tokens_by_position_sum_to_all_accepted_ones(shared: Live, method: str) -> None:
    kinds = ("accepted_tokens", "accepted_tokens_per_pos", "drafts", "draft_tokens")
    names = [f"spec_decode_num_{name}_total" for name in kinds]
    before = samples(shared)
    for number, most in enumerate((2, 3, 7)):  # most answers end within the draft
        body = {"messages": asks(f"abcabcabcabc{number}?"), "max_tokens": most, "speculation": method}
        assert shared.post(body)[0] == 200
        shared.post(body)  # again, with the prompt in the cache: the first pass verifies drafts, too
    rise = samples(shared) - before
    accepted, by_position, drafts, drafted = (rise[name, "tiny"] for name in names)
    assert accepted == by_position <= drafted
    assert drafts <= drafted
    assert (accepted > 0) == (drafts > 0) == (method != "off")


def test_dashboards_of_vllm_find_its_names_types_and_labels(shared: Live) -> None:
    shared.post({**LONG, "max_tokens": 9})
    text = shared.call("GET", "/metrics")[2].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, kind in {
        "spec_decode_num_drafts": "counter",
        "spec_decode_num_draft_tokens": "counter",
        "spec_decode_num_accepted_tokens": "counter",
        "spec_decode_num_accepted_tokens_per_pos": "counter",
        "mm_cache_queries": "counter",
        "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "kv_cache_usage_perc": "gauge",
    }.items():
        labels = {"model_name", "engine", *(["position"] if name.endswith("per_pos") else [])}
        labels |= {"le"} if kind == "histogram" else set()
        theirs, ours = families[f"vllm:{name}"], families[f"saccade:{name}"]
        assert theirs.type == ours.type == kind
        assert {*theirs.samples[0].labels} == labels
    assert all(family.type == "counter" for name, family in families.items() if name.endswith(("steps", "hits")))
    assert {key: value for key, value in samples(shared, "vllm:").items() if key[0].startswith("spec")} == {
        key: value for key, value in samples(shared).items() if key[0].startswith("spec") and "loosened" not in key[0]
    }, "the sums over methods"
    with live() as server:
        assert samples(server, "vllm:")["spec_decode_num_drafts_total", "tiny"] == 0
        assert b"\nvllm:spec_decode_num_drafts_total{" in server.call("GET", "/metrics")[2], "before any answer"
    with live(vllm_metrics=False) as server:
        assert b"vllm:" not in server.call("GET", "/metrics")[2]


def test_a_picture_is_one_query_of_the_media_cache_whatever_the_drafter_and_the_chunks() -> None:
    with live(prefill_chunk=16) as server:
        for hits, queries in ((0, 2), (1, 4)):
            server.post({"messages": asks("What?", uri(7 + hits), uri(1, (96, 96))), "max_tokens": 4})
            seen = samples(server)
            assert (seen["mm_cache_hits_total", "tiny"], seen["mm_cache_queries_total", "tiny"]) == (hits, queries)


# -- the end of a process ----------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[Any]:
    """`saccade serve` as a process of its own, with its port."""
    command = [sys.executable, "-c", "from saccade.cli import main; main()", "serve", "-t", str(ready("qwen"))]
    command += ["-d", str(ready("qwen-draft")), "--port", "0", "--name", "tiny"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as running:
        assert running.stderr is not None
        lines = iter(running.stderr.readline, "")
        line = next((line for line in lines if line.startswith("Serving")), "")
        assert line, "the server did not start"
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        yield running, int(line.partition("127.0.0.1:")[2].partition("/")[0])
        running.kill()


@pytest.mark.slow
def test_a_signal_lets_running_answers_finish_and_ends_with_zero(process: Any) -> None:
    running, port = process
    server = Live(None, None, port, None)  # type: ignore[arg-type]
    connection = opened(server, {**LONG, "max_tokens": 250, "stream": True})
    response = connection.getresponse()
    first = response.read(200)
    running.send_signal(signal.SIGTERM)
    rest = response.read()
    assert (first + rest).endswith(b"data: [DONE]\n\n")
    assert (first + rest).count(b'"finish_reason": "length"') == 1
    assert running.wait(30) == 0
    with pytest.raises(ConnectionError):
        server.call("GET", "/health")


@pytest.mark.slow
def test_a_second_signal_ends_at_once(process: Any) -> None:
    running, port = process
    connection = opened(Live(None, None, port, None), {**LONG, "max_tokens": 900, "stream": True})  # type: ignore[arg-type]
    connection.getresponse().read(1)
    running.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert running.wait(30) in (0, 128 + signal.SIGTERM)
    assert time.monotonic() - begin < 5
