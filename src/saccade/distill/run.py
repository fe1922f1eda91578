"""Distillation: batches of planned questions, answered by the target, in a journal that any attempt continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from saccade.data.conversations import Messages, resolve_media
from saccade.distill import planning
from saccade.distill.folder import ANSWERS, HEADER
from saccade.distill.planning import Options, PlannedQuestion, Prompts, QuestionPlan, make_plan, refuse
from saccade.errors import InputError, MethodError, SaccadeError
from saccade.jobs.running import facts_of
from saccade.memory_plan import LETTERS
from saccade.output import Output
from saccade.resumable import SHOWN, Finished, Journal, JournalRunner, Pending, Report, Worker, check_place
from saccade.stream import decode
from saccade.vlm import VLM

_NAMES = HEADER, ANSWERS
_COMPARED = ("source", "options", "method", "target", "processor", "drafter")
_POCKET_ONLY = ("count", "first_seed", "grammar")


def distill(
    vlm: VLM,
    source: str | Path,
    out: str | Path,
    *,
    media_root: str | Path | None = None,
    on_bad_line: str = "stop",
    progress: Callable[[Report], None] = lambda _: None,
    **options: Any,
) -> Report:
    """Generate the target's answers to a prompt set as training data of drafters.

    A run may be stopped at any moment and resumed by the same call; the file is then equal, byte for byte, to that of
    an unbroken run.
    """
    setup = Setup(source, out, media_root, on_bad_line, options)
    return run(QuestionWorker(vlm, setup), setup, progress)


class Setup:
    """The arguments of `distill` apart from the models, checked."""

    def __init__(
        self,
        source: str | Path,
        out: str | Path,
        media_root: str | Path | None,
        on_bad_line: str,
        options: Mapping[str, Any],
    ) -> None:
        self.on_bad_line, self.out = on_bad_line, Path(out).expanduser()
        self.options = Options.checked(on_bad_line, options)
        check_place(self.out, _NAMES)
        self._name, self._tasks = str(source), list[str]()
        self._prompts: Prompts | None = None
        if self._name.startswith(planning.PREFIX):
            if media_root is not None:
                raise InputError("A pocket source draws its own media; leave out media_root.")
            self._tasks = planning.tasks_of(self._name, self.options.grammar)
            return
        for word in _POCKET_ONLY:
            if word in options and options[word] != getattr(Options(), word):
                raise InputError(f"{word} is for pocket sources; leave it out, or use limit for a file.")
        path = Path(source).expanduser()
        self._name = path.name
        self._prompts = Prompts(path, (Path(media_root).expanduser() if media_root else path.parent).resolve())

    def journal(self, facts: Mapping[str, Any]) -> Journal:
        """Journal in the output folder, not opened yet; ``facts`` are about the models."""
        options: dict[str, Any] = asdict(self.options)
        source: dict[str, Any] = {"pocket": self._tasks, "media_root": "."}
        if self._prompts is not None:
            options = {name: value for name, value in options.items() if name not in _POCKET_ONLY}
            source = {"content": self._prompts.digest, "media_root": str(self._prompts.root)}
        versions = {name: metadata.version(name) for name in ("saccade", "torch", "transformers")}
        header = {"prompts": self._name, "source": source, **facts, "options": options, "versions": versions}
        return Journal(self.out, header, _NAMES, _COMPARED, inputs=(planning.FILE,))

    def draw(self, folder: Path) -> None:
        """Draw the samples of a pocket source into a folder, unless an earlier attempt did."""
        if self._tasks:
            planning.write_prompts(folder, self._tasks, self.options)

    def prompts(self, folder: Path) -> Prompts:
        """Return the prompt set: the file, or the samples drawn into a folder."""
        return self._prompts or Prompts(folder / planning.FILE, folder)

    @contextmanager
    def drawn(self) -> Iterator[Path]:
        """Open a temporary folder with the pocket samples, or the output folder where they are drawn already."""
        if not self._tasks or (self.out / planning.FILE).is_file():
            yield self.out
            return
        with TemporaryDirectory() as name:
            self.draw(Path(name))
            yield Path(name)


@dataclass(frozen=True, slots=True)
class QuestionBatch:
    """Questions that are generated together."""

    questions: Sequence[PlannedQuestion]  # all of them
    missing: frozenset[str]  # ids of those without an answer
    earlier: Mapping[str, str] = field(default_factory=dict)  # the target's answers to earlier turns of theirs, by id


class QuestionWorker:
    """Answers batches of questions by a model of this process; a `saccade.resumable.Worker`."""

    def __init__(self, vlm: VLM, setup: Setup) -> None:
        if not vlm.lossless:
            raise MethodError(
                f"Method {vlm.method} is lossy, so its answers are not the target's; choose a lossless one."
            )
        self._vlm, self._setup = vlm, setup

    @property
    def facts(self) -> dict[str, Any]:
        return facts_of(self._vlm)

    @property
    def memory(self) -> int:
        """Most bytes in use on the target's GPU so far, or those of its weights on a CPU."""
        target = self._vlm.target
        if target.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(target.device))
        return sum(weight.nbytes for weight in target.model.parameters())

    def begin(self, folder: Path) -> None:
        """Take the folder that has the prompts of a pocket source."""
        self._prompts = self._setup.prompts(folder)

    def answers(self, pending: Iterator[Pending]) -> Generator[Finished]:
        for each in pending:
            batch: QuestionBatch = each.content
            if each.problem:
                raise SaccadeError(
                    f"The question {min(batch.missing)} and its batch have no answer: {each.problem.rstrip('.')}."
                )
            yield self._answered(each.number, batch)

    def _answered(self, number: int, batch: QuestionBatch) -> Finished:
        """Answer a batch of questions.

        The whole batch is generated even if only some of it is missing: in floating point an answer may depend, at
        ties, on the number of rows that are computed together, and a resumed run must repeat those of an unbroken one.
        """
        rows: list[tuple[PlannedQuestion, Messages]] = []
        failures: list[str] = []
        for question in batch.questions:
            try:
                rows.append((question, question.messages(self._prompts.at(question.offset), batch.earlier)))
            except InputError as problem:
                self._refuse(failures, question, problem)
        lines: list[dict[str, Any]] = []
        while any(question.id in batch.missing for question, _ in rows):
            try:
                outputs: list[Output] = self._vlm.generate(
                    [resolve_media(messages, self._prompts.root) for _, messages in rows],
                    seed=[self._setup.options.seed_of(question.id) for question, _ in rows],
                    **self._setup.options.decoding(batch.questions[0].sampled),
                )
            except InputError:
                usable = [row for row in rows if self._is_usable(*row, failures)]
                if len(usable) == len(rows):
                    raise
                rows = usable
                continue
            every = (self._line(*row, output) for row, output in zip(rows, outputs, strict=True))
            lines = [line for line in every if line["id"] in batch.missing]
            break
        tokens, finishes = sum(len(line["answer_ids"]) for line in lines), tuple(line["finish"] for line in lines)
        return Finished(number, lines, failures, len(lines), tokens, finishes)

    def _is_usable(self, question: PlannedQuestion, messages: Messages, failures: list[str]) -> bool:
        """Whether a question has a prompt that fits the target."""
        try:
            prompt = self._vlm.processor.prompt(resolve_media(messages, self._prompts.root))
            self._vlm.target.traits.limits.check(len(prompt) + self._setup.options.max_new_tokens)
        except InputError as problem:
            self._refuse(failures, question, problem)
            return False
        return True

    def _refuse(self, failures: list[str], question: PlannedQuestion, problem: InputError) -> None:
        place = f"{self._prompts.where(question.line)}, question {question.id}"
        refuse(failures, f"{place}: {str(problem).rstrip('.')}.", self._setup.on_bad_line)

    def _line(self, question: PlannedQuestion, messages: Messages, output: Output) -> dict[str, Any]:
        ids, finish = list(output.tokens), str(output.finish_reason)
        ending: dict[str, int] = {}
        if finish == "eos":
            *ids, ending["eos_id"] = ids
        placeholders = set(self._vlm.target.family.visual_ids.values())
        cut = next((i for i, token in enumerate(ids) if token in placeholders), None)
        if cut is not None:  # a placeholder without its image
            ids, finish, ending = ids[:cut], "visual", {}
        return {
            "id": question.id,
            "messages": messages,
            "answer": decode(self._vlm.processor.tokenizer, ids),
            "answer_ids": ids,
            "finish": finish,
            **ending,
            "temperature": float(self._setup.options.temperature) if question.sampled else 0.0,
            "prompt_tokens": output.stats.prompt_tokens,
        }


def run(worker: Worker, setup: Setup, progress: Callable[[Report], None] = lambda _: None) -> Report:
    """Run a distillation by a model of this process or by actors; lines are in the order of the plan either way."""
    with setup.journal(worker.facts) as journal:
        journal.begin()
        setup.draw(journal.path)
        plan = make_plan(setup.prompts(journal.path), setup.options, setup.on_bad_line)
        worker.begin(journal.path)
        needed = {name for question in plan.questions for _, name in question.before}
        there, earlier, problems = set[str](), dict[str, str](), plan.problems
        for name, text in _answers(journal, plan):
            there.add(name)
            earlier.update({name: text} if name in needed else {})
        report = Report(journal.path, len(plan.questions), len(there), duplicates=plan.duplicates)
        report.failed, report.problems = len(problems), problems[:SHOWN]
        runner = JournalRunner(journal.sync, report, progress)

        def keep(result: Finished) -> None:
            journal.append(result.rows)
            earlier.update((row["id"], row["answer"]) for row in result.rows if row["id"] in needed)

        def pending(stage: Sequence[tuple[int, Sequence[PlannedQuestion], frozenset[str]]]) -> Iterator[Pending]:
            for number, questions, missing in stage:
                names = [name for question in questions for _, name in question.before]
                history = {name: earlier[name] for name in names if name in earlier}
                yield Pending(number, QuestionBatch(questions, missing, history))

        for stage in _stages(plan, there):
            runner.run(worker, pending(stage), keep, in_order=True)
        return report


def _answers(journal: Journal, plan: QuestionPlan) -> Iterator[tuple[str, str]]:
    """Id and text of every answer, all of which must belong to the plan; an unfinished last line is skipped."""
    planned, names = {question.id for question in plan.questions}, set[str]()
    for number, _, row in journal.rows():
        name, text = row.get("id"), row.get("answer")
        if not (isinstance(name, str) and isinstance(text, str)):
            raise SaccadeError(f"{journal.where(number)} is damaged; delete it to continue.")
        if name in names:
            raise SaccadeError(f"{journal.where(number)}: {name} is answered twice; delete one of them.")
        if name not in planned:
            raise SaccadeError(
                f"The output folder holds an answer to {name}, which is not in this prompt set; choose another folder."
            )
        names.add(name)
        yield name, text


def _stages(
    plan: QuestionPlan, there: set[str]
) -> Iterator[list[tuple[int, Sequence[PlannedQuestion], frozenset[str]]]]:
    """Yield unfinished batches that need no answers of each other, with their numbers and the ids without an answer."""
    stage: list[tuple[int, Sequence[PlannedQuestion], frozenset[str]]] = []
    names: set[str] = set()  # of its questions
    for number, questions in enumerate(plan.batches):
        missing = frozenset(question.id for question in questions if question.id not in there)
        if not missing:
            continue
        if any(name in names for question in questions for _, name in question.before):
            yield stage
            stage, names = [], set()
        stage.append((number, questions, missing))
        names |= missing
    if stage:
        yield stage


@dataclass(frozen=True, slots=True)
class Preview:
    """Plan and expected duration of a run."""

    plan: QuestionPlan  # every question
    there: int  # questions answered by earlier attempts
    seconds: float  # expected for the others, from a few batches; 0 when there are none
    memory: int = 0  # bytes in use on the target's GPU so far, or of its weights on a CPU; 0 without a model

    def disk(self, most: int) -> int:
        """Bytes of the answers, of up to ``most`` tokens: the prompts' text, and answers as text and as ids."""
        answers = ((question.length[0] or LETTERS * most, question.length[1]) for question in self.plan.questions)
        return sum(3 * answer + prompt for answer, prompt in answers)


def reckoned(setup: Setup, throughput: float) -> Preview:
    """Plan a run without a model by answer tokens a second; answers are as long as given ones, or as may be."""
    with setup.drawn() as folder:
        plan = make_plan(setup.prompts(folder), setup.options, setup.on_bad_line)
    most = setup.options.max_new_tokens
    tokens = sum(min(question.length[0] // LETTERS or most, most) for question in plan.questions)
    return Preview(plan, 0, tokens / throughput)


def preview(worker: QuestionWorker, setup: Setup) -> Preview:
    """Plan a run, and estimate its duration by answering a few of its batches; nothing is written."""
    journal = setup.journal(worker.facts)
    with setup.drawn() as folder:
        plan = make_plan(setup.prompts(folder), setup.options, setup.on_bad_line)
        there = {name for name, _ in _answers(journal, plan)}
        worker.begin(folder)
        left = [batch for batch in plan.batches if any(question.id not in there for question in batch)]
        chosen = []  # one in the middle of the greedy batches, and of the sampled ones
        for sampled in (False, True):
            alike = [batch for batch in left if batch[0].sampled == sampled and not batch[0].before]
            if alike:
                chosen.append(alike[len(alike) // 2])
        seconds: dict[bool, float] = {}
        for batch in [*chosen[:1], *chosen]:  # the first one to warm up
            pending = Pending(0, QuestionBatch(batch, frozenset(question.id for question in batch)))
            started = time.perf_counter()
            for result in worker.answers(iter([pending])):
                plan.problems += [failure for failure in result.failures if failure not in plan.problems]
            seconds[batch[0].sampled] = (time.perf_counter() - started) / len(batch)
        usual = sum(seconds.values()) / max(len(seconds), 1)
        expected = sum(seconds.get(batch[0].sampled, usual) * len(batch) for batch in left)
        return Preview(plan, len(there), expected, worker.memory)
