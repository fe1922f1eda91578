"""What two bombs, or two large pictures, at once do to a server's other requests and to its memory.

A server of the pocket pair answers a stream, questions and questions about small pictures, all the time. In turns,
nothing else happens, two requests with a bomb (114 bytes that name 1 x 40,000,000 pixels) come at once, or two with a
picture of 7000 x 7000 pixels. Printed are the seconds to the first token of the questions that were open meanwhile, the
largest gap of the stream, and the greatest memory (proportional set size) of the server with all its processes.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image

from benchmarks.serve_load import ask, conversation

EVENTS = ("nothing", "bombs", "7000 x 7000")


def bomb() -> bytes:
    """A PNG of 1 x 40,000,000 pixels of which 100 bytes are there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 40_000_000, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def large(side: int) -> bytes:
    """A PNG of three ramps."""
    row = np.arange(side, dtype=np.uint16)
    columns, rows = np.broadcast_to(row, (side, side)), np.broadcast_to(row[:, None], (side, side))
    content = io.BytesIO()
    ramps = [(ramp // 28 % 256).astype(np.uint8) for ramp in (columns, rows, columns + rows)]
    Image.fromarray(np.stack(ramps, -1)).save(content, "PNG", compress_level=1)
    return content.getvalue()


def about(picture: bytes) -> dict[str, Any]:
    """A request about a picture."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """Process and port of a server."""
    command = [sys.executable, "-m", "saccade", "serve", "--target", "pocket", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next(match for line in process.stderr if (match := re.search(r"http://127.0.0.1:(\d+)/v1", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process.pid, int(found[1])
    finally:
        process.kill()
        process.wait()


def memory(root: int) -> int:
    """Bytes of a process and its descendants; pages that several share count once."""
    size = 0
    for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            size += process.memory_full_info().pss
    return size


class Neighbours:
    """Requests that go on while others come."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[str, float, float, list[float]]] = []
        """Kind, time of sending, seconds to the first token, and times of all tokens."""
        self._port, self._ends = port, False
        question = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4, "temperature": 0}
        kinds = {"text": lambda _: question, "picture": _small, "stream": lambda _: {**question, "max_tokens": 300}}
        self._threads = [threading.Thread(target=self._ask, args=item) for item in kinds.items()]

    def __enter__(self) -> Neighbours:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        for thread in self._threads:
            thread.join()

    def _ask(self, kind: str, body: Any) -> None:
        number = 0
        while not self._ends:
            number, begin = number + 1, time.perf_counter()
            answer = ask(self._port, body(number))
            if not answer["chunks"]:
                raise SystemExit(f"A neighbour was not answered: {answer}")
            self.seen.append((kind, begin, answer["chunks"][0], [begin + at for at in answer["chunks"]]))
            time.sleep(0.1)

    def firsts(self, kind: str, begin: float, end: float) -> list[float]:
        """Seconds to the first token of requests that waited for it within a time."""
        return [first for each, at, first, _ in self.seen if each == kind and at < end and at + first > begin]

    def gap(self, begin: float, end: float) -> float:
        """Largest gap between tokens of the streams within a time."""
        pairs = [(a, b) for kind, _, _, at in self.seen if kind == "stream" for a, b in pairwise(at)]
        return max((b - a for a, b in pairs if a < end and b > begin), default=0.0)


def _small(number: int) -> dict[str, Any]:
    return {"messages": conversation(number), "max_tokens": 4, "temperature": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn, at least (default: 4)")
    options = parser.parse_args()
    bodies = {"bombs": about(bomb()), "7000 x 7000": about(large(7000))}
    turns: dict[str, list[tuple[float, float]]] = {event: [] for event in EVENTS}
    peaks: dict[str, list[int]] = {event: [] for event in EVENTS}
    took: dict[str, list[tuple[int, float]]] = {event: [] for event in EVENTS}
    with server() as (process, port):
        for number in range(3):
            ask(port, _small(number))

        def send(event: str) -> None:
            begin = time.perf_counter()
            status = ask(port, bodies[event])["status"]
            took[event].append((status, time.perf_counter() - begin))

        with Neighbours(port) as neighbours, ThreadPoolExecutor(2) as pool:
            for _ in range(options.rounds):
                for event in EVENTS:
                    begin, highest = time.perf_counter(), 0
                    sent = [pool.submit(send, event) for _ in range(2 * (event in bodies))]
                    while time.perf_counter() - begin < options.seconds or not all(each.done() for each in sent):
                        highest = max(highest, memory(process))
                        time.sleep(0.1)
                    turns[event].append((begin, time.perf_counter()))
                    peaks[event].append(highest)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'two':12} {'status, seconds':>18} {'text p50':>9} {'max':>6} {'picture p50':>12} {'max':>6} "
        f"{'gap':>6} {'MB':>6}"
    )
    for event in EVENTS:
        row = [f"{event:12}"]
        own = took[event]
        row.append(f"{sorted({status for status, _ in own})} {max((s for _, s in own), default=0):.2f}".rjust(18))
        for kind, width in (("text", 9), ("picture", 12)):
            firsts = [first for begin, end in turns[event] for first in neighbours.firsts(kind, begin, end)]
            row.append(f"{median(firsts):{width}.2f} {max(firsts):6.2f}")
        row.append(f"{max(neighbours.gap(*turn) for turn in turns[event]):6.2f} {max(peaks[event]) / 1e6:6.0f}")
        print(" ".join(row))


if __name__ == "__main__":
    main()
