"""Results folder: pages of finished measurements, what each was made of, and their publication."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade import environment
from saccade.bench import records
from saccade.bench.records import Run
from saccade.bench.report.figures import standalone
from saccade.errors import SaccadeError
from saccade.files import write_file
from tools.results.catalogue import Measurement
from tools.results.pages import (
    INDEX,
    REASONS,
    Entry,
    Place,
    computed_by,
    facts,
    figures_of,
    first_outcome,
    index,
    outcome,
    page,
    publish,
    reasons,
    with_reason,
)

MARK = "results.json"
"""Identity of a results folder: revision, machine and models."""
PAGES = "pages"
_DONE = "done.json"
"""Beside a run's records: what its page was made of."""


class Folder:
    """Records and pages of one revision."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._pages = path / PAGES

    def page(self, name: str) -> Path:
        """Page of a measurement, which exists when all its answers do."""
        return self._pages / f"{name}.md"

    def done(self, name: str) -> dict[str, Any]:
        """What a page was made of."""
        found: dict[str, Any] = json.loads((self.path / name / _DONE).read_text(encoding="utf-8"))
        return found

    def write(self, measurement: Measurement, run: Run, place: Place, heads: Mapping[str, str]) -> None:
        """Write the page of a complete run."""
        name = measurement.name
        drawings = figures_of(measurement, run)
        text = page(measurement, run, place, drawings)
        config = run.header.config
        entry = Entry(name, config["mirrors"], config["title"], outcome(run), first_outcome(run))
        done = {
            "heads": dict(heads),
            "prompts": prompts(config["per_task"], {task["name"]: task["count"] for task in config["tasks"]}),
            "figures": list(drawings),
            "entry": asdict(entry),
            "place": asdict(place),
        }
        write_file(self.path / name / _DONE, json.dumps(done, indent=1) + "\n")
        for file, plot in drawings.items():
            write_file(self._pages / file, standalone(plot.drawing))
        write_file(self.page(name), text)

    def render(self, chosen: Sequence[Measurement]) -> None:
        """Write the pages of all that is measured anew from the records, by the present sources."""
        if not (self.path / MARK).is_file():
            raise SaccadeError(
                f"{self.path} holds no {MARK}, so nothing was measured there; give the --out of `make results`."
            )
        refuse_modified(environment.revision())
        found = [measurement for measurement in chosen if self.page(measurement.name).is_file()]
        for number, measurement in enumerate(found, 1):
            self._say(f"[{number}/{len(found)}] {measurement.name}")
            done = self.done(measurement.name)
            if "place" not in done:
                raise SaccadeError(
                    f"{self.path / measurement.name} was measured by a revision whose pages cannot be written anew; "
                    "measure it again in another folder."
                )
            run = records.read(self.path / measurement.name)
            self.write(measurement, run, Place(**done["place"]), done["heads"])

    def publish(self, docs: Path, known: Sequence[Measurement], left_out: Mapping[str, str]) -> None:
        """Replace the pages of a folder by those measured, with their index."""
        names = [m.name for m in known if self.page(m.name).is_file()]
        done = {name: self.done(name) for name in names}
        files = [file for name in names for file in (f"{name}.md", *done[name]["figures"])]
        pages = {file: (self._pages / file).read_text(encoding="utf-8") for file in files}
        entries = [Entry(**found["entry"]) for found in done.values()]
        absent = {m.name: left_out.get(m.name, _later(m.name)) for m in known if m.name not in names}
        known_reasons = reasons(docs)
        for entry in entries:
            reason = known_reasons.get(entry.name)
            if reason is not None and reason.outcome == entry.first:
                pages[f"{entry.name}.md"] = with_reason(pages[f"{entry.name}.md"], reason)
            elif reason is not None:
                self._say(
                    f"{docs / REASONS} explains why {entry.name} {reason.outcome}, but it {entry.first}: left out"
                )
        if known_reasons:
            pages[REASONS] = (docs / REASONS).read_text(encoding="utf-8")
        measured = json.loads((self.path / MARK).read_text(encoding="utf-8"))["environment"]
        machine = next((found["place"]["machine"] for found in done.values() if "place" in found), facts(measured))
        pages[INDEX] = index(entries, machine + computed_by(measured["revision"]), absent)
        publish(pages, docs)


def prompts(per_task: int, counts: Mapping[str, int | None]) -> dict[str, int]:
    """Number of prompts that every task asks for."""
    return {task: count or per_task for task, count in counts.items()}


def refuse_modified(revision: str | None) -> None:
    """Refuse sources that no revision names."""
    if revision is None or revision.endswith("+"):
        raise SaccadeError(
            "The sources have changes that are not committed, so that no revision would name what is measured; "
            "commit them first."
        )


def _later(name: str) -> str:
    return f"left for later; `python -m tools.results {name}` measures it."
