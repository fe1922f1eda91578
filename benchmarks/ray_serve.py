"""Replicas on Ray Serve: answers, follow-up questions that find their caches, and a replica that is killed.

    unshare --net sh -c 'ip link set lo up && python -m benchmarks.ray_serve'

The client is the openai package, the model the built-in draft model. The first part asks follow-up questions about
pictures, at random replicas and with affinity, and counts those that came to the replica of the turn before. The second
part kills a replica (SIGKILL) under several streams. The third replaces all replicas (SIGHUP) under several streams and
questions. Exit code 1: an answer was wrong, a stream ended without an error
and without its end, an update lost something, or less than the aim was reached.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import openai

from benchmarks.pocket_pair import data_uri
from benchmarks.ray_jobs import SACCADE, named_below, parser, picture

PORT = 8731
AIM = 0.8
"""Share of follow-up questions that must come to the replica of the turn before."""


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[tuple[openai.OpenAI, int]]:
    """A client of two replicas, and the process of the command."""
    words = [*SACCADE, "serve", "-t", options.target, "--ray", "--replicas", "2", "--name", "m", "--port", str(PORT)]
    words += ["--max-rows", str(options.rows), "--threads", "1"]
    process = subprocess.Popen(words)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=300)
    try:
        while len(replicas_in(client)) < 2:
            if process.poll() is not None:
                raise SystemExit("The server has ended.")
            time.sleep(0.5)
        yield client, process.pid
    finally:
        process.terminate()
        if process.wait(120):
            raise SystemExit(f"The server ended with {process.returncode}.")


def replicas_in(client: openai.OpenAI) -> list[str]:
    """Replicas that answer the collection of metrics."""
    try:
        text = client.get("/../metrics", cast_to=str)
    except openai.APIError:
        return []
    return [line.split('"')[1] for line in text.splitlines() if line.startswith("saccade:engine_steps_total{")]


def question(number: int, text: str) -> dict[str, Any]:
    """A message with a picture of its own."""
    shown = {"type": "image_url", "image_url": {"url": data_uri(picture(number))}}
    return {"role": "user", "content": [shown, {"type": "text", "text": text}]}


# -- follow-up questions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One answered turn of a conversation."""

    replica: str
    prompt_tokens: int
    cached_tokens: int
    text: str


def converse(client: openai.OpenAI, number: int, turns: int, at_random: bool) -> list[Turn]:
    """Several questions about a picture, one after the other."""
    rng = random.Random(number)
    messages: list[Any] = []
    answered = []
    for turn in range(turns):
        text = f"What is in the corner number {turn}?"
        messages.append({"role": "user", "content": text} if turn else question(number, text))
        headers = {"x-saccade-affinity": str(rng.random())} if at_random else {}
        response = client.chat.completions.with_raw_response.create(
            model="m", messages=messages, max_tokens=8, temperature=0, extra_headers=headers
        )
        answer = response.parse()
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        usage: Any = answer.usage
        name, cached = response.headers["x-saccade-replica"], usage.prompt_tokens_details.cached_tokens
        answered.append(Turn(name, usage.prompt_tokens, cached, messages[-1]["content"]))
    return answered


def follow_up(
    client: openai.OpenAI, options: argparse.Namespace, numbers: Sequence[int], at_random: bool
) -> tuple[dict[str, float], list[list[str]]]:
    """Shares of follow-up questions at the replica of the turn before, and of their prompts that were cached."""
    with ThreadPoolExecutor(options.clients) as pool:
        work = [pool.submit(converse, client, number, options.turns, at_random) for number in numbers]
        conversations = [each.result() for each in work]
    pairs = [pair for turns in conversations for pair in pairwise(turns)]
    later = [turn for turns in conversations for turn in turns[1:]]
    shares = {
        "same replica": sum(a.replica == b.replica for a, b in pairs) / len(pairs),
        "cached tokens": sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later),
        "replicas": len({turn.replica for turns in conversations for turn in turns}),
    }
    return shares, [[turn.text for turn in turns] for turns in conversations]


# -- a killed replica --------------------------------------------------------------------------------------


@dataclass
class Stream:
    """A streamed answer as its client saw it: its end is ``whole``, ``error`` or ``cut``."""

    text: str = ""
    tokens: int = 0
    end: str = "cut"
    error: str = ""


def stream(client: openai.OpenAI, number: int, tokens: int, answer: Stream) -> None:
    """Read one answer."""
    messages: list[Any] = [question(number, "Describe it.")]
    sampling: dict[str, Any] = {"temperature": 0, "extra_body": {"min_tokens": tokens}}
    try:
        chunks = client.chat.completions.create(
            model="m", messages=messages, max_tokens=tokens, stream=True, **sampling
        )
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                answer.text += chunk.choices[0].delta.content
                answer.tokens += 1
            if chunk.choices and chunk.choices[0].finish_reason:
                answer.end = "whole"
    except openai.APIError as problem:
        answer.end, answer.error = "error", problem.message


def replicas_of(process: int) -> list[int]:
    """Processes of the replicas, the oldest first."""
    return named_below(process, "ray::ServeReplica:saccade:Replica")


def begin_streams(
    client: openai.OpenAI, options: argparse.Namespace
) -> tuple[list[Stream], list[Stream], list[threading.Thread]]:
    """Answers one after the other, and the same ones at once by threads, half of which have begun."""
    expected, answers = [Stream() for _ in range(options.streams)], [Stream() for _ in range(options.streams)]
    for number, each in enumerate(expected):
        stream(client, number, options.tokens, each)
    threads = [
        threading.Thread(target=stream, args=(client, number, options.tokens, each))
        for number, each in enumerate(answers)
    ]
    for thread in threads:
        thread.start()
    while sum(each.tokens > 0 for each in answers) < options.streams // 2:
        time.sleep(0.01)
    return expected, answers, threads


def whole_and_equal(answers: list[Stream], expected: list[Stream]) -> int:
    """Number of answers that reached their end and are as before."""
    return sum(each.end == "whole" and each.text == e.text for each, e in zip(answers, expected, strict=True))


def kill_under_streams(client: openai.OpenAI, process: int, options: argparse.Namespace) -> dict[str, Any]:
    """Kill a replica once half of the streams have begun; the ends of all, and the times of recovery."""
    expected, answers, threads = begin_streams(client, options)
    victim, begun = replicas_of(process)[0], sum(each.tokens > 0 for each in answers)
    os.kill(victim, signal.SIGKILL)
    killed = time.perf_counter()
    stream(client, 10_000, 1, Stream())
    answered = time.perf_counter() - killed
    for thread in threads:
        thread.join()
    while victim in replicas_of(process) or len(replicas_in(client)) != 2:
        time.sleep(0.2)
    return {
        "whole and equal to before": whole_and_equal(answers, expected),
        "ended by an error event": sum(each.end == "error" for each in answers),
        "of these without output": sum(each.end == "error" and not each.tokens for each in answers),
        "cut without an error": sum(each.end == "cut" for each in answers),
        "with output at the kill": begun,
        "error": next((each.error for each in answers if each.error), ""),
        "seconds to the next answer": round(answered, 2),
        "seconds to two replicas": round(time.perf_counter() - killed, 1),
    }


# -- a rolling update --------------------------------------------------------------------------------------


def update_under_streams(client: openai.OpenAI, process: int, options: argparse.Namespace) -> dict[str, Any]:
    """Replace all replicas once half of the streams have begun, and ask questions until that is done."""
    expected, answers, threads = begin_streams(client, options)
    old, questions = set(replicas_of(process)), list[Stream]()
    os.kill(process, signal.SIGHUP)
    begin = time.perf_counter()
    while old & set(replicas_of(process)) or len(replicas_of(process)) < len(old):
        questions.append(Stream())
        stream(client, 20_000, 4, questions[-1])
        if time.perf_counter() - begin > 400:
            raise SystemExit("The replicas were not replaced within 400 seconds.")
    seconds = time.perf_counter() - begin
    for thread in threads:
        thread.join()
    return {
        "streams whole and equal to before": whole_and_equal(answers, expected),
        "questions meanwhile": len(questions),
        "of these answered": sum(each.end == "whole" for each in questions),
        "error": next((each.error for each in [*answers, *questions] if each.error), ""),
        "seconds to new replicas": round(seconds, 1),
    }


def main() -> None:
    trial = parser(__doc__)
    trial.add_argument("--rows", type=int, default=2)
    trial.add_argument("--conversations", type=int, default=24)
    trial.add_argument("--turns", type=int, default=4)
    trial.add_argument("--clients", type=int, default=2, help="conversations at once")
    trial.add_argument("--streams", type=int, default=8)
    trial.add_argument("--tokens", type=int, default=100, help="of every stream")
    options = trial.parse_args()
    count = options.conversations
    begin = time.perf_counter()
    with serving(options) as (client, process):
        print(f"two replicas {time.perf_counter() - begin:.0f} s after the start", flush=True)
        chance, _ = follow_up(client, options, range(count, 2 * count), at_random=True)
        print(f"at random: {chance}", flush=True)
        shares, texts = follow_up(client, options, range(count), at_random=False)
        print(f"affinity: {shares}", flush=True)
        _, again = follow_up(client, options, range(min(4, count)), at_random=True)
        ends = kill_under_streams(client, process, options)
        print("\n".join(f"  {key}: {value}" for key, value in ends.items()), flush=True)
        update = update_under_streams(client, process, options)
        print("rolling update:\n" + "\n".join(f"  {key}: {value}" for key, value in update.items()), flush=True)
    ended = ends["whole and equal to before"] + ends["ended by an error event"]
    lost = ends["of these without output"] or ends["cut without an error"]
    faults = {
        "A stream was lost by a rolling update.": update["streams whole and equal to before"] != options.streams,
        "A question was lost by a rolling update.": update["questions meanwhile"] != update["of these answered"],
        "The answers depend on the replica.": again != texts[:4],
        f"Fewer than {AIM:.0%} of the follow-up questions found their replica.": shares["same replica"] < AIM,
        "Streams were lost that should have been repeated, or ended without a word.": lost,
        "A repeated answer differs.": ended != options.streams,
    }
    if any(faults.values()):
        raise SystemExit(" ".join(sentence for sentence, holds in faults.items() if holds))


if __name__ == "__main__":
    main()
