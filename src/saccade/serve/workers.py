"""Prompts with pictures and films of clients, each made in a process of its own: decoding, resizing, tokenizing.

A fork server with the models' input processors waits beside the engine. For every request it forks a worker, which
makes the prompts and ends. A decoder's crash or hang, or memory without end, is the end of that worker alone, and
none of its work holds the lock of the engine's interpreter.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from saccade.errors import InputError, SaccadeError
from saccade.inputs.families.family import Medium, Prompt
from saccade.inputs.media.decoder import confine
from saccade.inputs.processor import InputProcessor, MediaOptions, RowInput

log = logging.getLogger("saccade.serve")
KEPT = ("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that workers see; others may hold keys."""
SET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
POLITE_SECONDS = 0.25  # age from which a worker has a lower priority than the engine
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from saccade.serve.workers import main; main()"
_MEDIA = "The images and videos of this request"


@dataclass(frozen=True, slots=True)
class MadeInput(RowInput):
    """A row whose prompts workers have made."""

    made: Sequence[tuple[InputProcessor, Prompt]] = ()  # processors with the prompts for them

    def prompt(self, processor: InputProcessor) -> Prompt:
        return next(prompt for each, prompt in self.made if each is processor)


class PromptWorkers:
    """Fork server of workers; any thread may use it."""

    def __init__(self, processors: Sequence[InputProcessor], seconds: float, memory: int) -> None:
        self._processors, self._seconds, self._memory = list(processors), seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def are_possible() -> bool:
        """Whether the system can fork and hand over sockets; Windows cannot."""
        return hasattr(os, "fork") and hasattr(socket, "send_fds")

    def start(self) -> None:
        """Start the fork server, which is ready after some seconds; requests wait for it."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _PROGRAM, *sys.path],
                    stdin=theirs.fileno(),
                    env={name: os.environ[name] for name in KEPT if name in os.environ} | SET,
                    process_group=0,  # a Ctrl-C in the terminal is for the server, which drains
                )
            with self._open() as connection:
                _send(connection, (self._processors, self._seconds, self._memory))

    def close(self) -> None:
        """End the fork server and its workers."""
        if self._process is not None:
            self._control.close()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def row(self, messages: Any, readers: Sequence[InputProcessor], options: MediaOptions) -> MadeInput:
        self.start()
        numbers = [next(i for i, other in enumerate(self._processors) if other is each) for each in readers]
        with self._open() as connection:
            _send(connection, (messages, numbers, options))
            answer = self._receive(connection)
        prompts = [
            Prompt(tuple(each["ids"].tolist()), tuple(Medium(*medium) for medium in each["media"]))
            for each in answer["prompts"]
        ]
        return MadeInput(messages, (), (), options, list(zip(readers, prompts, strict=True)))

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # without a fork server the connection ends at once
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return ours

    def _receive(self, connection: socket.socket) -> dict[str, Any]:
        forked = b""
        with suppress(ConnectionResetError):  # by a fork server that was killed
            forked = connection.recv(1)
        if not forked:
            raise RuntimeError("The fork server that makes prompts of media has failed; its traceback is in the log.")
        began = time.monotonic()
        connection.settimeout(self._seconds + 10)  # the fork server ends the worker before
        content = bytearray()
        with suppress(OSError):
            while piece := connection.recv(1 << 20):
                content += piece
                if len(content) > self._memory:
                    break
        try:
            answer = torch.load(io.BytesIO(content), weights_only=True)
        except Exception:  # of a worker that was killed, the end is missing
            if time.monotonic() - began >= self._seconds:
                raise InputError(
                    f"{_MEDIA} take longer than {self._seconds:g} seconds to prepare; send fewer or smaller ones."
                ) from None
            raise InputError(f"{_MEDIA} cannot be decoded: the decoder has failed; save them again.") from None
        if "refused" in answer:
            raise InputError(answer["refused"])
        if "prompts" not in answer:
            raise RuntimeError("A worker has failed; its traceback is in the log.")
        return dict(answer)


def _send(connection: socket.socket, request: Any) -> None:
    """Send the only message in this direction; where nobody takes it, what comes back says so."""
    with suppress(OSError):
        connection.sendall(pickle.dumps(request))
        connection.shutdown(socket.SHUT_WR)


# -- the fork server and its workers ---------------------------------------------------------------------------


def main() -> None:
    """Fork a worker for every connection that standard input hands over, until its other end is closed."""
    control = socket.socket(fileno=0)
    processors, seconds, memory = pickle.loads(_read(_accept(control)))
    _warm_up(processors)
    workers: dict[int, float] = {}
    while True:
        ready = select.select([control], [], [], POLITE_SECONDS if workers else None)[0]
        _tend(workers, seconds)
        if not ready:
            continue
        connection = _accept(control)
        if connection is None:
            break
        with connection:
            pid = os.fork()
            if not pid:
                _work(connection, control, processors, seconds, memory)
        workers[pid] = time.monotonic()
    _tend(workers, 0)


def _accept(control: socket.socket) -> socket.socket | None:
    data, handles, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=handles[0]) if data else None


def _read(connection: socket.socket | None) -> bytes:
    if connection is None:
        raise SystemExit
    with connection.makefile("rb") as file:
        return file.read()


def _tend(workers: dict[int, float], seconds: float) -> None:
    """Forget the workers that have ended, end those that take too long, and lower the priority of slow ones."""
    for pid, began in list(workers.items()):
        age = time.monotonic() - began
        if age >= seconds:
            os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0 if age >= seconds else os.WNOHANG)[0]
        with suppress(OSError):  # the group ends with the worker but for the decoder of a film
            if ended:
                del workers[pid]
                os.killpg(pid, signal.SIGKILL)
            elif age >= POLITE_SECONDS:
                os.setpriority(os.PRIO_PGRP, pid, 5)


def _warm_up(processors: Sequence[InputProcessor]) -> None:
    """Import what is imported late, once for all workers."""
    Image.init()
    picture = io.BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "PNG")
    for processor in processors:
        for text_as_text in (False, True):
            with suppress(SaccadeError):  # of a model without pictures
                processor.prompt("a", [picture.getvalue()], options=MediaOptions(text_as_text=text_as_text))
    gc.collect()
    gc.freeze()  # collections would copy the pages of inherited objects


def _work(
    connection: socket.socket, control: socket.socket, processors: Sequence[InputProcessor], seconds: float, memory: int
) -> None:
    try:
        os.setpgid(0, 0)
        control.close()
        connection.sendall(b"\0")
        request = _read(connection)
        confine(memory, seconds, files=True)
        answer = io.BytesIO()
        torch.save(_answer(processors, *pickle.loads(request)), answer)
        connection.sendall(answer.getbuffer())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(
    processors: Sequence[InputProcessor], messages: Any, numbers: Sequence[int], options: MediaOptions
) -> dict[str, Any]:
    readers = [processors[number] for number in numbers]
    try:
        loaded = readers[0].load_media(messages, options)
        prompts = []
        for reader in readers:
            prompt = reader.prompt(loaded, options=options)
            media = [(m.kind, dict(m.tensors), m.n_tokens, m.digest, m.frame) for m in prompt.media]
            prompts.append({"ids": torch.tensor(prompt.ids), "media": media})
        return {"prompts": prompts}
    except SaccadeError as error:
        return {"refused": str(error)}
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "memory" in str(error):  # torch's own
            return {"refused": f"{_MEDIA} need too much memory to prepare; send fewer or smaller ones."}
        traceback.print_exc()
    except Exception:
        traceback.print_exc()
    return {}
