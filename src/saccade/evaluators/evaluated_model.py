"""The model behind both plug-ins: answers tasks' questions in one running batch, and measures its speed."""

from __future__ import annotations

import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from saccade.engine import Row
from saccade.engine.row import plan
from saccade.engine.slots import KV_MEMORY_SHARE, free_memory
from saccade.environment import environment
from saccade.errors import InputError, SaccadeError, SaccadeWarning
from saccade.evaluators.task_settings import AnswerSettings, Log, decoding, sort_arguments
from saccade.files import write_file
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import MediaOptions, Messages, RowInput, seeds_of
from saccade.loading import name_of
from saccade.stream import text_of
from saccade.target_model.context import Context
from saccade.vlm import VLM, load
from saccade.wording import count

CHUNK = 1024
"""Tokens of a scored continuation per pass."""
_COUNTS = ("prompt_tokens", "new_tokens", "decoded_tokens", "target_passes", "drafted_tokens", "accepted_tokens")


@dataclass(slots=True)
class TaskSpeed:
    """Sums over the answers of a task, or of all."""

    answers: int = 0  # that were generated
    failed: int = 0  # answers left empty because their question could not be used
    cut: int = 0  # answers that ended at their limit of tokens
    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0  # wall time, reading of media and tokenization included
    scored: int = 0  # continuations whose log-probability was computed; they take no drafts
    scoring_seconds: float = 0.0  # wall time for them

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second, tokens per target pass (prefill excluded), and accepted share of drafted tokens."""
        return {
            "tokens_per_second": round(self.new_tokens / (self.seconds or 1), 4),
            "tokens_per_pass": round(self.decoded_tokens / (self.target_passes or 1), 4),
            "acceptance": round(self.accepted_tokens / (self.drafted_tokens or 1), 4),
        }

    def as_dict(self) -> dict[str, Any]:
        """All sums and rates as JSON values."""
        seconds = round(self.seconds, 4)
        scoring = round(self.scoring_seconds, 4)
        return {**asdict(self), **self.rates, "seconds": seconds, "scoring_seconds": scoring}

    def __str__(self) -> str:
        rates = self.rates
        return (
            f"{count(self.answers, 'answer')} with {count(self.new_tokens, 'token')} in {self.seconds:.1f} s: "
            f"{rates['tokens_per_second']:.1f} tokens/s, {rates['tokens_per_pass']:.2f} tokens per target pass, "
            f"{rates['acceptance']:.2f} of the drafted tokens accepted"
        )


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """One question of an evaluator."""

    task: str  # name of the task or data set
    name: str  # of the question, for messages
    messages: Callable[[], Messages]  # makes the conversation
    settings: Mapping[str, Any]  # generation settings of the task
    sampling: Mapping[str, Any] = field(default_factory=dict)  # `num_frames` and `fps` of its videos


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """Answer to a `TaskQuestion`."""

    text: str  # up to the first stop string; empty for a question that failed
    prompt_tokens: int = 0
    new_tokens: int = 0
    failure: str = ""  # one sentence where the question could not be used; empty otherwise


@dataclass(eq=False, slots=True)
class RunningQuestion:
    """A question in the batch."""

    question: TaskQuestion
    stops: tuple[str, ...]
    row: Row | None = None  # None where it could not join
    problem: InputError | None = None  # then
    seconds: float = 0.0  # its share of the wall time so far

    @property
    def done(self) -> bool:
        """Whether its answer can be made."""
        return self.row is None or self.row.done


class EvaluatedModel:
    """A target and a method behind an evaluator's interface."""

    def __init__(
        self, arguments: Mapping[str, Any], log: Log, target_names: tuple[str, ...] = ("target",), rank: int = 0
    ) -> None:
        loading, self._defaults, self._options = sort_arguments(arguments, target_names)
        self._log, self._logged = log, set[str]()
        self._decoding({})
        self._path = _speed_file(self._options.speed, rank)
        warnings.filterwarnings("default", category=SaccadeWarning)  # evaluators silence all warnings
        self.vlm: VLM = load(**loading)
        self._media = MediaOptions(self._options.num_frames, self._options.fps, text_as_text=True)
        kv_memory = int(KV_MEMORY_SHARE * free_memory(self.vlm.target.device))
        self.max_rows: int = self._options.batch_size
        self._batch = self.vlm.engine.open(self.max_rows, kv_memory=kv_memory)
        self._running: list[RunningQuestion] = []
        self._scoring: Context | None = None
        self._facts = self._header()
        self.speeds: dict[str, TaskSpeed] = {}
        """By task."""

    def _header(self) -> dict[str, Any]:
        vlm = self.vlm
        drafter = None if vlm.draft_model is None else name_of(vlm.draft_model.model)
        return {
            "target": name_of(vlm.target.model),
            "drafter": drafter or vlm.head_name,
            "method": vlm.method,
            "options": vlm.options,
            "lossless": vlm.lossless,
            "dtype": str(vlm.target.dtype).removeprefix("torch."),
            "rows": self.max_rows,
            "environment": environment(vlm.target.device),
        }

    @property
    def total(self) -> TaskSpeed:
        """Sums over all tasks."""
        rows = [asdict(speed) for speed in self.speeds.values()]
        return TaskSpeed(**{name: sum(row[name] for row in rows) for name in TaskSpeed.__slots__})

    def save(self) -> None:
        """Write the speed file, where one is named."""
        if self._path is not None:
            tasks = {name: speed.as_dict() for name, speed in self.speeds.items()}
            content = {"run": self._facts, "total": self.total.as_dict(), "tasks": tasks}
            write_file(self._path, json.dumps(content, indent=2) + "\n", advice="choose another file with speed=FILE")

    def log(self, sentence: str) -> None:
        """Log a sentence once."""
        if sentence not in self._logged:
            self._logged.add(sentence)
            self._log(sentence)

    def answers(
        self, questions: Sequence[TaskQuestion], ended: Callable[[], object] = lambda: None
    ) -> list[TaskAnswer]:
        """Answer questions, as many at once as the batch has rows, and write the speed file."""
        for question in questions:
            self._decoding(question.settings)  # a mistake in the settings shows before the first answer
        waiting = deque(enumerate(questions))
        running: dict[int, RunningQuestion] = {}
        answers: dict[int, TaskAnswer] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.max_rows:
                    number, question = waiting.popleft()
                    running[number] = self.start(question)
                self.step()
                for number in [number for number, each in running.items() if each.done]:
                    answers[number] = self.answer(running.pop(number))
                    ended()
        finally:
            for each in self._running:
                if each.row is not None:
                    self._batch.cancel(each.row)
            self._running = []
            self.save()
        return [answers[number] for number in range(len(questions))]

    def start(self, question: TaskQuestion) -> RunningQuestion:
        """Put a question into the batch."""
        chosen = self._decoding(question.settings)
        started = time.perf_counter()
        running = RunningQuestion(question, chosen.stops)
        try:
            running.row = self._row(question, chosen)
        except InputError as problem:
            running.problem = problem
            return running
        running.seconds = time.perf_counter() - started
        self._running.append(running)
        return running

    def step(self) -> None:
        """Run one step of the batch."""
        if not self._running:
            return
        started = time.perf_counter()
        self._batch.step()
        share = (time.perf_counter() - started) / len(self._running)
        for running in self._running:
            running.seconds += share
        self._running = [running for running in self._running if not running.done]

    def answer(self, running: RunningQuestion) -> TaskAnswer:
        """Answer to a question that is done; raises its error unless failed questions are skipped."""
        question = running.question
        row = running.row
        problem = running.problem if row is None else row.error
        speed = self.speeds.setdefault(question.task, TaskSpeed())
        if isinstance(problem, SaccadeError):
            if not self._options.skip_failed:
                raise type(problem)(
                    f"{question.task}, {question.name}: {problem} (skip_failed=True leaves such answers empty and goes "
                    "on.)"
                ) from problem
            speed.failed += 1
            self.log(f"{question.task}, {question.name} is left empty: {problem}")
            return TaskAnswer("", failure=str(problem))
        if problem is not None:
            raise problem
        assert row is not None
        output = row.finish(self.vlm.lossless)
        stats = output.stats
        speed.answers += 1
        speed.cut += output.finish_reason == "length"
        speed.seconds += running.seconds
        for name in _COUNTS:
            setattr(speed, name, getattr(speed, name) + getattr(stats, name))
        text = text_of(self.vlm.processor.tokenizer, output.tokens)
        ends = [text.index(stop) for stop in running.stops if stop in text]
        return TaskAnswer(text[: min(ends, default=len(text))], stats.prompt_tokens, stats.new_tokens)

    def score(self, question: TaskQuestion, continuation: str) -> tuple[float, bool]:
        """Return the mean negative log-probability of a continuation's tokens, and whether it is the greedy answer."""
        started = time.perf_counter()
        prompt = self._input(question)
        ids = self.vlm.processor.tokenizer(continuation.lstrip(), add_special_tokens=False)["input_ids"]
        try:
            if not ids:
                raise InputError("The continuation is empty, so it has no probability; give one of at least one token.")
            loss, is_greedy = self._teacher_forced(prompt.prompt(self.vlm.processor), ids)
        except SaccadeError as problem:
            raise type(problem)(f"{question.task}, {question.name}: {problem}") from problem
        speed = self.speeds.setdefault(question.task, TaskSpeed())
        speed.scored += 1
        speed.scoring_seconds += time.perf_counter() - started
        return loss / len(ids), is_greedy

    @torch.inference_mode()
    def _teacher_forced(self, prompt: Prompt, ids: list[int]) -> tuple[float, bool]:
        """Loss of a continuation, summed, by the target alone; prompts that share a beginning share its prefill."""
        if self._scoring is None:
            self._scoring = Context(self.vlm.target, 1)
        context = self._scoring
        device = self.vlm.target.device
        context.target.traits.limits.check(len(prompt) + len(ids))
        first = context.load(0, prompt).logits
        assert first is not None
        losses = []
        hits = []
        logits = first[None]
        start = 0
        while True:
            expected = torch.tensor(ids[start : start + len(logits)], device=device)
            losses.append(torch.nn.functional.cross_entropy(logits.float(), expected, reduction="sum"))
            hits.append((logits.argmax(-1) == expected).all())
            start += len(expected)
            if start == len(ids):
                return float(torch.stack(losses).sum()), bool(torch.stack(hits).all())
            # The last token's own logits are not needed.
            block = ids[start - 1 : min(start - 1 + CHUNK, len(ids) - 1)]
            context.cache.reserve(0, context.lengths[0] + len(block))
            logits = context.forward([0], torch.tensor([block], device=device)).logits[0]
            context.commit([0], [list(range(len(block)))], [block])

    def close(self) -> None:
        """Free caches and models; the speed remains."""
        self._batch.close()
        self._scoring = None
        del self.vlm, self._batch

    def _decoding(self, settings: Mapping[str, Any]) -> AnswerSettings:
        return decoding(settings, self._defaults, self._options.paragraphs, self.log)

    def _input(self, question: TaskQuestion) -> RowInput:
        messages = question.messages()
        system = self._options.system
        if system is not None and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": system}, *messages]
        return RowInput(messages, options=replace(self._media, **question.sampling))

    def _row(self, question: TaskQuestion, chosen: AnswerSettings) -> Row:
        vlm = self.vlm
        options = dict(chosen.options)
        request = vlm.request(self._input(question), seeds_of(chosen.seed, 1)[0])
        room = vlm.target.traits.limits.context
        if room is not None and 0 < room - len(request.prompt) < options["max_new_tokens"]:
            self.log(
                f"Task {question.task} asks for up to {options['max_new_tokens']} tokens, more than the model's "
                f"context of {room} has room for behind some prompts; those answers end with the context."
            )
            options["max_new_tokens"] = room - len(request.prompt)
        (planned,) = plan(vlm.target, [request.prompt], tokenizer=vlm.processor.tokenizer, **options)
        return self._batch.add(request, planned)


def _speed_file(name: str | None, rank: int) -> Path | None:
    """Path of the speed file of one process; those of further processes get their number."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        raise SaccadeError(f"speed={name} is a folder; give the name of a JSON file in it.")
    return path if rank == 0 else path.with_name(f"{path.stem}.{rank}{path.suffix}")
