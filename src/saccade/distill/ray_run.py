"""Distillation on Ray: the plan, folder and file of one process, the answers of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.cluster import Places
from saccade.distill.run import Batch, Lines, Progress, Report, opened
from saccade.distill.setup import Setup, models_of
from saccade.errors import SaccadeError
from saccade.jobs.actors import Actors, EngineActor, Models, start
from saccade.vlm import VLM

_AHEAD = 2
"""Batches that an actor has at once: the one that it generates, and the next one."""


class DistillActor(EngineActor):
    """Actor: generates batches of a run."""

    def __init__(self, models: Models, arguments: Mapping[str, Any]) -> None:
        super().__init__(models)
        self._arguments = arguments

    def open(self, vlm: VLM) -> dict[str, Any]:
        """See `EngineActor`."""
        found = models_of(vlm)
        self._vlm, self._setup = vlm, Setup(found, **self._arguments)
        return found

    def work(self, begin: str, tasks: Iterator[Batch]) -> Iterator[Lines]:
        """See `EngineActor`; it begins with the run's folder, which has the prompts of a pocket source."""
        prompts = self._setup.prompts(Path(begin))
        for batch in tasks:
            if batch.problem:
                raise SaccadeError(f"The question {batch.wanted[0].id} and its batch have no answer: {batch.problem}.")
            problems: list[str] = []
            generator = self._setup.generator(self._vlm, prompts, batch.needed, problems)
            lines = [line for item, line in generator.answer(batch.items, batch.wanted) if item in batch.wanted]
            yield Lines(batch.number, lines, problems)


def distill_on_ray(
    ray: Any,
    places: Places,
    models: Models,
    source: str | Path,
    out: str | Path,
    *,
    media_root: str | Path | None = None,
    on_bad_line: str = "stop",
    progress: Callable[[Progress], None] = lambda _: None,
    **options: Any,
) -> Report:
    """Run `saccade.distill.distill` by engines in a cluster; the file is the same, byte for byte.

    Batches are those of one process, so that every answer is computed in the same company; they are written in their
    order. With ``history="own"`` a turn waits for the turn before, of all conversations.
    """
    arguments: dict[str, Any] = {
        "source": source,
        "out": Path(out).expanduser(),
        "media_root": media_root,
        "on_bad_line": on_bad_line,
        "method_options": models.method_options,
        "options": options,
    }
    make = start(ray, places, DistillActor, (models, arguments))
    actors = Actors(ray, make, places.count, _AHEAD, ("target", "processor", "drafter"))
    try:
        with opened(Setup(actors.facts(), **arguments)) as attempt:
            actors.begin(str(arguments["out"]))
            return attempt.run(actors.answers, progress)
    finally:
        actors.close()
