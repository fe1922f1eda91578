"""The server under load, its clients in a process of their own.

Three measurements, all with the pocket pair, streamed answers and pictures as data URIs:

- *full*: 1, 4 and 8 requests at a time, as multiples of the tokens per second of Hugging Face's `generate` alone in
  the same run, and the server's cost per token over the bare batch's, which decodes and tokenizes the same messages.
  "8+8" has 8 more requests in the queue; without them rows wait for their clients' next requests. With ``--clock cpu``
  seconds are processor time of the server's process, HTTP included, so that other work on the machine changes nothing
  but the caches;
- *arrivals*: Poisson arrivals at loads relative to what one request after the other can serve, with all rows and with
  one (wall time);
- *overload*: four times that load for ``--seconds``: every answer is compared with `generate`'s, refusals are counted,
  and the memory of the process is read at begin and end.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import pocket_pair
from benchmarks.clock import CLOCKS
from benchmarks.pocket_pair import LOADS, load
from saccade import VLM

TASKS = ("chart", "scene", "receipt", "document", "detail", "line")
CLIENTS = (1, 4, 8)
PART = 16
"""Requests per turn of the ways that are compared, so that the machine's moods fall on all."""


def conversation(number: int) -> list[dict[str, Any]]:
    """A question about a fresh picture, in OpenAI's form."""
    (sample,) = pocket_pair.samples([number], tasks=TASKS)
    content = io.BytesIO()
    sample.image.save(content, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": sample.question}]
    return [{"role": "user", "content": parts}]


# -- clients -----------------------------------------------------------------------------------------------


def ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request and read its stream: status, text, tokens, and seconds to the chunks since it was sent."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    begin = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        response.read()
        connection.close()
        return {"status": response.status, "text": "", "tokens": 0, "chunks": []}
    text, chunks, tokens = [], [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        piece = event["choices"][0]["delta"].get("content") if event.get("choices") else ""
        if piece:
            text.append(piece)
            chunks.append(time.perf_counter() - begin)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    connection.close()
    status = 200 if tokens else 599
    return {"status": status, "text": "".join(text), "tokens": tokens, "chunks": chunks}


def client_process() -> None:
    """Serve one order per line of standard input: port, bodies, clients, and the times at which they are sent."""
    for line in sys.stdin:
        order = json.loads(line)
        begin, ats = time.perf_counter(), order["at"]

        def one(number: int, order: Any = order, begin: float = begin, ats: Any = ats) -> dict[str, Any]:
            if ats is not None:
                time.sleep(max(begin + ats[number] - time.perf_counter(), 0))
            return ask(order["port"], order["bodies"][number])

        with ThreadPoolExecutor(order["clients"]) as pool:
            answers = list(pool.map(one, range(len(order["bodies"]))))
        print(json.dumps({"answers": answers, "seconds": time.perf_counter() - begin}), flush=True)


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.serve_load", "--client"]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, port: int, bodies: Sequence[Any], clients: int, at: Sequence[float] | None = None) -> dict[str, Any]:
        """Answers in order, and the seconds for all."""
        order = {"port": port, "bodies": list(bodies), "clients": clients, "at": at}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answers: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answers

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Serving:
    """A running server: its port, and the thread of its event loop."""

    port: int
    loop: threading.Thread

    @property
    def loop_seconds(self) -> float:
        """Processor time of the event loop so far."""
        assert self.loop.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.loop.ident))


# -- the ways to serve -------------------------------------------------------------------------------------


@contextmanager
def serving(vlm: VLM, rows: int, queue: int = 1000) -> Iterator[Serving]:
    """A server of a loaded pair in a thread."""
    from saccade.serve.app import make_app
    from saccade.serve.configuration import Limits, ModelEntry, ServerConfig
    from saccade.serve.server import Server, bind

    limits = Limits(max_rows=rows, max_queue=queue, batches=1, kv_memory_mib=1024)
    config = ServerConfig((ModelEntry("pocket"),), port=0, limits=limits)
    listening = bind(config)
    server = Server(config, make_app(config, [vlm]))
    server.handle_exit = lambda *_: None  # type: ignore[method-assign]
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Serving(listening.getsockname()[1], thread)
    finally:
        server.should_exit = True
        thread.join()


def bare(vlm: VLM, conversations: Sequence[Any], at_a_time: int, tokens: int) -> int:
    """Answer conversations by the batch alone, so many at a time; return the number of tokens."""
    left, count = list(conversations), 0
    running: list[Any] = []
    with vlm.batch(max(CLIENTS)) as batch:
        while left or running:
            while left and len(running) < at_a_time:
                running.append(batch.add(left.pop(0), max_new_tokens=tokens))
            for _, chunk in batch.step():
                count += len(chunk.tokens)
            running = [ticket for ticket in running if not ticket.done]
    return count


def stock(vlm: VLM, model: Any, conversations: Sequence[Any], tokens: int) -> int:
    """Answer conversations by Hugging Face's `generate`, one after the other; return the number of tokens."""
    count = 0
    for messages in conversations:
        inputs = pocket_pair.stock_inputs(model, [vlm.processor.prompt(messages)])
        answer = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        count += answer.shape[1] - inputs["input_ids"].shape[1]
    return count


def full(vlm: VLM, model: Any, options: argparse.Namespace, clients: Clients) -> dict[str, Any]:
    """Tokens per second of every way, and the server's cost per token over the bare batch's."""
    conversations = [conversation(number) for number in range(options.requests)]
    clock, tokens = CLOCKS[options.clock], options.new_tokens
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    in_loop = in_all = 0.0

    def add(name: str, work: Callable[[], int]) -> None:
        begin = clock()
        made = work()
        seconds[name] = seconds.get(name, 0.0) + clock() - begin
        counts[name] = counts.get(name, 0) + made

    def served(port: int, part: Sequence[Any], at_a_time: int) -> int:
        bodies = [{"messages": messages, "max_tokens": tokens, "temperature": 0} for messages in part]
        answers = clients.run(port, bodies, at_a_time)["answers"]
        assert all(answer["status"] == 200 for answer in answers)
        return sum(answer["tokens"] for answer in answers)

    warm = [conversation(number) for number in range(options.requests, options.requests + 2)]
    bare(vlm, warm, 1, 8)
    for start in range(0, len(conversations), PART):
        part = conversations[start : start + PART]
        add("generate", lambda part=part: stock(vlm, model, part, tokens))
        for number in options.clients:
            add(f"batch {number}", lambda part=part, n=number: bare(vlm, part, n, tokens))
            for name, waiting in ((f"server {number}", 0), (f"server {number}+{number}", number)):
                # Anew, or its caches would know the pictures; with requests in the queue, rows never wait for clients.
                with serving(vlm, number if waiting else max(CLIENTS)) as server:
                    port, at_a_time = server.port, number + waiting
                    served(port, warm, 1)
                    loop, whole = server.loop_seconds, time.process_time()
                    add(name, lambda port=port, part=part, n=at_a_time: served(port, part, n))
                    in_loop += server.loop_seconds - loop
                    in_all += time.process_time() - whole
    speed = {name: counts[name] / seconds[name] for name in counts}
    print(f"{'at a time':12}{'tokens/s':>10}{'x generate':>12}   ({options.clock} time)")
    for name, value in speed.items():
        print(f"{name:12}{value:10.1f}{value / speed['generate']:12.2f}")
    ways = [name for name in speed if name.startswith("server")]
    over = {name: speed["batch " + name.split()[1].partition("+")[0]] / speed[name] - 1 for name in ways}
    print("cost per token over the batch:", ", ".join(f"{n} {100 * v:+.1f} %" for n, v in over.items()))
    print(f"event loop: {100 * in_loop / in_all:.1f} % of the server's processor time")
    return {"tokens_per_second": speed, "overhead": over, "event_loop": in_loop / in_all}


def arrivals(vlm: VLM, options: argparse.Namespace, clients: Clients) -> dict[str, Any]:
    """Throughput and latency at several loads, with all rows and with one."""
    bodies = _bodies(options)
    found: dict[str, Any] = {}
    with serving(vlm, 1) as server:
        rate = len(bodies) / clients.run(server.port, bodies, 1)["seconds"]
    print(f"\none after the other: {rate:.2f} requests/s")
    print(f"{'load':>5} {'':20}{'tokens/s':>10}{'TTFT p50':>10}{'p95':>8}{'ITL p50':>9}{'whole p50':>11}")
    for load_ in LOADS:
        rng, at, ats = random.Random(3), 0.0, list[float]()
        for _ in bodies:
            at += rng.expovariate(load_ * rate)
            ats.append(at)
        for name, rows in (("server", options.rows), ("one after the other", 1)):
            with serving(vlm, rows) as server:
                run = clients.run(server.port, bodies, len(bodies), ats)
            answers = run["answers"]
            if lost := [a for a in answers if not a["chunks"]]:
                raise SystemExit(f"{len(lost)} requests were not answered; the first: {lost[0]}")
            first = [a["chunks"][0] for a in answers]
            gaps = [b - a for each in answers for a, b in zip(each["chunks"], each["chunks"][1:], strict=False)]
            row = {
                "tokens_per_second": sum(a["tokens"] for a in answers) / run["seconds"],
                "first": (median(first), quantiles(first, n=20)[-1]),
                "between_chunks": median(gaps),
                "whole": median(a["chunks"][-1] for a in answers),
            }
            found[f"{load_} {name}"] = row
            print(
                f"{load_:5} {name:20}{row['tokens_per_second']:10.1f}{row['first'][0]:10.3f}{row['first'][1]:8.3f}"
                f"{row['between_chunks']:9.3f}{row['whole']:11.3f}",
                flush=True,
            )
    return found


def overload(vlm: VLM, options: argparse.Namespace, clients: Clients) -> dict[str, Any]:
    """Four times the load that one request after the other serves, and a short queue."""
    bodies = _bodies(options)
    expected = [vlm.generate(b["messages"], max_new_tokens=options.new_tokens).text for b in bodies]
    with serving(vlm, 1) as server:
        rate = 4 * len(bodies) / clients.run(server.port, bodies, 1)["seconds"]
    served = refused = wrong = 0
    memory: list[int] = []
    with serving(vlm, options.rows, queue=8) as server:
        end, rng = time.perf_counter() + options.seconds, random.Random(5)
        while time.perf_counter() < end:
            order = [rng.randrange(len(bodies)) for _ in range(max(int(rate * 10), 8))]
            ats = sorted(rng.uniform(0, len(order) / rate) for _ in order)
            answers = clients.run(server.port, [bodies[i] for i in order], len(order), ats)["answers"]
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
            for number, answer in zip(order, answers, strict=True):
                served += answer["status"] == 200
                refused += answer["status"] == 503
                wrong += answer["status"] == 200 and answer["text"] != expected[number]
                if answer["status"] not in (200, 503):
                    raise SystemExit(f"A request was lost: {answer}")
    print(
        f"\noverload: {served} answered, {refused} refused with 503, {wrong} wrong; memory "
        f"{memory[0] / 2**20:.0f} MiB after the first round of {len(memory)}, {memory[-1] / 2**20:.0f} MiB at the end"
    )
    return {"served": served, "refused": refused, "wrong": wrong, "memory": memory}


def _bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"messages": conversation(number), "max_tokens": options.new_tokens, "temperature": 0}
        for number in range(options.requests)
    ]


def main() -> None:
    parser = pocket_pair.parser(__doc__)
    pocket_pair.add_batch_options(parser, ("full", "arrivals", "overload"))
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="requests at a time")
    parser.add_argument("--seconds", type=float, default=300, help="of the overload (default: 300)")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client_process()
        return
    pocket_pair.prepare(options)
    vlm = pocket_pair.load_pair(options)
    measured: dict[str, Any] = {}
    clients = Clients()
    try:
        if options.only in (None, "full"):
            model = load(options.target, options.target_dtype, options.device)
            measured["full"] = full(vlm, model, options, clients)
        if options.only in (None, "arrivals"):
            measured["arrivals"] = arrivals(vlm, options, clients)
        if options.only in (None, "overload"):
            measured["overload"] = overload(vlm, options, clients)
    finally:
        clients.close()
    pocket_pair.write_json(options.json, measured)


if __name__ == "__main__":
    main()
