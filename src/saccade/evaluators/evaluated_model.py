"""The model after both plug-ins: reads tasks' settings, answers questions in one running batch, measures its speed."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from saccade.engine import Request
from saccade.engine.batch import Entry, Feed
from saccade.engine.row import UNSUPPORTED, RowPlan, plan
from saccade.engine.slots import KV_MEMORY_SHARE
from saccade.environment import environment
from saccade.errors import InputError, SaccadeError, SaccadeWarning
from saccade.files import write_file
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import MediaOptions, Messages, RowInput, seeds_of
from saccade.loading import name_of
from saccade.options import check_whole
from saccade.stream import GenerationOptions, text_of
from saccade.target_model.context import Context
from saccade.vlm import VLM, load
from saccade.wording import count

NEW_TOKENS = 1024
"""Limit of an answer where neither the task nor the caller sets one."""
ALIASES = {"max_gen_toks": "max_new_tokens", "max_tokens": "max_new_tokens", "stop": "until", "stop_sequences": "until"}
"""Names of generation settings in tasks -> the usual ones."""

ELSEWHERE = {
    "image_aspect_ratio": "the checkpoint's image processor decides how pictures are scaled",
    "skip_special_tokens": "answers are decoded without special tokens",
    "use_cache": "the KV cache is always used",
}
"""Settings of tasks that need nothing here, with the reason that is reported."""

OF_SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OBJECTS = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
GENERATION = {*GenerationOptions.__annotations__, *UNSUPPORTED, *ALIASES, "until", "seed"} - {*_OBJECTS}
"""Accepted names of generation settings; `saccade.engine.row` refuses unsupported values."""


@dataclass(slots=True)
class PluginOptions:
    """Arguments of the plug-ins themselves."""

    batch_size: Any = 1  # rows of the running batch, or `auto`
    system: str | None = None  # system prompt
    speed: str | None = None  # JSON file of the speed
    skip_failed: bool = False  # leave the answer to an unusable question empty
    paragraphs: bool = False  # leave out stop strings of white space
    num_frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.batch_size == "auto":
            self.batch_size = 8
        elif str(self.batch_size).isdecimal():
            self.batch_size = int(self.batch_size)
        check_whole(self.batch_size, 1, "batch_size", error=InputError)


def sort_arguments(
    arguments: Mapping[str, Any], target_names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any], PluginOptions]:
    """Sort arguments: those of `saccade.load`, generation settings where the task has none, and the plug-in's."""
    values = {name: value for name, value in arguments.items() if value is not None}
    targets = [name for name in target_names if name in values]
    if len(targets) != 1:
        raise InputError(
            f"Exactly one of {' and '.join(target_names)} must name the target, such as {target_names[0]}=pocket; "
            f"{'both were' if targets else 'none was'} given."
        )
    values["target"] = values.pop(targets[0])
    if isinstance(values.get("heads"), str):  # folders between semicolons: an evaluator's arguments hold no lists
        entries = [entry.strip() for entry in values["heads"].split(";") if entry.strip()]
        values["heads"] = [entry for entry in entries if "=" not in entry]
        if not values["heads"]:
            values["heads"] = dict(entry.split("=", 1) for entry in entries)
        elif len(values["heads"]) < len(entries):
            raise InputError(
                f"Either all heads have a name (NAME=FOLDER;NAME=FOLDER) or none, not {'; '.join(entries)}."
            )
    if "device" in values:
        values.setdefault("device_map", values.pop("device"))
    plugin = {name: values.pop(name) for name in PluginOptions.__slots__ if name in values}
    generation = {name: values.pop(name) for name in list(values) if name in GENERATION}
    return values, generation, PluginOptions(**plugin)


def _stops(value: Any) -> list[str]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not all(entry is None or isinstance(entry, str) for entry in entries):
        raise InputError(f"The setting until must be a string or a list of strings, not {value!r}.")
    return [entry for entry in entries if entry]


Speed = dict[str, float]
"""Sums over the answers of a task, or of all, by the names of `SUMS`."""
_STATS = ("prompt_tokens", "new_tokens", "decoded_tokens", "target_passes", "drafted_tokens", "accepted_tokens")
SUMS = ("answers", "failed", "cut", *_STATS, "seconds", "scored", "scoring_seconds")
"""Answers that were generated, left empty, and ended at their limit; their `Stats`; wall time, reading of media and
tokenization included; continuations that were scored, which takes no drafts, and wall time for them."""


def rates(speed: Speed) -> dict[str, float]:
    """Tokens per second, tokens per target pass (prefill excluded), and accepted share of drafted tokens."""
    return {
        "tokens_per_second": round(speed["new_tokens"] / (speed["seconds"] or 1), 4),
        "tokens_per_pass": round(speed["decoded_tokens"] / (speed["target_passes"] or 1), 4),
        "acceptance": round(speed["accepted_tokens"] / (speed["drafted_tokens"] or 1), 4),
    }


def _rounded(speed: Speed) -> dict[str, float]:
    return {name: round(value, 4) for name, value in speed.items()} | rates(speed)


def described(speed: Speed) -> str:
    """A sentence without its full stop."""
    answers = count(int(speed["answers"]), "answer")
    tokens = count(int(speed["new_tokens"]), "token")
    per_second, per_pass, acceptance = rates(speed).values()
    return (
        f"{answers} with {tokens} in {speed['seconds']:.1f} s: {per_second:.1f} tokens/s, {per_pass:.2f} tokens per "
        f"target pass, {acceptance:.2f} of the drafted tokens accepted"
    )


@dataclass(eq=False, slots=True)
class TaskQuestion(Entry):
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


class EvaluatedModel:
    """A target and a method after an evaluator's interface."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        log: Callable[[str], None],  # takes one sentence for the evaluator's log
        target_names: tuple[str, ...] = ("target",),
        rank: int = 0,  # of this process; those after the first put it into the name of their speed file
    ) -> None:
        loading, self._defaults, self._options = sort_arguments(arguments, target_names)
        self._log, self._logged = log, set[str]()
        self._decoding({})
        self._path: Path | None = None
        if self._options.speed is not None:
            path = Path(self._options.speed).expanduser()
            if path.is_dir():
                raise SaccadeError(f"speed={path} is a folder; give the name of a JSON file in it.")
            self._path = path.with_name(f"{path.stem}.{rank}{path.suffix}") if rank else path
        warnings.filterwarnings("default", category=SaccadeWarning)  # evaluators silence all warnings
        self.vlm: VLM = load(**loading)
        self._media = MediaOptions(num_frames=self._options.num_frames, fps=self._options.fps, text_as_text=True)
        self.max_rows: int = self._options.batch_size
        kv_memory = int(KV_MEMORY_SHARE * self.vlm.engine.free_memory())
        self._feed = Feed(self.vlm.engine.open(self.max_rows, kv_memory=kv_memory), self._starts, self.max_rows)
        self._scoring = Context(self.vlm.target, 1)
        self._facts = {
            "target": name_of(self.vlm.target.model),
            "drafter": name_of(self.vlm.draft_model.model) if self.vlm.draft_model else self.vlm.head_name,
            "method": self.vlm.method,
            "options": self.vlm.options,
            "lossless": self.vlm.lossless,
            "dtype": str(self.vlm.target.dtype).removeprefix("torch."),
            "rows": self.max_rows,
            "environment": environment(self.vlm.target.device),
        }
        self.speeds = defaultdict[str, Speed](lambda: dict.fromkeys(SUMS, 0))  # by task

    @property
    def total(self) -> Speed:
        """Sums over all tasks."""
        return {name: sum(speed[name] for speed in self.speeds.values()) for name in SUMS}

    def save(self) -> None:
        """Write the speed file, where one is named."""
        if self._path is not None:
            tasks = {name: _rounded(speed) for name, speed in self.speeds.items()}
            content = {"run": self._facts, "total": _rounded(self.total), "tasks": tasks}
            text = json.dumps(content, indent=2)
            write_file(self._path, f"{text}\n", advice="choose another file with speed=FILE")

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
        answers = dict[TaskQuestion, TaskAnswer]()
        for question in questions:
            self.add(question)
        try:
            while len(answers) < len(questions):
                for question in self.step():
                    answers[question] = self.answer(question)
                    ended()
        finally:
            self._feed.clear()
            self.save()
        return [answers[question] for question in questions]

    def add(self, question: TaskQuestion) -> None:
        """Queue a question."""
        self._feed.add(question)

    def step(self) -> list[TaskQuestion]:
        """Run one step of the batch, whose time counts in equal parts for its rows; return the questions that ended."""
        feed = self._feed
        feed.fill()
        running, started = feed.running, time.perf_counter()
        feed.step()
        spent = time.perf_counter() - started
        for question in running:
            self.speeds[question.task]["seconds"] += spent / len(running)
        return [question for question in feed.pop_changed() if question.done]

    def answer(self, question: TaskQuestion) -> TaskAnswer:
        """Answer to a question that has ended; raises its error unless failed questions are skipped."""
        problem, speed, place = question.error, self.speeds[question.task], f"{question.task}, {question.name}"
        if isinstance(problem, SaccadeError):
            if not self._options.skip_failed:
                advice = "(skip_failed=True leaves such answers empty and goes on.)"
                raise type(problem)(f"{place}: {problem} {advice}") from problem
            speed["failed"] += 1
            self.log(f"{place} is left empty: {problem}")
            return TaskAnswer("", failure=str(problem))
        if problem is not None:
            raise problem
        output = question.rows[0].finish(self.vlm.lossless)
        speed["answers"] += 1
        speed["cut"] += output.finish_reason == "length"
        for name in _STATS:
            speed[name] += getattr(output.stats, name)
        text = text_of(self.vlm.processor.tokenizer, output.tokens)
        stops = self._decoding(question.settings)[0].get("stop_strings", ())
        end = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        return TaskAnswer(text[:end], output.stats.prompt_tokens, output.stats.new_tokens)

    def score(self, question: TaskQuestion, continuation: str) -> tuple[float, bool]:
        """Return the mean negative log-probability of a continuation's tokens, and whether it is the greedy answer."""
        started = time.perf_counter()
        ids = self.vlm.processor.tokenizer(continuation.lstrip(), add_special_tokens=False)["input_ids"]
        try:
            if not ids:
                raise InputError("The continuation is empty, so it has no probability; give one of at least one token.")
            loss, is_greedy = self._teacher_forced(self._input(question).prompt(self.vlm.processor), ids)
        except SaccadeError as problem:
            raise type(problem)(f"{question.task}, {question.name}: {problem}") from problem
        speed = self.speeds[question.task]
        speed["scored"] += 1
        speed["scoring_seconds"] += time.perf_counter() - started
        return loss, is_greedy

    @torch.inference_mode()
    def _teacher_forced(self, prompt: Prompt, ids: list[int]) -> tuple[float, bool]:
        """Mean loss of a continuation by the target alone; prompts that share a beginning share its prefill."""
        context, device = self._scoring, self.vlm.target.device
        context.target.traits.limits.check(len(prompt) + len(ids))
        first = context.load(0, prompt).logits
        assert first is not None
        logits, block = first[None], ids[:-1]
        if block:
            context.cache.reserve(0, context.lengths[0] + len(block))
            rest = context.forward([0], torch.tensor([block], device=device)).logits[0]
            context.commit([0], [list(range(len(block)))], [block])
            logits = torch.cat((logits, rest))  # [len(ids), V]
        expected = torch.tensor(ids, device=device)
        loss = torch.nn.functional.cross_entropy(logits.float(), expected)
        return float(loss), bool((logits.argmax(-1) == expected).all())

    def close(self) -> None:
        """Free caches and models; the speed remains."""
        self._feed.batch.close()
        del self.vlm, self._feed, self._scoring

    def _decoding(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Return the generation options and the seed of a task's settings."""
        options: dict[str, Any] = {}
        for source in (self._defaults, settings):
            options |= {ALIASES.get(name, name): value for name, value in source.items()}
        for name in ELSEWHERE.keys() & options.keys():
            self.log(f"The task's setting {name}={options.pop(name)!r} is left out: {ELSEWHERE[name]}.")
        if unknown := sorted(set(options) - GENERATION):
            raise InputError(
                f"The generation setting {unknown[0]}={options[unknown[0]]!r} is not known here; expected options of "
                "Hugging Face's GenerationConfig, until and seed. Take it out of the task."
            )
        stops = [*_stops(options.pop("until", None)), *_stops(options.pop("stop_strings", None))]
        if self._options.paragraphs:
            stops = [stop for stop in stops if stop.strip()]
        seed = options.pop("seed", None)
        options = {"max_new_tokens": NEW_TOKENS} | {name: value for name, value in options.items() if value is not None}
        longest = options["max_new_tokens"]
        if isinstance(longest, float) and math.isfinite(longest) and longest == int(longest):
            options["max_new_tokens"] = int(longest)  # an evaluator's parser makes floats of numbers
        temperature, wanted = options.get("temperature"), options.get("do_sample")
        samples = bool(temperature) if wanted is None else bool(wanted) and temperature != 0
        if wanted and not samples:
            self.log("The task asks for do_sample=True at temperature 0, which is greedy decoding.")
        if temperature and not samples:
            self.log(f"The task asks for do_sample=False, so its temperature={temperature} has no effect.")
        if not samples:
            options = {name: value for name, value in options.items() if name not in OF_SAMPLING}
        if stops:
            options["stop_strings"] = list(dict.fromkeys(stops))
        return {**options, "do_sample": samples}, seed

    def _input(self, question: TaskQuestion) -> RowInput:
        messages, system = question.messages(), self._options.system
        if system is not None and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": system}, *messages]
        return RowInput(messages, options=replace(self._media, **question.sampling))

    def _starts(self, question: TaskQuestion) -> list[tuple[Request, RowPlan]]:
        started = time.perf_counter()
        vlm, (options, seed) = self.vlm, self._decoding(question.settings)
        request = vlm.request(self._input(question), seeds_of(seed, 1)[0])
        room = vlm.target.traits.limits.context
        if room is not None and 0 < room - len(request.prompt) < options["max_new_tokens"]:
            self.log(
                f"Task {question.task} asks for up to {options['max_new_tokens']} tokens, more than the model's "
                f"context of {room} has room for after some prompts; those answers end with the context."
            )
            options["max_new_tokens"] = room - len(request.prompt)
        (planned,) = plan(vlm.target, [request.prompt], tokenizer=vlm.processor.tokenizer, **options)
        self.speeds[question.task]["seconds"] += time.perf_counter() - started
        return [(request, planned)]
