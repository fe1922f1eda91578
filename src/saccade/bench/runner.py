"""Resumable benchmark runner: methods interleaved per prompt, every answer on disk before the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from saccade.bench import answering, cost
from saccade.bench.answering import TimedAnswer, answer_turns
from saccade.bench.expectations import PLAIN
from saccade.bench.grading import grade
from saccade.bench.judge import parse as parse_judge
from saccade.bench.preparing import Prepared
from saccade.bench.questions import Question, digest
from saccade.bench.records import (
    FILE,
    Header,
    LineFile,
    Record,
    RecordedRun,
    by_name,
    difference_of,
    first_difference,
    lacks_header,
    read,
)
from saccade.bench.suites import BASELINE
from saccade.errors import SaccadeError
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import MediaOptions
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.wording import differences, shortened


class Mismatch(SaccadeError):
    """A lossless method differs from plain decoding in float32 or exact mode."""


def logits_after(target: Target, prompt: Prompt) -> torch.Tensor:
    """Return the target's logits `[V]` after a prompt, from a separate prefill."""
    logits = Context(target, 1).load(0, prompt).logits
    assert logits is not None
    return logits.float().cpu()


def grown(header: Header, prepared: Prepared) -> Header:
    """Header of a run whose questions are the first of each task's now, for all of them; of any other run itself."""
    config = header.config
    now = prepared.config()
    if config["prompts"] == now["prompts"]:
        return header
    sizes = {name: task["count"] for name, task in config["prompts"].items()}
    for name, group in prepared.questions.items():
        first = group[: sizes.get(name, 0)]
        if {"count": len(first), "digest": digest(first)} != config["prompts"].get(name):
            return header
    counts = {task["name"]: task["count"] for task in now["tasks"]}
    tasks = [{**task, "count": counts.get(task["name"])} for task in config["tasks"]]
    config = {**config, "per_task": now["per_task"], "tasks": tasks, "prompts": now["prompts"]}
    return replace(header, config=config, grown=[*header.grown, sum(sizes.values())])


def earlier_run(folder: Path, prepared: Prepared) -> RecordedRun | None:
    """Run of an earlier attempt in a folder, perhaps of fewer questions; None without one."""
    if lacks_header(folder / FILE):
        return None
    run = read(folder)
    config, now = grown(run.header, prepared).config, prepared.config()
    pairs = (
        ("configuration", by_name(config), by_name(now)),
        ("configuration", config, now),  # whose lists have an order, too
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
        self._prepared = prepared
        self._folder = folder
        self._progress = progress
        self._done: dict[tuple[str, str, int], Record] = {}
        target = prepared.vlm.target
        self._exact = prepared.compares_tokens and (target.exact or target.dtype == torch.float32)
        self._traced = {q.id for group in prepared.questions.values() for q in group[: prepared.suite.trace]}

    def run(self) -> RecordedRun:
        """Answer all questions that have no record yet, then let the user's scorers and the judge score the answers."""
        table = self._prepared.suite.judge
        judge = parse_judge(table, self._prepared.suite.name) if table else None

        def report(done: int, total: int) -> None:
            self._progress(Progress(done, total, "judging"))

        return grade(self._answered(), self._prepared.questions, judge, report)

    def _answered(self) -> RecordedRun:
        earlier = self._resumed()
        if earlier is not None and not self._left():
            return earlier
        with LineFile(self._folder / FILE) as file:
            earlier = self._resumed()  # again, now that nobody else writes
            left = self._left()
            if earlier is None or left:
                self._answer(file, left, earlier.header if earlier else None)
        return read(self._folder)

    def _resumed(self) -> RecordedRun | None:
        """Take over the records of an earlier attempt."""
        earlier = earlier_run(self._folder, self._prepared)
        self._done = {r.key: r for r in earlier.records} if earlier else {}
        for record in self._done.values():
            self._require(record)
        return earlier

    def _left(self) -> list[tuple[Question, int, list[str]]]:
        """Groups in which a method has no answer to every turn."""
        return [group for group in self._groups() if self._open(*group[:2])]

    def _answer(self, file: LineFile, left: Sequence[tuple[Question, int, list[str]]], old: Header | None) -> None:
        self._report("warming up")
        suite = self._prepared.suite
        first = next(iter(self._prepared.questions.values()))[0]
        for label, vlm in self._prepared.methods.items():
            for _ in range(suite.warmup):
                answer_turns(vlm, label, first, 0, options=self._prepared.options, seed=0)
        header = grown(old, self._prepared) if old else self._header(first)
        if header != old:
            file.begin(header)
        for question, repeat, order in left:
            self._group(file, question, repeat, order)
        self._report("done")

    def _groups(self) -> Iterator[tuple[Question, int, list[str]]]:
        """Prompt, repeat and ordered methods of every group; tasks alternate."""
        labels = list(self._prepared.methods)
        tasks = list(self._prepared.questions.values())
        longest = max(map(len, tasks))
        for repeat in range(self._prepared.suite.repeats):
            for index in range(longest):
                for number, group in enumerate(tasks):
                    if index < len(group):
                        yield group[index], repeat, balanced(labels, index + number + repeat)

    def _open(self, question: Question, repeat: int) -> list[str]:
        """Methods without answers to every turn."""
        labels = self._prepared.methods
        return [label for label in labels if not all(key in self._done for key in self._keys(question, label, repeat))]

    def _header(self, first: Question) -> Header:
        """Header of a new run, with step times after the first prompt."""
        prepared = self._prepared
        prompt = prepared.vlm.processor.prompt(first.turns[0].messages, options=MediaOptions(**first.reading))
        trees = [vlm.engine.drafter.facts.max_nodes for vlm in prepared.methods.values() if vlm.engine.drafter]
        text = prepared.vlm.processor.text_only(prompt)
        models = prepared.vlm.target, prompt, prepared.vlm.draft_model, text
        return Header(
            suite=prepared.suite.name,
            config=prepared.config(),
            models=prepared.models(),
            environment=prepared.environment(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            costs=asdict(cost.measure(*models, trees, prepared.heads)),
            places=dict(prepared.places),
        )

    def _group(self, file: LineFile, question: Question, repeat: int, order: Sequence[str]) -> None:
        """Run all methods on one prompt; answers that precede plain decoding's are compared after it."""
        prepared = self._prepared
        still_open = self._open(question, repeat)
        media = answering.save(question, self._folder)
        keys = self._keys(question, BASELINE, repeat)
        plain = [self._done[key].tokens for key in keys if key in self._done]  # of an earlier attempt
        predicted = self._predicted(question)
        waiting: list[list[TimedAnswer]] = []
        for label in (name for name in order if name in still_open):
            self._report(f"{question.id}, {label}")
            answers = answer_turns(
                prepared.methods[label],
                label,
                question,
                repeat,
                options=prepared.options,
                seed=prepared.suite.seed,
                media=media,
                trace=repeat == 0 and question.id in self._traced,
                predicted=predicted,
            )
            if label == BASELINE:
                plain = [a.record.tokens for a in answers]
                self._write(file, [a.record for a in answers])
            else:
                waiting.append(answers)
            if len(plain) == len(keys):
                for each in waiting:
                    self._write(file, self._compared(each, plain))
                waiting.clear()

    def _keys(self, question: Question, label: str, repeat: int) -> list[tuple[str, str, int]]:
        return [(question.turn_id(turn), label, repeat) for turn in range(len(question.turns))]

    def _predicted(self, question: Question) -> list[str]:
        """Predictions of a question's answers; plain decoding's own are answered once more, untimed, where needed."""
        if question.prediction is None:
            return []
        texts = [turn.answer or "" for turn in question.turns]
        if question.prediction.of == PLAIN:
            keys = self._keys(question, BASELINE, 0)
            if all(key in self._done for key in keys):
                texts = [self._done[key].text for key in keys]
            else:
                self._report(f"{question.id}, its prediction")
                vlm, seed = self._prepared.methods[BASELINE], self._prepared.suite.seed
                answers = answer_turns(vlm, BASELINE, question, 0, options=self._prepared.options, seed=seed)
                texts = [answer.record.text for answer in answers]
        seeds = [question.turn_id(turn) for turn in range(len(texts))]
        return [question.prediction.predict(text, seed) for text, seed in zip(texts, seeds, strict=True)]

    def _compared(self, answers: Sequence[TimedAnswer], plain: Sequence[Sequence[int]]) -> list[Record]:
        """Records with comparisons with plain decoding, and the target's logits at the first difference.

        Turns after a differing one have another history and are not compared.
        """
        if not (self._prepared.compares_tokens and answers[0].record.lossless):
            return [answer.record for answer in answers]
        vlm = self._prepared.vlm
        records = list[Record]()
        same = True
        for answer, expected in zip(answers, plain, strict=True):
            record = answer.record
            position = first_difference(record.tokens, expected)
            if same and position is None:
                record = replace(record, equal=True)
            elif same:
                same = False
                prompt = vlm.processor.prompt(answer.messages, options=MediaOptions(**answer.reading))
                logits = logits_after(vlm.target, Prompt((*prompt.ids, *expected[:position]), prompt.media))
                both = {"ours": record.tokens, "plain": expected}
                tokens = {name: next(iter(ids[position:]), None) for name, ids in both.items()}
                scores = {name: None if token is None else float(logits[token]) for name, token in tokens.items()}
                record = replace(record, equal=False, difference={"position": position, **tokens, "logits": scores})
            records.append(record)
        return records

    def _write(self, file: LineFile, records: Sequence[Record]) -> None:
        for record in records:
            if record.key not in self._done:
                file.add_record(record)
                self._done[record.key] = record
        for record in records:
            self._require(record)

    def _require(self, record: Record) -> None:
        if self._exact and record.lossless and record.equal is False:
            raise Mismatch(
                f"Method {record.method} is lossless but differs from plain decoding on {record.prompt_id} (repeat "
                f"{record.repeat}) at {difference_of(record)}; in float32 and in exact mode that is a bug in the "
                "method or its drafter's cache."
            )

    def _report(self, doing: str) -> None:
        self._progress(Progress(len(self._done), self._prepared.answers, doing))
