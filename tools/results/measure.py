"""Measuring of many suites into one folder, which holds one revision and can be resumed."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import saccade
from saccade.bench.cost import estimate
from saccade.bench.preparing import Prepared, prepare
from saccade.bench.records import RecordedRun
from saccade.bench.runner import Mismatch, Progress, Runner
from saccade.environment import environment, fingerprint
from saccade.errors import SaccadeError
from saccade.files import write_file, write_folder
from saccade.model_spec import ModelSpec
from saccade.pocket import head_paths, target_path
from saccade.resolution import is_pocket
from saccade.wording import count, differences, duration, shortened
from tools import SETTINGS
from tools.heads.workshop import steps_of, usable_head
from tools.pocket.inflate import inflate, inflate_head
from tools.results import kept
from tools.results.catalogue import SHAPE, Measurement, load, measurements
from tools.results.pages import facts

MARK = "results.json"  # identity of a results folder: revision, machine and models


@dataclass(frozen=True, slots=True)
class Setup:
    """Models and folders of a session."""

    target: str
    drafter: str | None
    models: Path  # folder of trained heads, as `python -m tools.heads` makes it, and of derived checkpoints
    out: Path  # results folder
    dtype: str = SETTINGS["results"]["dtype"]  # of target, draft model and heads; `auto`: each its own
    threads: int = SETTINGS["results"]["threads"]  # CPU threads
    short: bool = False  # whether measurements are trials

    def load(self, target: str | Path, heads: Mapping[str, Path], drafter: str | None = None) -> saccade.VLM:
        """Load a target, the draft model, the target's own by default, and these heads alone."""
        pocket = is_pocket(self.target)
        drafter = drafter or self.drafter or ("pocket" if pocket else None)
        source = str(target_path()) if is_pocket(target) else str(target)
        named = {name: str(path) for name, path in heads.items()}
        of_drafts = None if self.dtype == "auto" else self.dtype
        return saccade.load(source, drafter, heads=named, dtype=self.dtype, draft_dtype=of_drafts, threads=self.threads)


@dataclass(slots=True)
class Report:
    """What became of the measurements."""

    measured: list[str] = field(default_factory=list)  # names with kept records
    left_out: dict[str, str] = field(default_factory=dict)  # name -> reason
    failed: dict[str, str] = field(default_factory=dict)  # name -> error


class Session:
    """Measurements in one results folder."""

    def __init__(self, setup: Setup, say: Callable[[str], None] = print) -> None:
        self._setup, self._say = setup, say
        self.records = setup.out / kept.FOLDER
        vlm = setup.load(setup.target, {})
        self._target = fingerprint(vlm.target.model)
        self._environment = environment(vlm.target.device)
        revision = self._environment["revision"]
        if not setup.short and (revision is None or revision.endswith("+")):
            raise SaccadeError(
                "The sources have changes that are not committed, so that no revision would name what is measured; "
                "commit them first."
            )
        self._claim()

    def _claim(self) -> None:
        """Make the folder this session's, or check that it is."""
        mark = {"environment": self._environment, "target": self._target, "short": self._setup.short}
        path = self._setup.out / MARK
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            for key, old, new in differences(found, json.loads(json.dumps(mark))):
                raise SaccadeError(
                    f"{self._setup.out} holds results that were measured otherwise ({key}: {shortened(old)} there, "
                    f"{shortened(new)} now), and results are never mixed; give another folder with --out, or remove "
                    "that one."
                )
        elif self._setup.out.is_dir() and any(self._setup.out.iterdir()):
            raise SaccadeError(f"{self._setup.out} is not empty and holds no {MARK}; give another folder with --out.")
        else:
            write_file(path, json.dumps(mark, indent=1) + "\n")

    def run(self, chosen: Sequence[Measurement]) -> Report:
        """Measure what is not measured yet; a suite that fails or lacks heads is reported, and the rest runs."""
        report = Report()
        for number, measurement in enumerate(chosen, 1):
            name, line = measurement.name, f"[{number}/{len(chosen)}] {measurement.name}: "
            lacking = self._lacking(measurement)
            if lacking:
                report.left_out[name] = f"its heads {', '.join(lacking)} are not trained; `make heads` trains them."
                self._say(line + self._advice(lacking))
                continue
            if self.is_measured(measurement):
                report.measured.append(name)
                self._say(line + "measured before")
                continue
            self._say(line + measurement.suite.title)
            try:
                self._measure(measurement)
                report.measured.append(name)
            except Exception as problem:  # one suite must not cost the others their hours
                is_known = isinstance(problem, (Mismatch, SaccadeError))
                report.failed[name] = str(problem) if is_known else f"{type(problem).__name__}: {problem}"
                self._say(f"    failed: {report.failed[name]}")
        return report

    def plan(self, chosen: Sequence[Measurement]) -> str:
        """Pages with their answers, missing heads, and the time at the speed of plain decoding on one task."""
        lines, total = [], 0
        for measurement in chosen:
            lacking = self._lacking(measurement)
            state = self._advice(lacking) if lacking else "measured" if self.is_measured(measurement) else ""
            total += 0 if state else measurement.answers
            lines.append(f"{measurement.name}: {measurement.answers} answers{'; ' * bool(state)}{state}")
        prepared = self.prepared(measurements(["quick"])[0])
        seconds = estimate(prepared).seconds / prepared.answers
        return "\n".join([*lines, f"{total:,} answers are left; about {duration(total * seconds)}."])

    def is_measured(self, measurement: Measurement) -> bool:
        """Whether records were kept of a run with the present heads and as many prompts; one of fewer grows."""
        path = kept.path_of(self.records, measurement.name)
        if not path.is_file():
            return False
        header = kept.header(path)
        there = _prompts(header.config["per_task"], {task["name"]: task["count"] for task in header.config["tasks"]})
        wanted = _prompts(measurement.suite.per_task, {task.name: task.count for task in measurement.suite.tasks})
        more = there.keys() == wanted.keys() and all(there[task] <= wanted[task] for task in wanted)
        asked = there if more else wanted
        pairs = {"head": (header.places["heads"], self._digests(measurement)), "prompts": (there, asked)}
        for what, (old_all, new_all) in pairs.items():
            for name, old, new in differences(old_all, new_all):
                raise SaccadeError(
                    f"{self._setup.out} holds {measurement.name} measured otherwise ({what} of {name}: "
                    f"{shortened(old)} there, {shortened(new)} now); give the same --per-task and heads, another "
                    f"folder with --out, or remove {path} and {self._setup.out / measurement.name} to measure it again."
                )
        return there == wanted

    def _measure(self, measurement: Measurement) -> None:
        shown = time.monotonic()

        def progress(progress: Progress) -> None:
            nonlocal shown
            if time.monotonic() - shown >= _EVERY:
                shown = time.monotonic()
                self._say(f"    {progress.done} of {count(progress.total, 'answer')}")

        run = Runner(self.prepared(measurement), self._setup.out / measurement.name, progress).run()
        places = {
            "command": self._command(measurement),
            "machine": facts(run.header.environment),
            "models": self._models(measurement, run),
            "heads": self._digests(measurement),
        }
        kept.keep(kept.path_of(self.records, measurement.name), run, places)

    def prepared(self, measurement: Measurement) -> Prepared:
        """Load the models of a measurement and draw its prompts."""
        heads = self.heads(measurement)
        target: str | Path = self._setup.target
        if measurement.is_inflated:
            target = self._inflated_target()
            heads = {name: self._inflated(path, target / "heads") for name, path in heads.items()}
        drafter = self._setup.drafter
        if measurement.drafter:
            drafter = str(usable_head(self._setup.models, measurement.drafter, self._target))
        vlm = self._setup.load(target, heads, drafter)
        return prepare(measurement.suite, vlm, ModelSpec(str(target), drafter))

    def _inflated_target(self) -> Path:
        """Return the folder of the inflated target; made where it is missing."""
        folder = self._setup.models / f"inflated-{self._target}"
        if not (folder / "config.json").is_file():
            source = target_path() if is_pocket(self._setup.target) else Path(self._setup.target)
            self._say(f"    writing {folder}")
            write_folder(folder, lambda part: inflate(source, part, SHAPE))
        return folder

    def _inflated(self, head: Path, folder: Path) -> Path:
        """Return a head of the inflated target; made where it is missing."""
        out = folder / _digest(head)
        if not (out / "config.json").is_file():
            write_folder(out, lambda part: inflate_head(head, part, SHAPE))
        return out

    def heads(self, measurement: Measurement) -> dict[str, Path]:
        """Folders of the heads there are: of the folder of trained heads, or shipped with the target."""
        shipped = head_paths() if is_pocket(self._setup.target) else {}
        folders = {}
        for name in measurement.heads:
            folder = shipped.get(name) if measurement.shipped else None
            folder = folder or usable_head(self._setup.models, name, self._target) or shipped.get(name)
            if folder is not None:
                folders[name] = folder
        return folders

    def _lacking(self, measurement: Measurement) -> list[str]:
        found = self.heads(measurement)
        lacking = [name for name in measurement.heads if name not in found]
        if measurement.drafter and usable_head(self._setup.models, measurement.drafter, self._target) is None:
            lacking.append(measurement.drafter)
        return lacking

    def _digests(self, measurement: Measurement) -> dict[str, str]:
        return {name: _digest(path) for name, path in self.heads(measurement).items()}

    def _advice(self, lacking: Sequence[str]) -> str:
        setup = self._setup
        models = shlex.join(["-t", setup.target, *(["-d", setup.drafter] if setup.drafter else [])])
        command = f"python -m tools.heads {' '.join(lacking)} {models} --out {setup.models}"
        return f"left out, because {count(len(lacking), 'head')} must be trained first: `{command}`"

    def _command(self, measurement: Measurement) -> str:
        """Command that measures the same again, without folders of this machine."""
        setup, per_task, usual = self._setup, measurement.suite.per_task, SETTINGS["results"]
        words = [] if is_pocket(setup.target) else ["-t", "TARGET"]
        words += ["-d", "DRAFT"] if setup.drafter else []
        if setup.short:
            words.append("--short")
        elif per_task != load(measurement.suite.name).per_task:
            words += ["--per-task", str(per_task)]
        words += [] if setup.dtype == usual["dtype"] else ["--dtype", setup.dtype]
        words += [] if setup.threads == usual["threads"] else ["--threads", str(setup.threads)]
        return shlex.join(["python", "-m", "tools.results", measurement.name, *words])

    def _models(self, measurement: Measurement, run: RecordedRun) -> str:
        """Models of a run in words, with the steps of every trained head, and which heads are shipped."""
        models, used = run.header.models, self.heads(measurement)

        def words(name: str, model: Mapping[str, Any]) -> str:
            return f"{name} {model['layers']} x {model['width']}, {model['dtype']}, digest {model['digest']}"

        parts = [words("Target", models["target"]) + _INFLATED * measurement.is_inflated]
        if models["drafter"]:
            steps = steps_of(self._setup.models, measurement.drafter) if measurement.drafter else None
            parts.append(words("draft VLM", models["drafter"]) + (f" ({count(steps, 'step')})" if steps else ""))
        heads = []
        for name, head in models["heads"].items():
            remark, path = "", used.get(name)
            if path is not None and not path.is_relative_to(self._setup.models):
                remark = " (shipped)"
            elif path is not None and (steps := steps_of(self._setup.models, name)) is not None:
                remark = f" ({count(steps, 'step')})"
            heads.append(f"{name} {head['digest']}{remark}")
        if heads:
            parts.append(f"heads {', '.join(heads)}")
        return "; ".join(parts) + "."


_EVERY = 60.0  # seconds between lines of progress
_INFLATED = ", which is the pair's inflated to 1024 x 24"


def _prompts(per_task: int, counts: Mapping[str, int | None]) -> dict[str, int]:
    """Number of prompts that every task asks for."""
    return {task: count or per_task for task, count in counts.items()}


def _digest(head: Path) -> str:
    weights = b"".join(file.read_bytes() for file in sorted(head.glob("*.safetensors")))
    return hashlib.blake2b(weights, digest_size=8).hexdigest()
