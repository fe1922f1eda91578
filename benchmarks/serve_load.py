"""The server under load, its clients in a process of their own: what HTTP costs per token over the bare batch.

1, 4 and 8 requests at a time, streamed, with pictures as data URIs, as multiples of the tokens per second of Hugging
Face's `generate` alone in the same run; the bare batch decodes and tokenizes the same messages. "8+8" has 8 more
requests in the queue; without them rows wait for their clients' next requests. With ``--clock cpu`` seconds are
processor time of the server's process, HTTP included, so that other work on the machine changes only the caches.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from typing import Any

import openai

from benchmarks import pocket_pair
from benchmarks.pocket_pair import CLOCKS, MIXED_TASKS, load
from saccade import VLM
from saccade.serve.app import make_app
from saccade.serve.configuration import Limits, ModelEntry, ServerConfig
from saccade.serve.server import Server, bind

CLIENTS = (1, 4, 8)
PART = 16
"""Requests per turn of the ways that are compared, so that the machine's moods fall on all."""


def conversation(number: int) -> list[dict[str, Any]]:
    """A question about a fresh picture, in OpenAI's form."""
    (sample,) = pocket_pair.samples([number], tasks=MIXED_TASKS)
    picture = {"type": "image_url", "image_url": {"url": pocket_pair.data_uri(sample.image)}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": sample.question}]}]


def stream(client: openai.OpenAI, tokens: int, messages: list[Any]) -> int:
    """Read a streamed answer; return its number of tokens."""
    answer = client.chat.completions.create(
        model="pocket",
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    return sum(event.usage.completion_tokens for event in answer if event.usage)


def clients(port: int, conversations: Sequence[Any], at_a_time: int, tokens: int) -> int:
    """Ask a server for answers, so many at a time, in the process of the clients; return the number of tokens."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    with ThreadPoolExecutor(at_a_time) as pool:
        return sum(pool.map(partial(stream, client, tokens), conversations))


@contextmanager
def serving(vlm: VLM, rows: int) -> Iterator[tuple[int, int]]:
    """A server of a loaded pair in a thread: its port, and the clock of its event loop's processor time."""
    limits = Limits(max_rows=rows, max_queue=1000, batches=1, kv_memory_mib=1024)
    config = ServerConfig((ModelEntry("pocket"),), port=0, limits=limits)
    listening = bind(config)
    server = Server(config, make_app(config, [vlm]))
    server.handle_exit = lambda *_: None  # type: ignore[method-assign]
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    assert thread.ident is not None
    try:
        yield listening.getsockname()[1], time.pthread_getcpuclockid(thread.ident)
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


def measure(vlm: VLM, model: Any, options: argparse.Namespace, asking: Executor) -> dict[str, Any]:
    """Tokens per second of every way, and the server's cost per token over the bare batch's."""
    numbers, tokens = range(options.requests + 2), options.new_tokens
    *conversations, last, second_last = map(conversation, numbers)
    warm = [last, second_last]
    clock = CLOCKS[options.clock]
    seconds, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    in_loop = in_all = 0.0

    def add(name: str, work: Callable[..., int], *arguments: Any) -> None:
        begin = clock()
        counts[name] += work(*arguments, tokens)
        seconds[name] += clock() - begin

    def served(*order: Any) -> int:
        return asking.submit(clients, *order).result()

    bare(vlm, warm, 1, 8)
    for start in range(0, len(conversations), PART):
        part = conversations[start : start + PART]
        add("generate", stock, vlm, model, part)
        for number in options.clients:
            add(f"batch {number}", bare, vlm, part, number)
            for name, waiting in ((f"server {number}", 0), (f"server {number}+{number}", number)):
                # A new one, or its caches would know the pictures; with a queue, rows never wait for clients.
                with serving(vlm, number if waiting else max(CLIENTS)) as (port, loop_clock):
                    served(port, warm, 1, tokens)
                    loop, whole = time.clock_gettime(loop_clock), time.process_time()
                    add(name, served, port, part, number + waiting)
                    in_loop += time.clock_gettime(loop_clock) - loop
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
    parser = pocket_pair.batch_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="requests at a time")
    options = pocket_pair.options_of(parser)
    vlm, model = pocket_pair.load_pair(options), load(options.target, options.target_dtype, options.device)
    with ProcessPoolExecutor(1, get_context("spawn")) as asking:
        pocket_pair.write_json(options.json, measure(vlm, model, options, asking))


if __name__ == "__main__":
    main()
