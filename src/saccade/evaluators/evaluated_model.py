"""The model behind both plug-ins: answers an evaluator's questions in one running batch, and measures its speed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.engine import Row
from saccade.engine.generation import plan
from saccade.engine.slots import KV_MEMORY_SHARE, free_memory
from saccade.environment import environment
from saccade.errors import InputError, SaccadeError, SaccadeWarning
from saccade.evaluators.continuations import Scorer
from saccade.evaluators.tallies import Speed, speed_file
from saccade.evaluators.task_settings import Decoding, Report, decoding, sort_arguments, without_stop
from saccade.inputs.processor import MediaOptions, Messages, RowInput, seeds_of
from saccade.loading import name_of
from saccade.output import Output
from saccade.schema import check_whole
from saccade.text import text_of
from saccade.vlm import VLM, load

ROWS = 8
"""Rows of the running batch for ``batch_size=auto``."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One question of an evaluator."""

    task: str  # name of the task or data set
    name: str  # of the question, for messages
    messages: Callable[[], Messages]  # makes the conversation
    settings: Mapping[str, Any]  # generation settings of the task
    num_frames: int | None = None
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to an `Ask`."""

    text: str  # up to the first stop string; empty for a question that failed
    prompt_tokens: int = 0
    new_tokens: int = 0
    failure: str = ""  # one sentence where the question could not be used; empty otherwise


@dataclass(eq=False, slots=True)
class Running:
    """A question in the batch."""

    ask: Ask
    row: Row | None  # None where it could not join
    decoding: Decoding
    seconds: float  # its share of the wall time so far
    reply: Reply | None = None  # once it has ended


class EvaluatedModel:
    """A target and a method behind an evaluator's interface."""

    def __init__(
        self,
        given: Mapping[str, Any],
        report: Report,
        target_names: tuple[str, ...] = ("target",),
        rank: int = 0,
    ) -> None:
        arguments = sort_arguments(given, target_names)
        own = arguments.own
        size = own.get("batch_size", 1)
        self.max_rows: int = ROWS if size == "auto" else int(size) if str(size).isdecimal() else size
        check_whole(self.max_rows, 1, "batch_size", error=InputError)
        self.report = _once(report)
        self._defaults = arguments.generation
        self._paragraphs = bool(own.get("paragraphs", False))
        decoding({}, self._defaults, self._paragraphs, self.report)
        path = speed_file(own.get("speed"), rank)
        warnings.filterwarnings("default", category=SaccadeWarning)  # evaluators silence all warnings
        self.vlm: VLM = load(**arguments.loading)
        self._skips = bool(own.get("skip_failed", False))
        self._system = own.get("system")
        self._reading = MediaOptions(own.get("num_frames"), own.get("fps"), text_as_text=True)
        kv_memory = int(KV_MEMORY_SHARE * free_memory(self.vlm.target.device))
        self._batch = self.vlm.engine.open(self.max_rows, kv_memory=kv_memory)
        self._running: list[Running] = []
        self._scorer: Scorer | None = None
        self.speed = Speed(self._facts(), path)

    def _facts(self) -> dict[str, Any]:
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

    def replies(self, asks: Sequence[Ask], ended: Callable[[], object] = lambda: None) -> list[Reply]:
        """Answer questions, as many at once as the batch has rows, and write the speed file."""
        for ask in asks:
            self._decoding(ask)  # a mistake in the settings shows before the first answer
        all_running: list[Running] = []
        try:
            while self._running or len(all_running) < len(asks):
                while len(all_running) < len(asks) and self.has_room:
                    all_running.append(self.start(asks[len(all_running)]))
                    if all_running[-1].reply is not None:
                        ended()
                for _ in self.step():
                    ended()
        finally:
            self.drop()
            self.speed.save()
        return [running.reply for running in all_running if running.reply is not None]

    @property
    def has_room(self) -> bool:
        """Whether another question can join the batch."""
        return len(self._running) < self.max_rows

    def start(self, ask: Ask) -> Running:
        """Put a question into the batch."""
        chosen, started = self._decoding(ask), time.perf_counter()
        try:
            row = self._added(ask, chosen)
        except InputError as problem:
            return Running(ask, None, chosen, 0.0, self._failed(ask, problem))
        running = Running(ask, row, chosen, time.perf_counter() - started)
        self._running.append(running)
        return running

    def step(self) -> list[Running]:
        """Run one step of the batch, and return the questions that ended in it, with their replies."""
        if not self._running:
            return []
        started = time.perf_counter()
        self._batch.step()
        share = (time.perf_counter() - started) / len(self._running)
        ended = []
        for running in self._running:
            running.seconds += share
            if running.row is not None and running.row.done:
                ended.append(running)
        self._running = [running for running in self._running if running not in ended]
        for running in ended:
            running.reply = self._ended(running)
            running.row = None  # frees the memory of its media
        return ended

    def drop(self) -> None:
        """Take all questions out of the batch."""
        for running in self._running:
            if running.row is not None:
                self._batch.cancel(running.row)
        self._running = []

    def score(self, task: str, name: str, messages: Callable[[], Messages], continuation: str) -> tuple[float, bool]:
        """Return the mean negative log-probability of a continuation's tokens, and whether it is the greedy answer."""
        started = time.perf_counter()
        if self._scorer is None:
            self._scorer = Scorer(self.vlm)
        given = RowInput(self._with_system(messages()), options=self._reading)
        try:
            found = self._scorer.score(given.prompt(self.vlm.processor), continuation)
        except SaccadeError as problem:
            raise type(problem)(f"{task}, {name}: {problem}") from problem
        tally = self.speed.of(task)
        tally.scored += 1
        tally.scoring_seconds += time.perf_counter() - started
        return found

    def close(self) -> None:
        """Free caches and models; the speed remains."""
        self._batch.close()
        self._scorer = None
        del self.vlm, self._batch

    def _decoding(self, ask: Ask) -> Decoding:
        return decoding(ask.settings, self._defaults, self._paragraphs, self.report)

    def _with_system(self, messages: Messages) -> Messages:
        if self._system is None or (messages and messages[0].get("role") == "system"):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _added(self, ask: Ask, chosen: Decoding) -> Row:
        vlm = self.vlm
        asked: dict[str, Any] = {
            name: n for name, n in (("num_frames", ask.num_frames), ("fps", ask.fps)) if n is not None
        }
        given = RowInput(self._with_system(ask.messages()), options=replace(self._reading, **asked))
        request = vlm.request(given, seeds_of(chosen.seed, 1)[0])
        room = vlm.target.traits.context
        options = dict(chosen.options)
        if room is not None and (left := room - len(request.prompt)) < options["max_new_tokens"] and left > 0:
            self.report(
                f"Task {ask.task} asks for up to {options['max_new_tokens']} tokens, more than the model's context of "
                f"{room} has room for behind some prompts; those answers end with the context."
            )
            options["max_new_tokens"] = left
        planned = plan(vlm.target, [request.prompt], tokenizer=vlm.processor.tokenizer, **options)
        return self._batch.add(request, planned.rows[0], planned.do_sample)

    def _ended(self, running: Running) -> Reply:
        ask, row = running.ask, running.row
        assert row is not None
        if row.error is not None:
            if isinstance(row.error, SaccadeError):
                return self._failed(ask, row.error)
            raise row.error
        output: Output = row.finish(self.vlm.lossless)
        self.speed.of(ask.task).add(output, running.seconds)
        text = text_of(self.vlm.processor.tokenizer, output.tokens)
        stats = output.stats
        return Reply(without_stop(text, running.decoding.stops), stats.prompt_tokens, stats.new_tokens)

    def _failed(self, ask: Ask, problem: SaccadeError) -> Reply:
        if not self._skips:
            raise type(problem)(
                f"{ask.task}, {ask.name}: {problem} (skip_failed=True leaves such answers empty and goes on.)"
            ) from problem
        self.speed.of(ask.task).failed += 1
        self.report(f"{ask.task}, {ask.name} is left empty: {problem}")
        return Reply("", failure=str(problem))


def _once(report: Report) -> Report:
    """Report every sentence once."""
    known: set[str] = set()

    def tell(sentence: str) -> None:
        if sentence not in known:
            known.add(sentence)
            report(sentence)

    return tell
