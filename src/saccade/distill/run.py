"""Distillation run: check arguments, plan, generate batch by batch, resume."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade.distill import pocket_source
from saccade.distill.folder import Folder
from saccade.distill.generating import Generator
from saccade.distill.options import Options
from saccade.distill.planning import Item, Plan, Prompts, make_plan, refuse
from saccade.environment import model_facts
from saccade.errors import InputError, MethodError, SaccadeError
from saccade.target.adapter import Target
from saccade.vlm import VLM

_POCKET_ONLY = ("count", "first_seed", "grammar")


def header(
    vlm: VLM, prompts: str, source: Mapping[str, Any], options: Options, method_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of ``distill.json``.

    Args:
        prompts: name of the prompt set.
        source: what identifies the prompt set.
        method_options: those that differ from the method's defaults.
    """
    chosen = asdict(options)
    if "pocket" not in source:
        chosen = {name: value for name, value in chosen.items() if name not in _POCKET_ONLY}
    drafts = vlm.draft_model if vlm.method != "plain" else None
    return {
        "prompts": prompts,
        "source": dict(source),
        "target": _facts(vlm.target),
        "processor": {"digest": vlm.processor.digest},
        "drafter": None if drafts is None else _facts(drafts),
        "options": {**chosen, "method": vlm.method, "method_options": dict(method_options)},
        "versions": {name: metadata.version(name) for name in ("saccade", "torch", "transformers")},
    }


def _facts(target: Target) -> dict[str, Any]:
    model = target.model
    facts = model_facts(model, str(model.config._name_or_path))
    return facts | ({"exact": True} if target.exact else {})


class Setup:
    """The arguments of `saccade.distill.distill`.

    Raises:
        SaccadeError: one of them cannot be used.
    """

    def __init__(
        self,
        vlm: VLM,
        source: str | Path,
        out: Path,
        media_root: str | Path | None,
        on_bad_line: str,
        method_options: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        if not vlm.lossless:
            raise MethodError(
                f"Method {vlm.method} is lossy, so its answers are not the target's; choose a lossless one."
            )
        if on_bad_line not in ("stop", "skip"):
            raise InputError(f"on_bad_line must be stop or skip, not {on_bad_line!r}.")
        unknown = sorted(set(options) - set(Options.__slots__))
        if unknown:
            raise InputError(f"Unknown option {unknown[0]}; expected {', '.join(Options.__slots__)}.")
        self.vlm, self.out, self.on_bad_line = vlm, out, on_bad_line
        self.options = Options(**options)
        self.tasks: list[str] = []
        self._prompts: Prompts | None = None
        name = str(source)
        if name.startswith(pocket_source.PREFIX):
            if media_root is not None:
                raise InputError("A pocket source draws its own media; leave out media_root.")
            self.tasks = pocket_source.tasks_of(name, self.options.grammar)
            identity: dict[str, Any] = {"pocket": self.tasks, "media_root": "."}
        else:
            for word in ("count", "first_seed", "grammar"):
                if word in options and options[word] != getattr(Options(), word):
                    raise InputError(f"{word} is for pocket sources; leave it out, or use limit for a file.")
            path = Path(source).expanduser()
            root = (path.parent if media_root is None else Path(media_root).expanduser()).resolve()
            self._prompts = Prompts(path, root)
            identity = {"content": self._prompts.digest, "media_root": str(root)}
            name = path.name
        self._header = header(vlm, name, identity, self.options, method_options)

    def folder(self) -> Folder:
        """The output folder, not opened yet."""
        return Folder(self.out, self._header)

    def prompts(self, folder: Path) -> Prompts:
        """Return the prompt set: the file, or the samples drawn into a folder."""
        return self._prompts or Prompts(folder / pocket_source.FILE, folder)

    @contextmanager
    def drawn(self) -> Iterator[Path]:
        """Open a temporary folder with the pocket samples, or the output folder where they are drawn already."""
        if not self.tasks or (self.out / pocket_source.FILE).is_file():
            yield self.out
            return
        with TemporaryDirectory() as name:
            pocket_source.write_prompts(Path(name), self.tasks, self.options)
            yield Path(name)

    def generator(self, prompts: Prompts, answers: Mapping[str, str], problems: list[str]) -> Generator:
        """Return the generator of answers; unusable questions are recorded in ``problems``, or end the run."""

        def bad(item: Item, reason: str) -> None:
            refuse(problems, f"{prompts.where(item.line)}, question {item.id}: {reason}.", self.on_bad_line)

        return Generator(self.vlm, prompts, self.options, answers, bad)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        done: questions answered or skipped, those of earlier attempts included.
        total: questions of the complete run.
        tokens: generated by this attempt.
        seconds: since this attempt began its first batch.
    """

    done: int
    total: int
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """Result of an attempt.

    Attributes:
        folder: of the answers.
        questions: of the complete run.
        there: answers of earlier attempts.
        answered: answers of this attempt.
        duplicates: questions left out because an equal one is planned.
        problems: one sentence per line or question that was skipped.
        tokens: generated by this attempt.
        seconds: spent on answers.
        finishes: number of this attempt's answers by finish reason.
    """

    folder: Path
    questions: int = 0
    there: int = 0
    answered: int = 0
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    finishes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Preview:
    """Plan and expected duration of a run.

    Attributes:
        plan: every question.
        there: questions answered by earlier attempts.
        seconds: expected for the others, from a few batches; 0 when there are none.
    """

    plan: Plan
    there: int
    seconds: float


def distill(
    vlm: VLM,
    source: str | Path,
    out: str | Path,
    *,
    media_root: str | Path | None = None,
    on_bad_line: str = "stop",
    method_options: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    **options: Any,
) -> Report:
    """Generate the target's answers to a prompt set as training data of drafters.

    A run may be stopped at any moment and resumed by the same call; the file is then equal, byte for byte, to that of
    an unbroken run.

    Args:
        vlm: the target; its method must be lossless.
        source: a file of conversations (see `saccade.inputs.conversations`), or ``pocket:TASK,TASK``, or
            ``pocket:all``.
        out: folder for ``answers.jsonl`` and ``distill.json``.
        media_root: folder of the prompt set's media; the file's own when None.
        on_bad_line: ``stop`` at a line that cannot be used, or ``skip`` it.
        method_options: the method's options that differ from its defaults, as given to `saccade.load`; recorded.
        progress: called after every batch.
        options: see `Options`.

    Raises:
        SaccadeError: no usable question, a line that cannot be used, an output folder of another run, or wrong options.
    """
    setup = Setup(vlm, source, Path(out).expanduser(), media_root, on_bad_line, method_options or {}, options)
    with setup.folder() as folder:
        if setup.tasks:
            folder.begin()
            pocket_source.write_prompts(folder.path, setup.tasks, setup.options)
        prompts = setup.prompts(folder.path)
        plan = make_plan(prompts, setup.options, on_bad_line)
        folder.begin()
        return _Attempt(setup, folder, prompts, plan, progress).run()


def preview(
    vlm: VLM,
    source: str | Path,
    out: str | Path,
    *,
    media_root: str | Path | None = None,
    on_bad_line: str = "stop",
    method_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Preview:
    """Plan a run of `distill` with the same arguments, and estimate its duration; nothing is written.

    Raises:
        SaccadeError: as `distill`.
    """
    setup = Setup(vlm, source, Path(out).expanduser(), media_root, on_bad_line, method_options or {}, options)
    folder = setup.folder()
    there = dict(folder.answers())
    with setup.drawn() as drawn:
        prompts = setup.prompts(drawn)
        plan = make_plan(prompts, setup.options, on_bad_line)
        generator = setup.generator(prompts, there, plan.problems)
        left = [b for b in plan.batches if any(i.id not in there for i in b)]
        return Preview(plan, _known(plan, there), _expected(generator, left))


class _Attempt:
    """One attempt at a run whose folder is open."""

    def __init__(
        self, setup: Setup, folder: Folder, prompts: Prompts, plan: Plan, progress: Callable[[Progress], None]
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._progress = progress
        needed = {earlier for item in plan.items for _, earlier in item.before}
        self._there: set[str] = set()
        self._answers: dict[str, str] = {}
        for name, text in folder.answers():
            self._there.add(name)
            if name in needed:
                self._answers[name] = text
        self._needed = needed
        self._generator = setup.generator(prompts, self._answers, plan.problems)
        self._report = Report(
            folder.path,
            questions=sum(len(b) for b in plan.batches),
            there=_known(plan, self._there),
            duplicates=plan.duplicates,
            problems=plan.problems,
        )

    def run(self) -> Report:
        """Answer all questions without an answer."""
        report, done = self._report, self._report.there
        self._progress(Progress(done, report.questions))
        started = time.perf_counter()
        for batch in self._plan.batches:
            wanted = [item for item in batch if item.id not in self._there]
            if not wanted:
                continue
            lines = [line for item, line in self._generator.answer(batch, wanted) if item in wanted]
            self._folder.append(lines)
            for line in lines:
                self._note(line)
            done += len(wanted)
            report.seconds = time.perf_counter() - started
            self._progress(Progress(done, report.questions, report.tokens, report.seconds))
        return report

    def _note(self, line: Mapping[str, Any]) -> None:
        self._report.answered += 1
        self._report.tokens += len(line["answer_ids"])
        self._report.finishes[line["finish"]] += 1
        if line["id"] in self._needed:
            self._answers[line["id"]] = line["answer"]


def _known(plan: Plan, there: Mapping[str, str] | set[str]) -> int:
    """Return the number of answers, all of which must belong to the plan.

    Raises:
        SaccadeError: one does not belong to it.
    """
    planned = {item.id for item in plan.items}
    for name in there:
        if name not in planned:
            raise SaccadeError(
                f"The output folder holds an answer to {name}, which is not in this prompt set; choose another folder."
            )
    return len(there)


def _expected(generator: Generator, left: list[list[Item]]) -> float:
    """Estimate the seconds of all batches from one in the middle of each kind, after a warm-up."""
    kinds = [[b for b in left if b[0].sampled == sampled and not b[0].before] for sampled in (False, True)]
    chosen = [kind[len(kind) // 2] for kind in kinds if kind]
    if not chosen:
        return 0.0
    generator.answer(chosen[0], chosen[0])
    seconds = {}
    for batch in chosen:
        started = time.perf_counter()
        generator.answer(batch, batch)
        seconds[batch[0].sampled] = (time.perf_counter() - started) / len(batch)
    usual = sum(seconds.values()) / len(seconds)
    return sum(seconds.get(b[0].sampled, usual) * len(b) for b in left)
