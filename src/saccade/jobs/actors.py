"""Actors on Ray that answer what is pending, one engine each; what a lost actor had not answered goes to another one.

Actors stream their answers to the process of the command, which alone writes the journal. So a kill of either side
loses nothing that has an answer, and an item is answered once, whoever did it.
"""

from __future__ import annotations

import os
import queue
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from saccade.errors import SaccadeError
from saccade.jobs.job import sentence_of
from saccade.model_spec import ModelSpec
from saccade.ray_cluster import Places, limit_threads
from saccade.resumable import Finished, Pending, Worker
from saccade.vlm import VLM, check
from saccade.wording import differences, shortened

HOPELESS = 4
"""Lost actors after which an item is given up."""
_DEAD = "The actor is dead because "
_LOST_IN_A_ROW = 6  # actors that may be lost without an answer in between, per actor of the job, before it ends


@dataclass(frozen=True)
class ActorModels:
    """Models and method that every actor loads by itself."""

    spec: ModelSpec  # folders must exist on every machine
    folder: str = field(default_factory=os.getcwd)  # to which paths are relative

    def load(self) -> VLM:
        try:
            os.chdir(self.folder)
        except OSError as problem:
            raise SaccadeError(
                f"A machine of the cluster lacks the folder {self.folder} ({problem.strerror}); start in a folder that "
                "all machines share."
            ) from None
        vlm = check(self.spec)()
        limit_threads(vlm, self.spec.threads)
        return vlm


@dataclass(frozen=True)
class Hello:
    """First message of an actor: its models are loaded."""

    facts: dict[str, Any]  # groups of facts about them
    machine: str  # name for messages


class EngineActor:
    """Actor: models, a worker with them, and the queue of what it answers."""

    def __init__(self, models: ActorModels, make: Callable[..., Worker], arguments: tuple[Any, ...]) -> None:
        self._models, self._make, self._arguments = models, make, arguments
        self._messages = queue.SimpleQueue[Any]()

    def put(self, message: Any) -> None:
        """Take what `Worker.begin` gets, and lists of what is pending from then on."""
        self._messages.put(message)

    def answers(self) -> Iterator[Any]:
        """Yield `Hello` and then answers; a sentence instead where it cannot work."""

        def pending() -> Iterator[Pending]:
            while True:
                yield from self._messages.get()

        try:
            worker = self._make(self._models.load(), *self._arguments)
            yield Hello(worker.facts, os.uname().nodename)
            worker.begin(self._messages.get())
            yield from worker.answers(pending())
        except SaccadeError as problem:
            yield sentence_of(problem)


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor as the command sees it."""

    handle: Any
    stream: Any  # of its messages
    pending: dict[int, Pending] = field(default_factory=dict)  # what it has not answered, by number
    is_ready: bool = False  # whether its models are loaded


class Actors:
    """Actors of a run; a `saccade.resumable.Worker`."""

    def __init__(self, ray: Any, make: Callable[[], Any], count: int, ahead: int) -> None:
        self._ray, self._make, self._ahead = ray, make, ahead
        self._most_lost = _LOST_IN_A_ROW * count
        self._actors = [self._started() for _ in range(count)]
        self._facts: dict[str, Any] | None = None
        self._start: Any = None
        self._again = deque[Pending]()  # taken back from lost actors; each is answered alone
        self._losses = Counter[int]()  # lost actors of every item that was taken back
        self._lost_in_a_row = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Wait for the first actor, and return what it has loaded."""
        while self._facts is None:
            list(self._messages())  # no actor has anything to answer yet
        return self._facts

    def begin(self, start: Any) -> None:
        self._start = start
        for actor in self._actors:
            if actor.is_ready:
                actor.handle.put.remote(start)

    def answers(self, pending: Iterator[Pending]) -> Generator[Finished]:
        while True:
            self._supply(pending)
            if not any(actor.pending for actor in self._actors) and not self._again:
                self._again.extend(islice(pending, 1))
                if not self._again:
                    return
            yield from self._messages()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor.handle)

    def _started(self) -> _Actor:
        handle = self._make()
        return _Actor(handle, handle.answers.options(num_returns="streaming").remote())

    def _supply(self, pending: Iterator[Pending]) -> None:
        """Give actors items; those that may have ended an actor go to one that has no other."""
        for actor in (actor for actor in self._actors if actor.is_ready):
            batch: list[Pending] = []
            if not self._again and self._losses.keys().isdisjoint(actor.pending):
                batch = list(islice(pending, max(self._ahead - len(actor.pending), 0)))
            elif self._again and not actor.pending:
                batch = [self._again.popleft()]
            if batch:
                actor.pending.update((each.number, each) for each in batch)
                actor.handle.put.remote(batch)

    def _messages(self) -> Iterator[Finished]:
        """Wait for messages of actors, and yield the answers among them."""
        by_stream = {actor.stream: actor for actor in self._actors}
        streams, _ = self._ray.wait(list(by_stream), num_returns=1, fetch_local=False)
        for stream in streams:
            actor = by_stream[stream]
            try:
                message = self._ray.get(next(stream))
            except (StopIteration, self._ray.exceptions.RayError) as problem:
                self._replace(actor, _reason(problem))
                continue
            if isinstance(message, str):
                raise SaccadeError(message)
            if isinstance(message, Hello):
                self._compare(message)
                actor.is_ready = True
                if self._start is not None:
                    actor.handle.put.remote(self._start)
                continue
            self._lost_in_a_row = 0
            actor.pending.pop(message.number)
            self._losses.pop(message.number, None)
            yield message

    def _compare(self, hello: Hello) -> None:
        """Refuse machines whose models differ: answers would depend on the machine."""
        if self._facts is None:
            self._facts = hello.facts
        for group, facts in self._facts.items():
            for key, first, other in differences(facts, hello.facts[group]):
                if key != "name":
                    raise SaccadeError(
                        f"The machine {hello.machine} has loaded another {group} than the first one: its "
                        f"{key or group} is {shortened(other)}, not {shortened(first)}; give all machines the same "
                        "files."
                    )

    def _replace(self, actor: _Actor, reason: str) -> None:
        """Take back what an actor that has ended did not answer, and start another one."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row > self._most_lost:
            raise SaccadeError(
                f"{self._lost_in_a_row} actors in a row ended without an answer, the last one because {reason}; the "
                "answers so far are in the journal, and the same command resumes the run."
            )
        for number, each in actor.pending.items():
            self._losses[number] += 1
            if self._losses[number] >= HOPELESS:
                ended = f"{self._losses[number]} actors ended while they answered it, the last one because {reason}"
                each = replace(each, problem=ended)
            self._again.append(each)
        self._ray.kill(actor.handle)  # it may only be out of reach
        self._actors[self._actors.index(actor)] = self._started()


@contextmanager
def actors(
    ray: Any, places: Places, models: ActorModels, make: Callable[..., Worker], arguments: tuple[Any, ...], ahead: int
) -> Iterator[Actors]:
    """Start actors whose workers are ``make(vlm, *arguments)``, each with a few items ahead."""
    reserved = {"num_cpus": places.cpus, "num_gpus": places.gpus}
    kind = ray.remote(max_concurrency=2, scheduling_strategy="SPREAD", **reserved)(EngineActor)
    with closing(Actors(ray, lambda: kind.remote(models, make, arguments), places.count, ahead)) as started:
        yield started


def _reason(problem: BaseException) -> str:
    """Cause in the last line of Ray's error; the others are the traceback and where it happened."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    cause = next((line for line in lines if line.startswith(_DEAD)), "".join(lines[-1:]))
    return (cause.removeprefix(_DEAD) or type(problem).__name__)[:300].rstrip(".")
