"""Decoding of a video in a process of its own, with limited memory and time.

In this process, a fault of a decoder would end all requests, its memory could not be limited, and a frame that takes
long could not be interrupted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from saccade.inputs.media import decoder
from saccade.inputs.media.bounds import MediaLimits
from saccade.inputs.media.decoder import Refused, accepted_container, receive, send


class DecoderProcess:
    """A `decoder.Decoder` in a process of its own, which ends with it."""

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        accepted_container(data, limits)
        self._limits = limits
        self._is_late = False
        # Nothing of this process's environment is needed but where libraries lie; it may hold keys.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", decoder.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        )
        self._watchdog = threading.Timer(limits.decode_seconds, self._stop_late)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._send({"path": sys.path, "limits": asdict(limits)}, data)

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    def probe(self) -> tuple[int, float | None, int]:
        """As of `Decoder.probe`."""
        with _as_damaged():
            (total, fps, pixels), _ = self._receive(0)
            return int(total), None if fps is None else float(fps), int(pixels)

    def scan(self, wanted: Collection[int]) -> Iterator[tuple[int, Any]]:
        """As of `Decoder.scan`."""
        self._send(sorted(wanted))
        while True:
            with _as_damaged():
                message, content = self._receive(3 * self._limits.video_pixels)
                is_last = "count" in message
                number = int(message["count" if is_last else "number"])
                frame = None if is_last else np.frombuffer(content, np.uint8).reshape(message["shape"])
            yield number, frame
            if is_last:
                return

    def _send(self, message: Any, content: bytes = b"") -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer says why it ended
            send(self._process.stdin, message, content)

    def _receive(self, most: int) -> tuple[Any, bytes]:
        assert self._process.stdout is not None
        try:
            message, content = receive(self._process.stdout, most)
        except (EOFError, ValueError):
            raise Refused("time" if self._is_late else "film") from None
        if isinstance(message, dict) and "refused" in message:
            raise Refused(message["refused"])
        return message, content

    def _stop_late(self) -> None:
        self._is_late = True
        self._process.kill()


@contextmanager
def _as_damaged() -> Iterator[None]:
    """Answers of another form than the program's, which a decoder that was taken over may give, count as damage."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("film") from None
