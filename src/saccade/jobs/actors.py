"""Actors on Ray that answer tasks, one engine each; what a lost actor had not answered goes to another one.

Actors stream their answers to the process of the command, which alone writes the journal. So a kill of either side
loses nothing that has an answer, and a task is answered once, whoever did it.
"""

from __future__ import annotations

import os
import queue
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from saccade.cluster import Places, limit_threads
from saccade.errors import SaccadeError
from saccade.formats import differences, shortened
from saccade.jobs.forms import sentence_of
from saccade.vlm import VLM, load

SUSPECT, HOPELESS = 2, 4
"""Lost actors after which an item is answered alone, and after which it is given up."""
COMPARED = ("method", "target", "processor", "drafter")
"""Groups of facts about the models of a job."""
_LOST_IN_A_ROW = 6
"""Actors that may be lost without an answer in between, per actor of the job, before it ends."""


@dataclass(frozen=True)
class Models:
    """Models and method that every actor loads by itself."""

    arguments: Mapping[str, Any]  # of `saccade.load`; folders must exist on every machine
    method_options: Mapping[str, Any] = field(default_factory=dict)  # of them
    folder: str = field(default_factory=os.getcwd)  # to which paths are relative

    def load(self) -> VLM:
        """Load them, in the folder."""
        try:
            os.chdir(self.folder)
        except OSError as problem:
            raise SaccadeError(
                f"A machine of the cluster lacks the folder {self.folder} ({problem.strerror}); start in a folder that "
                "all machines share."
            ) from None
        vlm = load(**self.arguments)
        limit_threads(vlm, self.arguments.get("threads"))
        return vlm


@dataclass(frozen=True)
class Hello:
    """First message of an actor: its models are loaded."""

    facts: dict[str, Any]  # groups of facts about them
    machine: str  # name for messages


class EngineActor(ABC):
    """Actor: models, and the queue of their tasks."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, given: Any) -> None:
        """Take what all actors begin with first, and lists of tasks from then on."""
        self._given.put(given)

    def answers(self) -> Iterator[Any]:
        """Yield `Hello` and then answers; a sentence instead where it cannot work."""
        try:
            vlm = self._models.load()
            yield Hello(self.open(vlm), os.uname().nodename)
            yield from self.work(self._given.get(), self._tasks())
        except SaccadeError as problem:
            yield sentence_of(problem)

    @abstractmethod
    def open(self, vlm: VLM) -> dict[str, Any]:
        """Prepare, and return the facts of the models."""

    @abstractmethod
    def work(self, begin: Any, tasks: Iterator[Any]) -> Iterator[Any]:
        """Yield one answer per task, with its ``number``; ``tasks`` waits for the next one."""

    def _tasks(self) -> Iterator[Any]:
        while True:
            yield from self._given.get()


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor as the command sees it."""

    handle: Any
    stream: Any  # of its messages
    tasks: dict[int, Any] = field(default_factory=dict)  # that it has not answered, by number
    is_ready: bool = False  # whether its models are loaded
    is_alone: bool = False  # whether it must answer its only task before it gets others


class Actors:
    """Actors of a run: tasks are dataclasses with a ``number`` and a ``problem``; answers have the number."""

    def __init__(
        self, ray: Any, make: Callable[[], Any], count: int, ahead: int, compared: tuple[str, ...] = COMPARED
    ) -> None:
        self._compared = compared
        self._ray, self._make, self._ahead = ray, make, ahead
        self._most_lost = _LOST_IN_A_ROW * count
        self._actors = [self._started() for _ in range(count)]
        self._facts: dict[str, Any] | None = None
        self._begin: Any = None
        self._again: deque[Any] = deque()
        self._suspects: deque[Any] = deque()
        self._losses: Counter[int] = Counter()
        self._lost_in_a_row = 0

    def facts(self) -> dict[str, Any]:
        """Wait for the first actor, and return what it has loaded."""
        while self._facts is None:
            for _ in self._messages():
                raise AssertionError("no actor has a task yet")
        return self._facts

    def begin(self, begin: Any) -> None:
        """Let actors work, with what `EngineActor.work` gets first; not None."""
        self._begin = begin
        for actor in self._actors:
            if actor.is_ready:
                actor.handle.put.remote(begin)

    def answers(self, tasks: Iterator[Any]) -> Generator[Any]:
        """Yield one answer per task, as they end."""
        while True:
            self._supply(tasks)
            if not any(actor.tasks for actor in self._actors) and not self._has_more(tasks):
                return
            yield from self._messages()

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._ray.kill(actor.handle)

    def _started(self) -> _Actor:
        handle = self._make()
        return _Actor(handle, handle.answers.options(num_returns="streaming").remote())

    # -- tasks ---------------------------------------------------------------------------------------------

    def _has_more(self, tasks: Iterator[Any]) -> bool:
        if not (self._again or self._suspects):
            self._again.extend(islice(tasks, 1))
        return bool(self._again or self._suspects)

    def _supply(self, tasks: Iterator[Any]) -> None:
        """Give every actor as many tasks as it may have."""
        ready = [actor for actor in self._actors if actor.is_ready]
        for actor in ready:
            actor.is_alone = actor.is_alone and bool(actor.tasks)
            if self._suspects and not actor.tasks:
                self._give(actor, [self._suspects.popleft()])
                actor.is_alone = True
        drained = next((actor for actor in ready if not actor.is_alone), None) if self._suspects else None
        for actor in ready:
            if actor.is_alone or actor is drained:
                continue
            found: list[Any] = []
            while len(actor.tasks) + len(found) < self._ahead:
                task = self._again.popleft() if self._again else next(tasks, None)
                if task is None:
                    break
                found.append(task)
            if found:
                self._give(actor, found)

    def _give(self, actor: _Actor, tasks: list[Any]) -> None:
        actor.tasks.update((task.number, task) for task in tasks)
        actor.handle.put.remote(tasks)

    # -- messages ------------------------------------------------------------------------------------------

    def _messages(self) -> Iterator[Any]:
        """Wait for messages of actors, and yield the answers among them."""
        by_stream = {actor.stream: actor for actor in self._actors}
        found, _ = self._ray.wait(list(by_stream), num_returns=1, fetch_local=False)
        for stream in found:
            actor = by_stream[stream]
            try:
                message = self._ray.get(next(stream))
            except StopIteration:
                self._lose(actor, "it ended by itself")
            except self._ray.exceptions.RayError as problem:
                self._lose(actor, _reason(problem))
            else:
                answer = self._read(actor, message)
                if answer is not None:
                    yield answer

    def _read(self, actor: _Actor, message: Any) -> Any:
        if isinstance(message, str):
            raise SaccadeError(message)
        if isinstance(message, Hello):
            self._compare(message)
            actor.is_ready = True
            if self._begin is not None:
                actor.handle.put.remote(self._begin)
            return None
        self._lost_in_a_row = 0
        actor.tasks.pop(message.number)
        self._losses.pop(message.number, None)
        return message

    def _compare(self, hello: Hello) -> None:
        """Refuse machines whose models differ: answers would depend on the machine."""
        if self._facts is None:
            self._facts = hello.facts
        for group in self._compared:
            for key, other, own in differences(self._facts[group], hello.facts[group]):
                if key == "name":
                    continue
                raise SaccadeError(
                    f"The machine {hello.machine} has loaded another {group} than the first one: its {key or group} is "
                    f"{shortened(own)}, not {shortened(other)}; give all machines the same files."
                )

    def _lose(self, actor: _Actor, reason: str) -> None:
        """Take back the tasks of an actor that has ended, and start another one."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row > self._most_lost:
            raise SaccadeError(
                f"{self._lost_in_a_row} actors in a row ended without an answer, the last one because {reason}; the "
                "answers so far are in the journal, and the same command resumes the run."
            )
        for task in actor.tasks.values():
            self._losses[task.number] += 1
            losses = self._losses[task.number]
            if losses >= HOPELESS:
                sentence = f"{losses} actors ended while they answered it, the last one because {reason}"
                self._again.append(replace(task, problem=sentence))
            else:
                (self._suspects if losses >= SUSPECT else self._again).append(task)
        self._ray.kill(actor.handle)  # it may only be out of reach
        self._actors[self._actors.index(actor)] = self._started()


def start(ray: Any, places: Places, kind: type[EngineActor], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """Return the function that starts an actor."""
    made = ray.remote(max_concurrency=2, scheduling_strategy="SPREAD", **places.options)(kind)
    return lambda: made.remote(*arguments)


def _reason(problem: BaseException) -> str:
    """Last line of Ray's error: the others are the traceback and where it happened."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    words = next((line for line in lines if line.startswith("The actor is dead because")), lines[-1] if lines else "")
    return (words.removeprefix("The actor is dead because ") or type(problem).__name__)[:300].rstrip(".")
