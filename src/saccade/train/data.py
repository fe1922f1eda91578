"""Training samples from a JSON Lines file of target answers, indexed once and read on demand."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch

from saccade.data.conversations import resolve
from saccade.distill.folder import place_of
from saccade.environment import fingerprint, model_facts
from saccade.errors import InputError, SaccadeError, TrainingError
from saccade.files import check_reread
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import InputProcessor, Slot, normalise, with_sources
from saccade.memory_plan import LETTERS, letters
from saccade.target_model.adapter import Target


def end_token(processor: InputProcessor) -> int | None:
    """Return the id that ends an answer: of several, the one that the chat template puts after an assistant's turn.

    Gemma 3 has ids 1 and 106 and ends turns with 106; Llama 3 names 128001 first and ends them with 128009.
    """
    known = processor.eos_token_ids
    if len(known) > 1:
        question: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
        answered = [*question, {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}]
        try:
            before, whole = (processor.prompt(m, add_generation_prompt=False).ids for m in (question, answered))
        except SaccadeError:
            return known[0]
        for token in whole[len(before) :]:
            if token in known:
                return token
    return known[0] if known else None


OnBadLine = Literal["stop", "skip"]

_PER_MEDIUM = 500
"""Tokens assumed per image or video of a line without ``prompt_tokens`` when batches of similar length are formed."""

_END = 1 << 14  # bytes of both ends of a media file that identify it


class Answers:
    """Source of samples: the file that `saccade distill` writes.

    A line is ``{"id", "messages", "answer", "answer_ids", "finish"?, "eos_id"?, "prompt_tokens"?}``; images and videos
    in the messages are ``data:`` URIs or files, relative to the JSON lines file or to the folder in its
    ``distill.json``. An empty answer consists of its end token, or is left out without one.

    Samples whose messages begin with the same question are turns of one conversation (`conversations`).
    """

    def __init__(
        self,
        path: str | Path,
        processor: InputProcessor,
        *,
        on_bad_line: OnBadLine = "stop",
        min_words: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        self._path, self._media, self._teacher = place_of(Path(path).expanduser())
        self._processor, self._max_tokens, self._end = processor, max_tokens, end_token(processor)
        self._stop = on_bad_line == "stop"
        self.bad: dict[int, str] = {}  # line number -> fault, of the unusable lines read so far
        self.short = 0  # number of answers left out for their length
        self._offsets, self._numbers, self._lengths = array("q"), array("q"), array("q")
        self._conversations = array("q")
        content, seen = hashlib.sha256(repr((min_words, max_tokens)).encode()), hashlib.sha256()
        mark = lru_cache(maxsize=4096)(_mark)  # questions about one picture are close together
        offset = 0
        with _opened(self._path) as file:
            for number, line in enumerate(file, 1):
                content.update(line)
                for slot in self._index(number, offset, line, min_words) if line.strip() else ():
                    marks = [mark(path) for path in _paths(slot.source, self._media)]
                    seen.update(repr(marks if isinstance(slot.source, list) else marks[0]).encode())
                offset += len(line)
        self.lengths: Sequence[int] = self._lengths
        self.conversations: Sequence[int] = self._conversations
        self.fingerprint = content.hexdigest()
        self.inputs: Mapping[str, str] = {"media": seen.hexdigest()[:16], "processor": processor.digest}
        if not self._offsets:
            left_out = f" ({self.short} are shorter than {min_words} words)" if self.short else ""
            raise TrainingError(
                f"{self._path} holds no answer to learn from{left_out}; expected what `saccade distill` writes."
            )

    def sample(self, index: int) -> TrainingSample | None:
        """Prepare one sample."""
        number = self._numbers[index]
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            row = _row(line)
            messages, slots = normalise(row["messages"])
            places = [replace(slot, source=_placed(slot.source, self._media)) for slot in slots]
            prompt = self._processor.prompt(with_sources(messages, places))
            answer = self._answer(row)
            if family_of(self._processor.config).visual_mask(answer).any():
                raise TrainingError("the answer holds a placeholder of an image or video without one.")
            if self._max_tokens is not None:
                answer = answer[: max(self._max_tokens - len(prompt), 0)]
            if not answer:
                raise TrainingError(
                    f"the prompt has {len(prompt)} tokens, which leaves no room for an answer within max_tokens = "
                    f"{self._max_tokens}."
                )
        except (InputError, TrainingError) as problem:
            self._refuse(number, str(problem))
            return None
        return TrainingSample(str(row.get("id", number)), prompt, answer)

    def check_target(self, target: Target) -> None:
        """Raise `TrainingError` where ``distill.json`` names another target."""
        ours = model_facts(target.model)
        theirs, keys = self._teacher, ["type", "parameters", "layers", "width", "vocabulary"]
        is_here = all(p.device.type != "meta" for p in target.model.parameters())
        if is_here and ours["dtype"] in ("float32", theirs.get("dtype")):
            ours["digest"] = fingerprint(target.model, getattr(torch, str(theirs.get("dtype")), torch.float32))
            keys.append("digest")
        for key in keys:
            if theirs.get(key, ours[key]) != ours[key]:
                raise TrainingError(
                    f"The answers in {self._path} are those of the target {theirs.get('name')}, not of {ours['name']}: "
                    f"its {key} is {theirs[key]}, here it is {ours[key]}; distill answers of {ours['name']}, or give "
                    "--any-target to train on these."
                )

    def answers(self) -> Iterator[Sequence[int]]:
        """Yield the answers' ids, with end tokens, of the lines that were usable when the file was indexed."""
        with self._path.open("rb") as file:
            for offset in self._offsets:
                file.seek(offset)
                yield self._answer(_row(file.readline()))[: self._max_tokens]

    def _index(self, number: int, offset: int, line: bytes, min_words: int) -> Sequence[Slot]:
        """Remember the place of a line's sample, and return its media; none where the line has no sample."""
        config = self._processor.config.get_text_config(decoder=True)
        known = max(getattr(config, "vocab_size", None) or 0, len(self._processor.tokenizer))
        try:
            row = _row(line)
            highest = max([*row["answer_ids"], row.get("eos_id") or 0])
            if highest >= known:
                raise TrainingError(
                    f"it has the token {highest}, but the target has {known}; give answers of this target."
                )
        except (InputError, TrainingError) as problem:
            if line.endswith(b"\n"):  # or it is still being written
                self._refuse(number, str(problem))
            return ()
        if min_words and len(row["answer"].split()) < min_words:
            self.short += 1
            return ()
        if not self._answer(row):
            self.bad[number] = "the answer is empty, and the target did not end it there."
            return ()
        messages, slots = normalise(row["messages"])
        prompt = row.get("prompt_tokens") or letters(messages) // LETTERS + _PER_MEDIUM * len(slots)
        self._offsets.append(offset)
        self._numbers.append(number)
        self._lengths.append(len(row["answer_ids"]) + prompt)
        self._conversations.append(_conversation(row["messages"]))
        return slots

    def _answer(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the answer's ids, with the end token of a finished answer, which is supervised too."""
        ids, end = tuple(row["answer_ids"]), row.get("eos_id")
        end = self._end if end is None else end
        if row.get("finish") != "eos" or end is None or ids[-1:] == (end,):
            return ids
        return ids if ids and ids[-1] in self._processor.eos_token_ids else (*ids, end)

    def _refuse(self, number: int, why: str) -> None:
        if self._stop:
            raise TrainingError(
                f"{self._path}, line {number}: {why} Correct the line, or leave such lines out with --on-bad-line skip."
            )
        self.bad[number] = why


def check_answers(path: str | Path) -> None:
    """Raise `TrainingError` where the answers at ``path``, as of `Answers`, cannot be opened."""
    with _opened(place_of(Path(path).expanduser())[0]):
        pass


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    check_reread(path, TrainingError)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as problem:
        raise TrainingError(f"Cannot read the answers in {path}: {problem.strerror}.") from problem


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise TrainingError("it is not valid JSON; expected one object per line.") from None
    if not isinstance(row, dict):
        raise TrainingError("it is not a JSON object.")
    for key, kind, word in (("messages", list, "list"), ("answer", str, "string"), ("answer_ids", list, "list")):
        if not isinstance(row.get(key), kind):
            raise TrainingError(f"it has no {word} named {key}.")
    ids = row["answer_ids"]
    if not (ids or row.get("finish")) or not all(type(i) is int and i >= 0 for i in ids):
        raise TrainingError("answer_ids must be a list of at least one token id.")
    for key, least, word in (("eos_id", 0, "a token id"), ("prompt_tokens", 1, "a number of tokens, at least 1")):
        value = row.get(key)
        if value is not None and (type(value) is not int or value < least):
            raise TrainingError(f"{key} must be {word}; leave it out if it is unknown.")
    normalise(row["messages"])
    return row


def _conversation(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a number of the messages up to the first question, which the turns of a conversation share."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    begin = json.dumps(messages[: first + 1], sort_keys=True)
    return int.from_bytes(hashlib.sha256(begin.encode()).digest()[:8], signed=True)


def _mark(source: str | None) -> tuple[int, bytes] | None:
    """Return a file's size and a hash of both its ends, which are equal in copies; None if it cannot be read."""
    try:
        with open(source or "", "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(_END)
            file.seek(max(size - _END, len(first)))
            return size, hashlib.blake2b(first + file.read(_END), digest_size=16).digest()
    except (OSError, ValueError):
        return None


def _paths(source: Any, folder: Path) -> list[str | None]:
    """Files of a medium; None in place of data inside the line."""
    places = [_placed(each, folder) for each in (source if isinstance(source, list) else [source])]
    return [place if isinstance(place, str) and not place.startswith("data:") else None for place in places]


def _placed(source: Any, folder: Path) -> Any:
    if isinstance(source, list):  # a video as a list of frames
        return [_placed(frame, folder) for frame in source]
    return resolve(source, folder) if isinstance(source, str) else source


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One prompt with the target's answer."""

    name: str  # for messages
    prompt: Prompt  # of the target
    answer: tuple[int, ...]  # token ids of its answer, with the end-of-sequence token if it was reached

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt.ids, *self.answer)


class Source(Protocol):
    """A numbered set of samples."""

    lengths: Sequence[int]  # approximate tokens of every sample, for batches of similar length
    conversations: Sequence[int]  # a number per sample, equal for turns of one conversation
    fingerprint: str  # digest of the content, compared on resume
    inputs: Mapping[str, str]  # digests of other inputs of the samples, by name

    def sample(self, index: int) -> TrainingSample | None:
        """Return one sample; None to skip an unusable one."""
        ...

    def answers(self) -> Iterator[Sequence[int]]:
        """Yield the answers' token ids without preparing any prompt."""
        ...


class Listed:
    """Samples in memory, each a conversation of its own."""

    def __init__(self, pairs: Iterable[tuple[Prompt, Sequence[int]]]) -> None:
        self._samples: list[TrainingSample] = []
        for number, (prompt, answer) in enumerate(pairs):
            if not answer:
                raise TrainingError(f"Sample {number} has an empty answer; leave it out.")
            self._samples.append(TrainingSample(str(number), prompt, tuple(answer)))
        if not self._samples:
            raise TrainingError("The training data are empty; give at least one prompt with an answer.")
        self.lengths: Sequence[int] = [len(s.ids) for s in self._samples]
        self.conversations: Sequence[int] = range(len(self._samples))
        content = []
        for sample in self._samples:
            digests = [medium.digest for medium in sample.prompt.media]
            content.append((sample.prompt.ids, sample.answer, digests))
        self.fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()
        self.inputs: Mapping[str, str] = {}

    def sample(self, index: int) -> TrainingSample:
        return self._samples[index]

    def answers(self) -> Iterator[Sequence[int]]:
        return (sample.answer for sample in self._samples)
