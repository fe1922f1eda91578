"""Prompts with pictures and films of clients, made in processes of their own: decoding, resizing, tokenizing.

A fork server with the models' input processors waits beside the engine. It forks workers, which make one request's
prompts at a time. A decoder's crash or hang, or memory without end, is the end of that worker alone, and none of its
work holds the lock of the engine's interpreter.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
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
from typing import IO, Any

import torch
from PIL import Image

from saccade.errors import InputError, KilledError, SaccadeError
from saccade.inputs.families.family import Medium, Prompt
from saccade.inputs.media.decoder import confine
from saccade.inputs.processor import InputProcessor, MediaOptions, RowInput
from saccade.serve.refusals import killed

log = logging.getLogger("saccade.serve")
KEPT = ("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that workers see; others may hold keys."""
SET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
POLITE_SECONDS = 0.25  # of one request, after which its worker has a lower priority than the engine
REQUESTS = 32  # that a worker serves, unless one fails or is slow
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from saccade.serve.workers import main; main()"
_MEDIA = "The images and videos of this request"
_TOO_LARGE = f"{_MEDIA} need too much memory to prepare; send fewer or smaller ones."
_WORK, _END = b"\0", b"\1"  # what a connection to the fork server is for: a new worker, or how one has ended
_HEAD = 8  # bytes of a message's length, and of a worker's number


@dataclass(frozen=True, slots=True)
class MadeInput(RowInput):
    """A row whose prompts workers have made."""

    made: Sequence[tuple[InputProcessor, Prompt]] = ()  # processors with the prompts for them

    def prompt(self, processor: InputProcessor) -> Prompt:
        return next(prompt for each, prompt in self.made if each is processor)


@dataclass(slots=True)
class _Worker:
    """A worker and this process's connection to it."""

    connection: socket.socket
    pid: int
    left: int = REQUESTS  # that it may serve
    is_polite: bool = False  # whether it has a lower priority, which it keeps

    def end(self) -> None:
        """End it and the decoder of a film that it has started."""
        self.connection.close()
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)


class PromptWorkers:
    """Fork server of workers; any thread may use it."""

    def __init__(self, processors: Sequence[InputProcessor], seconds: float, memory: int) -> None:
        self._processors, self._seconds, self._memory = list(processors), seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: list[_Worker] = []

    @staticmethod
    def are_possible() -> bool:
        """Whether the system can fork and hand over sockets; Windows cannot."""
        return hasattr(os, "fork") and hasattr(socket, "send_fds")

    def start(self) -> None:
        """Start the fork server, which is ready after some seconds; requests wait for it."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._forget()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _PROGRAM, *sys.path],
                    stdin=theirs.fileno(),
                    env={name: os.environ[name] for name in KEPT if name in os.environ} | SET,
                    process_group=0,  # a Ctrl-C in the terminal is for the server, which drains
                )
            connection = self._open()
            with connection, suppress(OSError):
                connection.sendall(_framed(pickle.dumps((self._processors, self._seconds, self._memory))))

    def close(self) -> None:
        """End the fork server and its workers."""
        self._forget()
        if self._process is not None:
            self._control.close()
            try:
                self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _forget(self) -> None:
        while self._idle:
            self._idle.pop().connection.close()  # which ends it

    def row(self, messages: Any, readers: Sequence[InputProcessor], options: MediaOptions) -> MadeInput:
        self.start()
        numbers = [next(i for i, other in enumerate(self._processors) if other is each) for each in readers]
        request = _framed(pickle.dumps((messages, numbers, options)))
        worker = self._take()
        try:
            content = self._ask(worker, request)
            if content is None and worker.left < REQUESTS:  # it may have ended by what others sent before
                worker.end()
                worker = self._new()
                content = self._ask(worker, request)
            if content is None:
                raise self._failure(worker)
            answer = _read_answer(content)
        except BaseException:
            worker.end()
            raise
        worker.left -= 1
        if worker.left and not worker.is_polite:
            self._idle.append(worker)
        else:
            worker.connection.close()
        prompts = [
            Prompt(tuple(each["ids"].tolist()), tuple(Medium(*medium) for medium in each["media"]))
            for each in answer["prompts"]
        ]
        return MadeInput(messages, options=options, made=list(zip(readers, prompts, strict=True)))

    def _take(self) -> _Worker:
        with suppress(IndexError):
            return self._idle.pop()
        return self._new()

    def _new(self) -> _Worker:
        connection, pid = self._open(), b""
        with suppress(ConnectionResetError):  # by a fork server that was killed
            pid = connection.recv(_HEAD)
        if not pid:
            raise RuntimeError("The fork server that makes prompts of media has failed; its traceback is in the log.")
        return _Worker(connection, int.from_bytes(pid))

    def _open(self, purpose: bytes = _WORK) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # without a fork server the connection ends at once
            socket.send_fds(self._control, [purpose], [theirs.fileno()])
        return ours

    def _failure(self, worker: _Worker) -> Exception:
        """What the end of a worker means; a picture is not to blame for a kill."""
        status = b""
        with self._open(_END) as connection, suppress(OSError):
            connection.sendall(worker.pid.to_bytes(_HEAD))
            status = connection.recv(_HEAD)
        if not status:
            return RuntimeError("The fork server that makes prompts of media has ended.")
        if os.waitstatus_to_exitcode(int.from_bytes(status)) == -signal.SIGKILL:
            return killed()
        return InputError(f"{_MEDIA} cannot be decoded: the decoder has failed; save them again.")

    def _ask(self, worker: _Worker, request: bytes) -> bytearray | None:
        """Send a request to a worker and return what it answers; None where it ends before."""
        began, content = time.monotonic(), bytearray()
        worker.connection.settimeout(self._seconds)
        with suppress(OSError):  # a worker that has ended
            worker.connection.sendall(request)
        while len(content) < _HEAD or len(content) < _HEAD + int.from_bytes(content[:_HEAD]):
            allowed = self._seconds if worker.is_polite else POLITE_SECONDS
            wait = began + allowed - time.monotonic()
            worker.connection.settimeout(max(wait, 0.001))
            try:
                piece = worker.connection.recv(1 << 20)
            except TimeoutError:
                if worker.is_polite:
                    raise InputError(
                        f"{_MEDIA} take longer than {self._seconds:g} seconds to prepare; send fewer or smaller ones."
                    ) from None
                worker.is_polite = True
                with suppress(OSError):
                    os.setpriority(os.PRIO_PGRP, worker.pid, 5)
                continue
            except OSError:
                piece = b""
            content += piece
            if not piece:
                return None
            if len(content) > self._memory:
                raise InputError(_TOO_LARGE)
        del content[:_HEAD]
        return content


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(_HEAD) + content


def _read_answer(content: bytearray) -> dict[str, Any]:
    answer = dict(torch.load(io.BytesIO(content), weights_only=True))
    if "refused" in answer:
        raise InputError(answer["refused"])
    if "killed" in answer:
        raise killed()
    if "prompts" not in answer:
        raise RuntimeError("A worker has failed; its traceback is in the log.")
    return answer


# -- the fork server and its workers ---------------------------------------------------------------------------


def main() -> None:
    """Fork a worker for every connection that standard input hands over, until its other end is closed."""
    control = socket.socket(fileno=0)
    accepted = _accept(control)
    if accepted is None:
        return
    with accepted[1].makefile("rb") as file:
        processors, seconds, memory = pickle.loads(_message(file) or b"")
    _warm_up(processors)
    workers, failed = set[int](), dict[int, int]()  # those that may run, and how others ended
    while (accepted := _accept(control)) is not None:
        for pid in [*workers]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                workers.remove(pid)
            if status:
                failed[pid] = status
        purpose, connection = accepted
        with connection:
            if purpose == _END:
                pid = int.from_bytes(connection.recv(_HEAD))
                status = failed.pop(pid, 0) if pid not in workers else _end(pid)
                workers.discard(pid)
                connection.sendall(status.to_bytes(_HEAD))
                continue
            pid = os.fork()
            if not pid:
                _work(connection, control, processors, seconds, memory)
        workers.add(pid)
    for pid in workers:
        _end(pid)
    os._exit(0)  # tearing down torch takes a second


def _end(pid: int) -> int:
    """End a worker and return how it ended; one that is ending already keeps its own reason."""
    for end in (os.killpg, os.kill):  # before it leads a group, too
        with suppress(OSError):
            end(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _accept(control: socket.socket) -> tuple[bytes, socket.socket] | None:
    purpose, handles, _, _ = socket.recv_fds(control, 1, 1)
    return (purpose, socket.socket(fileno=handles[0])) if purpose else None


def _message(file: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    head = file.read(_HEAD)
    return file.read(int.from_bytes(head)) if head else None


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
        connection.sendall(os.getpid().to_bytes(_HEAD))
        confine(memory, seconds, files=True)
        with connection.makefile("rb") as requests:
            while (request := _message(requests)) is not None:
                answer = io.BytesIO()
                torch.save(_answer(processors, *pickle.loads(request)), answer)
                connection.sendall(answer.tell().to_bytes(_HEAD))
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
    except KilledError:
        return {"killed": True}
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):  # torch's
            return {"refused": _TOO_LARGE}
        traceback.print_exc()
        return {}
