"""Jobs on Ray: the items, journal and output of one process, the answers of many."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.cluster import Places
from saccade.engine.slots import KV_MEMORY_SHARE
from saccade.jobs.actors import Actors, EngineActor, Models, start
from saccade.jobs.answerer import Answer, Answering, Task, media_threads
from saccade.jobs.job import Job, Survey
from saccade.jobs.running import Attempt, Keeping, Report, facts
from saccade.vlm import VLM


class JobActor(EngineActor):
    """Actor: a running batch."""

    def __init__(
        self, models: Models, job: Job, has_requests: bool, max_rows: int, workers: int, kv_share: float
    ) -> None:
        super().__init__(models)
        self._job, self._has_requests = job, has_requests
        self._numbers = max_rows, workers, kv_share

    def open(self, vlm: VLM) -> dict[str, Any]:
        """See `EngineActor`."""
        self._answering = Answering(vlm, self._job, *self._numbers)
        return facts(vlm, self._models.method_options)

    def work(self, begin: int, tasks: Iterator[Task]) -> Iterator[Answer]:
        """See `EngineActor`; it begins with the time of OpenAI's answers."""
        if self._has_requests:
            self._answering.take_requests(begin)
        yield from self._answering.answers(tasks)


def run_on_ray(
    ray: Any,
    places: Places,
    models: Models,
    job: Job,
    found: Survey,
    out: Path,
    attempt: Attempt,
) -> Report:
    """Run a job after its `preview` by engines in a cluster; its journal and output are those of one process."""
    threads = media_threads(attempt.workers)
    job.journal(out, None)  # a mistake shows before models are loaded
    kv_share = KV_MEMORY_SHARE / (1 if places.gpus else places.per_machine)
    arguments = (models, job, bool(found.kinds["request"]), attempt.max_rows, threads, kv_share)
    actors = Actors(ray, start(ray, places, JobActor, arguments), places.count, attempt.max_rows + threads)
    try:
        loaded = {**actors.facts(), "created": int(time.time())}
        with job.journal(out, loaded) as journal:
            keeping = Keeping(job, journal, found, attempt)
            actors.begin(keeping.created)
            return keeping.run(actors.answers, out)
    finally:
        actors.close()
