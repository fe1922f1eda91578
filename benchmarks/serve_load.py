"""The server under load, its clients in a process of their own: what HTTP costs per token over the bare batch.

1, 4 and 8 requests at a time, streamed, with pictures as data URIs, as multiples of the tokens per second of Hugging
Face's `generate` alone in the same run; the bare batch decodes and tokenizes the same messages. "8+8" has 8 more
requests in the queue; without them rows wait for their clients' next requests. With ``--clock cpu`` seconds are
processor time of the server's process, HTTP included, so that other work on the machine changes only the caches.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from typing import Any

from benchmarks import pocket_pair
from benchmarks.clock import CLOCKS
from benchmarks.pocket_pair import load
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
    """Send a request and read its stream: status, tokens (0 if it was not answered), and seconds to the chunks."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    begin = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
    response = connection.getresponse()
    chunks, tokens = [], 0
    for line in response:
        event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        if event.get("choices") and event["choices"][0]["delta"].get("content"):
            chunks.append(time.perf_counter() - begin)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    connection.close()
    return {"status": response.status, "tokens": tokens, "chunks": chunks}


def client_process() -> None:
    """Serve one order per line of standard input: port, bodies and number of clients."""
    for line in sys.stdin:
        order = json.loads(line)
        with ThreadPoolExecutor(order["clients"]) as pool:
            print(json.dumps([a["tokens"] for a in pool.map(partial(ask, order["port"]), order["bodies"])]), flush=True)


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.serve_load", "--client"]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, port: int, bodies: Sequence[Any], clients: int) -> list[int]:
        """Tokens of the answers in order."""
        print(json.dumps({"port": port, "bodies": bodies, "clients": clients}), file=self._process.stdin, flush=True)
        tokens: list[int] = json.loads(self._process.stdout.readline())
        return tokens

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
def serving(vlm: VLM, rows: int) -> Iterator[Serving]:
    """A server of a loaded pair in a thread."""
    from saccade.serve.app import make_app
    from saccade.serve.configuration import Limits, ModelEntry, ServerConfig
    from saccade.serve.server import Server, bind

    limits = Limits(max_rows=rows, max_queue=1000, batches=1, kv_memory_mib=1024)
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
        answered = clients.run(port, bodies, at_a_time)
        assert all(answered)
        return sum(answered)

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


def main() -> None:
    parser = pocket_pair.parser(__doc__)
    pocket_pair.add_batch_options(parser, ("full",))
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="requests at a time")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client_process()
        return
    pocket_pair.prepare(options)
    vlm = pocket_pair.load_pair(options)
    clients = Clients()
    try:
        measured = full(vlm, load(options.target, options.target_dtype, options.device), options, clients)
    finally:
        clients.close()
    pocket_pair.write_json(options.json, measured)


if __name__ == "__main__":
    main()
