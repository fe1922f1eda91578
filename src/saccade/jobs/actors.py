"""Jobs on Ray: one engine per actor; what a lost actor had not answered goes to another one.

Actors stream their answers item by item to the process of the command, which alone writes the journal. So a kill of
either side loses nothing that has an answer, and an item is in the output once, whoever answered it.
"""

from __future__ import annotations

import os
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from saccade.cluster import Places
from saccade.cpu import SMALL_MODEL
from saccade.engine.slots import KV_MEMORY_SHARE
from saccade.errors import SaccadeError
from saccade.formats import differences, shortened
from saccade.jobs.answerer import Answer, Answering, Task, media_threads
from saccade.jobs.forms import sentence_of
from saccade.jobs.job import Job, Survey
from saccade.jobs.running import Keeping, Progress, Report, facts
from saccade.vlm import VLM, load

SUSPECT, HOPELESS = 2, 4
"""Lost actors after which an item is answered alone, and after which it is given up."""
_LOST_IN_A_ROW = 6
"""Actors that may be lost without an answer in between, per actor of the job, before it ends."""


@dataclass(frozen=True)
class Models:
    """Models and method that every actor loads by itself.

    Attributes:
        arguments: of `saccade.load`; folders must exist on every machine.
        method_options: of them, the method's options that differ from its defaults.
        folder: to which paths are relative.
    """

    arguments: Mapping[str, Any]
    method_options: Mapping[str, Any] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)

    def load(self) -> VLM:
        """Load them, in the folder.

        Raises:
            SaccadeError: the folder or a checkpoint is missing.
        """
        try:
            os.chdir(self.folder)
        except OSError as problem:
            raise SaccadeError(
                f"A machine of the cluster lacks the folder {self.folder} ({problem.strerror}); start in a folder that "
                "all machines share."
            ) from None
        vlm = load(**self.arguments)
        if self.arguments.get("threads") is None and vlm.target.model.num_parameters() < SMALL_MODEL:
            torch.set_num_threads(1)  # Ray gives it as many as it has reserved cores
        return vlm


@dataclass(frozen=True)
class Hello:
    """First message of an actor: its models are loaded.

    Attributes:
        facts: as of `saccade.jobs.running.facts`.
        machine: name for messages.
    """

    facts: dict[str, Any]
    machine: str


class EngineActor:
    """Actor: a running batch, and the queue of its tasks.

    Args:
        has_requests: whether some items are requests of OpenAI's batch format.
        max_rows, workers, kv_share: as of `Answering`.
    """

    def __init__(
        self, models: Models, job: Job, has_requests: bool, max_rows: int, workers: int, kv_share: float
    ) -> None:
        self._models, self._job, self._has_requests = models, job, has_requests
        self._numbers = max_rows, workers, kv_share
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, given: Any) -> None:
        """Take the time of OpenAI's answers first, and lists of tasks from then on."""
        self._given.put(given)

    def answers(self) -> Iterator[Hello | Answer | str]:
        """Yield `Hello` and then answers; a sentence instead of `Hello` where it cannot work."""
        try:
            vlm = self._models.load()
            answering = Answering(vlm, self._job, *self._numbers)
            hello = Hello(facts(vlm, self._models.method_options), os.uname().nodename)
        except SaccadeError as problem:
            yield sentence_of(problem)
            return
        yield hello
        created = self._given.get()
        if self._has_requests:
            answering.take_requests(created)
        yield from answering.answers(self._tasks())

    def _tasks(self) -> Iterator[Task]:
        while True:
            yield from self._given.get()


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor as the command sees it.

    Attributes:
        stream: of its messages.
        tasks: that it has not answered, by number.
        is_ready: whether its models are loaded.
        is_alone: whether it must answer its only task before it gets others.
    """

    handle: Any
    stream: Any
    tasks: dict[int, Task] = field(default_factory=dict)
    is_ready: bool = False
    is_alone: bool = False


class Actors:
    """Actors of a job.

    Args:
        ray: the module, connected.
        make: starts an actor.
        count: of actors.
        ahead: tasks that an actor has at once.
    """

    def __init__(self, ray: Any, make: Callable[[], Any], count: int, ahead: int) -> None:
        self._ray, self._make, self._ahead = ray, make, ahead
        self._most_lost = _LOST_IN_A_ROW * count
        self._actors = [self._started() for _ in range(count)]
        self._facts: dict[str, Any] | None = None
        self._created: int | None = None
        self._again: deque[Task] = deque()
        self._suspects: deque[Task] = deque()
        self._losses: Counter[int] = Counter()
        self._lost_in_a_row = 0

    def facts(self) -> dict[str, Any]:
        """Wait for the first actor, and return what it has loaded.

        Raises:
            SaccadeError: the models cannot be loaded.
        """
        while self._facts is None:
            for _ in self._messages():
                raise AssertionError("no actor has a task yet")
        return self._facts

    def begin(self, created: int) -> None:
        """Let actors work.

        Args:
            created: as of `Answering.take_requests`.
        """
        self._created = created
        for actor in self._actors:
            if actor.is_ready:
                actor.handle.put.remote(created)

    def answers(self, tasks: Iterator[Task]) -> Generator[Answer]:
        """Yield one answer per task, as they end.

        Raises:
            SaccadeError: actors end again and again without an answer, or have loaded different models.
        """
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

    def _has_more(self, tasks: Iterator[Task]) -> bool:
        if not (self._again or self._suspects):
            self._again.extend(islice(tasks, 1))
        return bool(self._again or self._suspects)

    def _supply(self, tasks: Iterator[Task]) -> None:
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
            found: list[Task] = []
            while len(actor.tasks) + len(found) < self._ahead:
                task = self._again.popleft() if self._again else next(tasks, None)
                if task is None:
                    break
                found.append(task)
            if found:
                self._give(actor, found)

    def _give(self, actor: _Actor, tasks: list[Task]) -> None:
        actor.tasks.update((task.number, task) for task in tasks)
        actor.handle.put.remote(tasks)

    # -- messages ------------------------------------------------------------------------------------------

    def _messages(self) -> Iterator[Answer]:
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

    def _read(self, actor: _Actor, message: Hello | Answer | str) -> Answer | None:
        if isinstance(message, str):
            raise SaccadeError(message)
        if isinstance(message, Hello):
            self._compare(message)
            actor.is_ready = True
            if self._created is not None:
                actor.handle.put.remote(self._created)
            return None
        self._lost_in_a_row = 0
        actor.tasks.pop(message.number)
        self._losses.pop(message.number, None)
        return message

    def _compare(self, hello: Hello) -> None:
        """Refuse machines whose models differ: answers would depend on the machine."""
        if self._facts is None:
            self._facts = hello.facts
        for group in ("method", "target", "processor", "drafter"):
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


def _reason(problem: BaseException) -> str:
    """Last line of Ray's error: the others are the traceback and where it happened."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    words = next((line for line in lines if line.startswith("The actor is dead because")), lines[-1] if lines else "")
    return (words.removeprefix("The actor is dead because ") or type(problem).__name__)[:300].rstrip(".")


def run_on_ray(
    ray: Any,
    places: Places,
    models: Models,
    job: Job,
    found: Survey,
    out: Path,
    *,
    max_rows: int = 8,
    workers: int | None = None,
    retry_failed: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Report:
    """Run a job after its `preview` by engines in a cluster; its journal and output are those of one process.

    Args:
        ray: the module, connected.
        places: of the engines.
        max_rows, workers: of every engine.

    Raises:
        SaccadeError: as `saccade.jobs.batch_file`, or the cluster cannot do it.
    """
    threads = media_threads(workers)
    job.journal(out, None)  # a mistake shows before models are loaded
    kv_share = KV_MEMORY_SHARE / (1 if places.gpus else places.per_machine)
    kind = ray.remote(max_concurrency=2, scheduling_strategy="SPREAD", **places.options)(EngineActor)
    arguments = (models, job, bool(found.kinds["request"]), max_rows, threads, kv_share)
    actors = Actors(ray, lambda: kind.remote(*arguments), places.count, max_rows + threads)
    try:
        loaded = {**actors.facts(), "created": int(time.time())}
        with job.journal(out, loaded) as journal:
            keeping = Keeping(job, journal, found, progress, retry_failed)
            actors.begin(keeping.created)
            return keeping.run(actors.answers, out)
    finally:
        actors.close()
