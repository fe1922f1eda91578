"""Heartbeats between the processes of one run, by which all end soon after one has failed, and one says why.

A reduction waits for every process, for ever where one is gone without a trace (a machine without power, a kill behind
NCCL). So every process counts its seconds in the rendezvous store, and checks the count of the next process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from saccade.errors import SaccadeError, TrainingError

PERIOD = 1.0
"""Seconds between two counts."""
PATIENCE = 60
"""Checks of an unchanged count until its process is given up; not seconds, since a whole run may be paused."""
HURRY = 5
"""The same, once a connection to some process has broken."""
GRACE = 5.0
"""Seconds that a process has to end by itself after another one has, and the others to hear of the first one's end."""
_ADVICE = "the run can be resumed from its last checkpoint"
_BROKEN = ("gloo", "nccl", "connection", "socket", "tcpstore", "broken pipe", "timed out")
"""Words of errors that may be another process's end."""
_LOST = (RuntimeError, OSError)
"""What the store raises when the first process, which holds it, has ended."""


class EndedTogether(TrainingError):
    """The run was ended by another process, which says why."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code  # its exit code


class _Terminated(BaseException):
    """SIGTERM."""


class Watch:
    """This process's count, and its check of the next process's."""

    def __init__(self, rank: int, count: int, name: str) -> None:
        self._rank, self._count, self._name = rank, count, name
        self.reason: dict[str, Any] | None = None
        self._patience = PATIENCE
        self._left, self._closed = threading.Event(), threading.Event()
        self._leaving, self._calling = threading.Lock(), threading.Lock()  # the store takes one call at a time
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            self._store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        except _LOST as problem:
            raise TrainingError(
                f"The first process cannot be reached at {address[0]}, port {address[1]}; check the addresses and "
                "ports that the processes were started with."
            ) from problem
        self._thread = threading.Thread(target=self._run, name="saccade-watch", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Declare the work finished; from here on nothing interrupts this process."""
        with self._leaving:
            self._left.set()

    def close(self, done: bool) -> None:
        """End the watch."""
        self.leave()
        self._closed.set()
        self._thread.join()
        with suppress(*_LOST):
            self._call("set", self._key("done", self._rank), "1")
            if self._rank == 0 and done:
                self._call("wait", [self._key("done", rank) for rank in range(self._count)])
            elif self._rank == 0:
                threading.Event().wait(2 * PERIOD)

    def report(self, words: str, code: int) -> bool:
        """Tell the other processes why the run ends; returns False if another one has done so before."""
        mine = {"rank": self._rank, "words": words, "code": code}
        self.reason = mine
        with suppress(*_LOST):
            self.reason = json.loads(self._call("compare_set", self._key("reason"), "", json.dumps(mine)))
        return self.reason == mine

    def find(self) -> dict[str, Any] | None:
        """Wait until it is known which process has ended, and return the reason; None if all of them go on."""
        self._patience = HURRY
        waited = threading.Event()
        for _ in range(int((HURRY * PERIOD + 2 * GRACE) / 0.1)):
            if self.reason is not None:
                break
            waited.wait(0.1)
        return self.reason

    def _run(self) -> None:
        last, silent = -1, 0
        while self.reason is None and not self._closed.wait(PERIOD):
            try:
                self._call("add", self._key("count", self._rank), 1)
                if self._call("check", [self._key("reason")]):
                    self.reason = json.loads(self._call("get", self._key("reason")))
                    break
                now = self._call("add", self._key("count", self._next), 0)
                silent = silent + 1 if now == last and not self._call("check", [self._key("done", self._next)]) else 0
                last = now
                if silent >= self._patience:
                    self.report(f"Rank {self._next} of {self._count} has ended or does not answer; {_ADVICE}.", 1)
            except _LOST:
                words = f"Rank 0 of {self._count} has ended; {_ADVICE}."
                self.reason = {"rank": self._rank, "words": words, "code": 1}
        if self.reason is not None:
            self._end(self.reason)

    @property
    def _next(self) -> int:
        return (self._rank + 1) % self._count

    def _end(self, reason: dict[str, Any]) -> None:
        """Interrupt this process's work, and end the process where that has no effect."""
        with self._leaving:
            if self._left.is_set():
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not self._left.wait(GRACE):  # in a reduction that never ends
            if reason["rank"] == self._rank:
                print(f"saccade: {reason['words']}", file=sys.stderr, flush=True)
            os._exit(reason["code"])

    def _key(self, *parts: object) -> str:
        return "/".join(["saccade", self._name, *map(str, parts)])

    def _call(self, method: str, *given: Any) -> Any:
        with self._calling:
            return getattr(self._store, method)(*given)


_opened = 0
_active: Watch | None = None


@contextmanager
def together(rank: int, count: int) -> Iterator[None]:
    """Do some work that all processes do; nothing in a run of one process, nor inside of another such context."""
    global _opened, _active
    if count == 1 or _active is not None:
        yield
        return
    _opened += 1
    start = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    watch = _active = Watch(rank, count, "/".join([*start, str(_opened)]))
    done = False
    with _terminable(watch):
        try:
            yield
            done = True
        except BaseException as problem:
            watch.leave()
            _explain(watch, rank, problem)
            raise
        finally:
            _active = None
            watch.close(done)


def _explain(watch: Watch, rank: int, problem: BaseException) -> None:
    """Raise what this process has to say where it is not the problem itself."""
    if watch.reason is None and isinstance(problem, _LOST) and any(word in str(problem).lower() for word in _BROKEN):
        watch.find()
    if watch.reason is None and watch.report(*_words(problem)):
        if isinstance(problem, _Terminated):
            raise TrainingError(_words(problem)[0]) from None
        return
    assert watch.reason is not None
    if watch.reason["rank"] == rank:
        raise TrainingError(watch.reason["words"]) from None
    raise EndedTogether(watch.reason["words"], watch.reason["code"]) from None


def _words(problem: BaseException) -> tuple[str, int]:
    if isinstance(problem, SaccadeError):
        return str(problem), 2
    if isinstance(problem, KeyboardInterrupt):
        return "Stopped.", 130
    if isinstance(problem, _Terminated):
        return f"The run was told to end (SIGTERM), as when one of its processes has ended; {_ADVICE}.", 2
    return f"{type(problem).__name__}: {problem}", 1


@contextmanager
def _terminable(watch: Watch) -> Iterator[None]:
    """Let SIGTERM end the work like Ctrl-C, so that the end is explained; it is ignored during the explanation."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        if not watch._left.is_set():
            raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
