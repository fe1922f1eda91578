"""Resumable benchmark runner: methods interleaved per prompt, every answer on disk before the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from saccade.bench import answering, cost
from saccade.bench.answering import TimedAnswer, answer_turns
from saccade.bench.grading import grade
from saccade.bench.judge import parse as parse_judge
from saccade.bench.preparing import Prepared
from saccade.bench.questions import Question
from saccade.bench.records import FILE, Header, Record, Run, Writer, by_name, first_difference, lacks_header, read
from saccade.bench.suites import BASELINE
from saccade.errors import SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.inputs.prompt import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.wording import differences, shortened


class Mismatch(SaccadeError):
    """A lossless method differs from plain decoding in float32 or exact mode."""


def compare_with_plain(record: Record, plain: Sequence[int], target: Target, prompt: Callable[[], Prompt]) -> Record:
    """Complete a record with its comparison with plain decoding, with the target's logits at the first difference."""
    position = first_difference(record.tokens, plain)
    if position is None:
        return replace(record, equal=True)
    question = prompt()
    logits = logits_after(target, Prompt((*question.ids, *plain[:position]), question.media))
    tokens = {name: next(iter(ids[position:]), None) for name, ids in (("ours", record.tokens), ("plain", plain))}
    scores = {name: None if token is None else float(logits[token]) for name, token in tokens.items()}
    return replace(record, equal=False, difference={"position": position, **tokens, "logits": scores})


def logits_after(target: Target, prompt: Prompt) -> torch.Tensor:
    """Return the target's logits `[V]` after a prompt, from a separate prefill."""
    logits = Context(target, 1).load(0, prompt).logits
    assert logits is not None
    return logits.float().cpu()


def earlier_run(folder: Path, prepared: Prepared) -> Run | None:
    """Run of an earlier attempt in a folder; None without one."""
    if lacks_header(folder / FILE):
        return None
    run = read(folder)
    pairs = (
        ("configuration", by_name(run.header.config), by_name(prepared.config())),
        ("configuration", run.header.config, prepared.config()),  # whose lists have an order, too
        ("models", run.header.models, prepared.models()),
        ("environment", run.header.environment, prepared.environment()),
    )
    for what, theirs, ours in pairs:
        for key, old, new in differences(theirs, ours):
            raise SaccadeError(
                f"{folder} holds a run whose {what} differs ({key}: {shortened(old)} there, {shortened(new)} now); "
                "choose another folder with --out, or delete that one."
            )
    return run


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    done: int  # answers on disk, including those of earlier attempts
    total: int  # answers of the complete run
    doing: str  # current work, for display


@dataclass(slots=True)
class Spent:
    """Wall time of a run, in seconds."""

    warmup: float = 0.0  # untimed answers and step costs at the start
    answers: float = 0.0  # timed answers
    traced: float = 0.0  # extra answers whose trees are recorded
    total: float = 0.0  # from the first timed answer to the end

    @property
    def harness(self) -> float:
        """Share of the total outside of answers: scoring, comparing, writing, progress."""
        rest = self.total - self.answers - self.traced
        return rest / self.total if self.total > 0 else 0.0


def balanced(labels: Sequence[str], row: int) -> list[str]:
    """Row of a balanced order: over all rows every method has every place, and follows every other, equally often
    (Williams 1949)."""
    count = len(labels)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0, 1, -1, 2, -2, ...
    order = [labels[(step + row) % count] for step in zigzag]
    return order[::-1] if count % 2 and row // count % 2 else order


class Runner:
    """Runs a prepared suite into a folder, or resumes an earlier attempt."""

    def __init__(self, prepared: Prepared, folder: Path, progress: Callable[[Progress], None] = lambda _: None) -> None:
        self.spent = Spent()
        self._prepared = prepared
        self._folder = folder
        self._progress = progress
        self._done: dict[tuple[str, str, int], Record] = {}
        target = prepared.vlm.target
        self._exact = prepared.compares_tokens and (target.exact or target.dtype == torch.float32)
        self._traced = {q.id for group in prepared.questions.values() for q in group[: prepared.suite.trace]}

    def run(self) -> Run:
        """Answer all questions that have no record yet, then let the user's scorers and the judge score the answers."""
        table = self._prepared.suite.judge
        judge = parse_judge(table, self._prepared.suite.name) if table else None

        def report(done: int, total: int) -> None:
            self._progress(Progress(done, total, "judging"))

        return grade(self._answered(), self._prepared.questions, judge, report)

    def _answered(self) -> Run:
        complete = self._complete(earlier_run(self._folder, self._prepared))
        if complete is not None:
            return complete
        writer = Writer(self._folder)
        try:
            earlier = earlier_run(self._folder, self._prepared)  # again, now that nobody else writes
            complete = self._complete(earlier)
            if complete is not None:
                return complete
            self._answer(writer, resumed=earlier is not None)
        finally:
            writer.close()
        return read(self._folder)

    def _complete(self, earlier: Run | None) -> Run | None:
        """Take over the records of an earlier attempt; return its run if nothing is left to answer."""
        self._done = {r.key: r for r in earlier.records} if earlier else {}
        for record in self._done.values():
            self._require(record)
        return earlier if earlier is not None and not any(self._open(*group[:2]) for group in self._groups()) else None

    def _answer(self, writer: Writer, resumed: bool) -> None:
        """Answer what has no record yet, in a new run behind its header."""
        self._report("warming up")
        started = time.perf_counter()
        self._warm_up()
        header = None if resumed else self._header()
        self.spent.warmup = time.perf_counter() - started
        if header is not None:
            writer.begin(header)
        left = [group for group in self._groups() if self._open(*group[:2])]
        started = time.perf_counter()
        try:
            for question, repeat, order in left:
                self._group(writer, question, repeat, order)
            self._report("done")
        finally:
            self.spent.total = time.perf_counter() - started

    def _groups(self) -> Iterator[tuple[Question, int, list[str]]]:
        """Prompt, repeat and ordered methods of every group; tasks alternate."""
        labels, tasks = list(self._prepared.methods), list(self._prepared.questions.values())
        longest = max(map(len, tasks))
        for repeat in range(self._prepared.suite.repeats):
            for index in range(longest):
                for number, group in enumerate(tasks):
                    if index < len(group):
                        yield group[index], repeat, balanced(labels, index + number + repeat)

    def _open(self, question: Question, repeat: int) -> list[str]:
        """Methods without answers to every turn."""
        ids = [question.turn_id(i) for i in range(len(question.turns))]
        return [label for label in self._prepared.methods if any((i, label, repeat) not in self._done for i in ids)]

    def _warm_up(self) -> None:
        question = next(iter(self._prepared.questions.values()))[0]
        for label, vlm in self._prepared.methods.items():
            for _ in range(self._prepared.suite.warmup):
                answer_turns(vlm, label, question, 0, options=self._prepared.options, seed=0)

    def _header(self) -> Header:
        prepared = self._prepared
        return Header(
            suite=prepared.suite.name,
            config=prepared.config(),
            models=prepared.models(),
            environment=prepared.environment(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            costs=self._costs().as_dict(),
            places=dict(prepared.places),
        )

    def _costs(self) -> cost.Costs:
        """Step times after the first prompt."""
        prepared = self._prepared
        first = next(iter(prepared.questions.values()))[0]
        prompt = prepared.vlm.processor.prompt(first.turns[0].messages, options=MediaOptions(**first.reading))
        trees = [vlm.engine.drafter.max_nodes for vlm in prepared.methods.values() if vlm.engine.drafter]
        text = prepared.vlm.processor.text_only(prompt)
        models = prepared.vlm.target, prompt, prepared.vlm.draft_model, text
        return cost.measure(*models, trees, prepared.heads)

    def _group(self, writer: Writer, question: Question, repeat: int, order: Sequence[str]) -> None:
        """Run all methods on one prompt; answers that precede plain decoding's are compared after it."""
        still_open = self._open(question, repeat)
        media = answering.save(question, self._folder)
        plain = self._earlier(question, repeat)
        waiting: list[list[TimedAnswer]] = []
        for label in (name for name in order if name in still_open):
            self._report(f"{question.id}, {label}")
            answers = answer_turns(
                self._prepared.methods[label],
                label,
                question,
                repeat,
                options=self._prepared.options,
                seed=self._prepared.suite.seed,
                media=media,
                trace=repeat == 0 and question.id in self._traced,
            )
            self.spent.answers += sum(a.seconds for a in answers)
            self.spent.traced += sum(a.traced_seconds for a in answers)
            if label == BASELINE:
                plain = [a.record.tokens for a in answers]
                self._write(writer, [a.record for a in answers])
                for early in waiting:
                    self._write(writer, self._records(early, plain))
            elif plain is None:
                waiting.append(answers)
            else:
                self._write(writer, self._records(answers, plain))

    def _earlier(self, question: Question, repeat: int) -> list[list[int]] | None:
        """Plain decoding's tokens per turn from an earlier attempt."""
        keys = [(question.turn_id(i), BASELINE, repeat) for i in range(len(question.turns))]
        return [self._done[k].tokens for k in keys] if all(k in self._done for k in keys) else None

    def _records(self, answers: Sequence[TimedAnswer], plain: Sequence[Sequence[int]]) -> list[Record]:
        """Records with comparisons; turns after a differing one have another history and are not compared."""
        if not (self._prepared.compares_tokens and answers[0].record.lossless):
            return [a.record for a in answers]
        records: list[Record] = []
        for answer, tokens in zip(answers, plain, strict=True):
            record = answer.record
            if all(r.equal for r in records):
                vlm = self._prepared.vlm
                prompt = partial(vlm.processor.prompt, answer.messages, options=MediaOptions(**answer.reading))
                record = compare_with_plain(record, tokens, vlm.target, prompt)
            records.append(record)
        return records

    def _write(self, writer: Writer, records: Sequence[Record]) -> None:
        for record in records:
            if record.key not in self._done:
                writer.add(record)
                self._done[record.key] = record
        for record in records:
            self._require(record)

    def _require(self, record: Record) -> None:
        if self._exact and record.lossless and record.equal is False:
            first = record.difference or {}
            raise Mismatch(
                f"Method {record.method} is lossless but differs from plain decoding on {record.prompt_id} (repeat "
                f"{record.repeat}) at token {first.get('position')}: {first.get('ours')} instead of "
                f"{first.get('plain')}, logits {first.get('logits')}; in float32 and in exact mode that is a bug in "
                "the method or its drafter's cache."
            )

    def _report(self, doing: str) -> None:
        self._progress(Progress(len(self._done), self._prepared.answers, doing))
