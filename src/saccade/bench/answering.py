"""One timed answer and its record, with the question's pictures saved beside it."""

from __future__ import annotations

import os
import re
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from saccade.bench.questions import Question, Turn
from saccade.bench.records import Record
from saccade.errors import SaccadeError, SaccadeWarning
from saccade.inputs.media import load_image
from saccade.output import Output, TreeTrace
from saccade.text import Detokenizer
from saccade.vlm import VLM

FOLDER = "media"


def save(question: Question, run: Path) -> list[list[str]]:
    """Save the pictures of every turn, unless they are there already.

    Returns:
        Per turn the file names below ``media/``.

    Raises:
        SaccadeError: the disk is full or the folder cannot be written.
    """
    return [_save(question.turn_id(i), turn.images, run / FOLDER) for i, turn in enumerate(question.turns)]


def _save(prompt_id: str, sources: Iterable[Any], folder: Path) -> list[str]:
    names = []
    for index, source in enumerate(sources):
        name = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', prompt_id)}-{index}.png"
        names.append(name)
        if (folder / name).exists():
            continue
        part = folder / f"{name}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            load_image(source).save(part, format="PNG")
            os.replace(part, folder / name)
        except OSError as problem:
            raise SaccadeError(
                f"Cannot save the picture {folder / name}: {problem.strerror or problem}; the records so far are "
                "intact, free some space and run the same command again to go on."
            ) from problem
    return names


@dataclass(frozen=True, slots=True)
class Answer:
    """A record and the conversation that led to it, up to and with the question.

    Attributes:
        record: not yet compared with plain decoding.
        messages: the conversation so far, media inside.
        seconds: spent by the model, tokenizing included.
        traced_seconds: spent on the extra answer whose trees are kept.
    """

    record: Record
    messages: list[Mapping[str, Any]]
    seconds: float
    traced_seconds: float


def ask(
    vlm: VLM,
    label: str,
    question: Question,
    repeat: int,
    *,
    options: Mapping[str, Any],
    seed: int,
    media: Sequence[Sequence[str]] = (),
    trace: bool = False,
) -> list[Answer]:
    """Ask every turn of a question.

    Args:
        label: of the method, for the record.
        options: of generation.
        seed: of the suite; the draws of an answer depend on it, the turn and the repeat, not on the method.
        media: per turn the names of its saved pictures.
        trace: answer once more, untimed, and keep the draft trees.
    """
    talk = _Talk(vlm, len(question.turns) > 1, options)
    again = _Talk(vlm, len(question.turns) > 1, {**options, "trace": True})
    answers = []
    for index, turn in enumerate(question.turns):
        seed_of_turn = zlib.crc32(f"{seed}/{question.turn_id(index)}/{repeat}".encode())
        with _heeding() as told:
            said = talk.say(turn, seed_of_turn)
        traced = again.say(turn, seed_of_turn) if trace else None
        record = Record(
            prompt_id=question.turn_id(index),
            task=question.turn_task(index),
            method=label,
            repeat=repeat,
            question=turn.text,
            media=list(media[index]) if media else [],
            text=said.output.text,
            tokens=list(said.output.tokens),
            marks=list(said.output.marks),
            pieces=_pieces(vlm, said.output.tokens),
            finish_reason=said.output.finish_reason,
            lossless=vlm.lossless,
            stats=_stats(said.output, said.inputs),
            scores=turn.score(said.output.text) if turn.score else {},
            peak_bytes=said.peak,
            trees=[_tree(vlm, tree) for tree in traced.trees] if traced else [],
            warnings=list(dict.fromkeys(told)),
        )
        answers.append(Answer(record, said.asked, said.seconds, traced.seconds if traced else 0.0))
    return answers


@dataclass(frozen=True, slots=True)
class _Said:
    output: Output
    asked: list[Mapping[str, Any]]
    inputs: float
    seconds: float
    peak: int | None
    trees: list[TreeTrace]


class _Talk:
    """A conversation with one method; later turns reuse the KV cache of earlier ones."""

    def __init__(self, vlm: VLM, has_turns: bool, options: Mapping[str, Any]) -> None:
        self._vlm = vlm
        self._session = vlm.engine.open(1) if has_turns else None
        self._options = options
        self._messages: list[Mapping[str, Any]] = []
        self._memory = PeakMemory(vlm.target.device)

    def say(self, turn: Turn, seed: int) -> _Said:
        self._messages = [*self._messages, *turn.messages]
        asked = self._messages
        trees: list[TreeTrace] = []
        self._memory.start()
        started = time.perf_counter()
        stream = self._vlm.stream(asked, seed=seed, session=self._session, **self._options)
        inputs = time.perf_counter() - started
        for chunk in stream:
            trees += [tree for tree in chunk.trees if tree is not None]
        output = stream.output  # reads the clock, which waits for the device
        seconds = time.perf_counter() - started
        answer = {"role": "assistant", "content": [{"type": "text", "text": output.text}]}
        self._messages = [*asked, answer]
        return _Said(output, asked, inputs, seconds, self._memory.read(), trees)


@contextmanager
def _heeding() -> Iterator[list[str]]:
    """What Saccade itself warns of; whoever shows warnings still shows them."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", SaccadeWarning)
        show = warnings.showwarning

        def heed(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, SaccadeWarning):
                told.append(str(message))
            show(message, category, *where)

        warnings.showwarning = heed  # type: ignore[assignment]
        yield told


def _stats(output: Output, inputs: float) -> dict[str, Any]:
    stats = output.stats.as_dict()
    stats["seconds"]["inputs"] = round(inputs, 6)
    return stats


def _pieces(vlm: VLM, tokens: Sequence[int]) -> list[str]:
    """The text that every token completed; all pieces together are the text."""
    detokenizer = Detokenizer(vlm.processor.tokenizer)
    pieces = [detokenizer.add([token]) for token in tokens]
    if pieces:
        pieces[-1] += detokenizer.finish()
    return pieces


def _tree(vlm: VLM, tree: TreeTrace) -> dict[str, Any]:
    return {
        "tokens": list(tree.tokens),
        "parents": list(tree.parents),
        "path": list(tree.path),
        "pieces": [_piece(vlm.processor.tokenizer, token) for token in tree.tokens],
    }


@cache
def _piece(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5)


class PeakMemory:
    """Peak memory of the device, or of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works = device.type == "cuda" or _reset()

    def start(self) -> None:
        """Reset the peak."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._works:
            _reset()

    def read(self) -> int | None:
        """Largest number of bytes in use since `start`; None where the system does not report it."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if not self._works:
            return None
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


def _reset() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
        return "VmHWM:" in _STATUS.read_text()
    except OSError:
        return False
