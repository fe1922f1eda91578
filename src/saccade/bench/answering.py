"""Timed answers and their records; the questions' pictures saved with them."""

from __future__ import annotations

import hashlib
import re
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from saccade.bench.questions import Question, UserTurn
from saccade.bench.records import MEDIA, RESUME, Record
from saccade.errors import SaccadeWarning
from saccade.files import write_file
from saccade.grammar import Rollback, json_schema, lark
from saccade.inputs.media import load_image
from saccade.output import Output, TreeTrace
from saccade.stream import Detokenizer
from saccade.vlm import VLM

VALID = "valid"  # score of an answer with a form: whether it is complete and obeys it
_LONGEST = 100  # letters of an id in the name of a picture's file
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def save(question: Question, run: Path) -> list[list[str]]:
    """Save the pictures of every turn that are not saved yet; return their names."""
    saved = []
    for index, turn in enumerate(question.turns):
        prompt_id = question.turn_id(index)
        names = []
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", prompt_id)[:_LONGEST]
        if stem != prompt_id:  # ids that only differ in other letters have pictures of their own
            stem += f"-{hashlib.blake2b(prompt_id.encode(), digest_size=6).hexdigest()}"
        for number, source in enumerate(turn.images):
            names.append(f"{stem}-{number}.png")
            path = run / MEDIA / names[-1]
            if not path.exists():
                write_file(path, partial(load_image(source).save, format="PNG"), advice=RESUME)
        saved.append(names)
    return saved


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Answer to the last message of a conversation."""

    record: Record  # not yet compared with plain decoding
    messages: list[Mapping[str, Any]]  # the conversation up to and including the question, with its media
    seconds: float  # wall time, tokenizing included
    reading: Mapping[str, Any]  # of its videos, as of the question


def answer_turns(
    vlm: VLM,
    label: str,
    question: Question,
    repeat: int,
    *,
    options: Mapping[str, Any],
    seed: int,
    media: Sequence[Sequence[str]] = (),
    trace: bool = False,
    predicted: Sequence[str] = (),
) -> list[TimedAnswer]:
    """Answer every turn of a question; ``predicted`` has what each answer is expected to be."""
    options = question.options(options)
    grammar = constraint(vlm, question)
    if grammar is not None:
        options["logits_processor"] = [grammar]
    conversation = _Conversation(vlm, len(question.turns) > 1, options)
    traced_conversation = _Conversation(vlm, len(question.turns) > 1, {**options, "trace": True})
    answers = []
    for index, turn in enumerate(question.turns):
        seed_of_turn = zlib.crc32(f"{seed}/{question.turn_id(index)}/{repeat}".encode())
        reset_peak(vlm.target.device)
        with _recorded_warnings() as warned:
            output, stats, messages, seconds, _ = conversation.answer(turn, seed_of_turn, *predicted[index : index + 1])
        peak = peak_bytes(vlm.target.device)
        trees: list[dict[str, Any]] = []
        if trace:
            *_, trees = traced_conversation.answer(turn, seed_of_turn, *predicted[index : index + 1])
        scores = turn.score(output.text) if turn.score else {}
        if grammar is not None:
            scores = {**scores, VALID: float(follows(grammar, output.tokens))}
        record = Record(
            prompt_id=question.turn_id(index),
            task=question.turn_task(index),
            method=label,
            repeat=repeat,
            question=turn.text,
            media=list(media[index]) if media else [],
            text=output.text,
            tokens=list(output.tokens),
            marks=list(output.marks),
            pieces=_pieces(vlm, output.tokens),
            finish_reason=output.finish_reason,
            lossless=vlm.lossless,
            stats=stats,
            scores=scores,
            peak_bytes=peak,
            trees=trees,
            warnings=list(dict.fromkeys(warned)),
        )
        answers.append(TimedAnswer(record, messages, seconds, question.reading))
    return answers


def constraint(vlm: VLM, question: Question) -> Rollback | None:
    """Compile the grammar of a question's answers; None where they are free."""
    sizes = vlm.processor.tokenizer, vlm.target.vocab_size
    if question.schema is not None:
        return json_schema(question.schema, *sizes)
    return None if question.lark is None else lark(question.lark, *sizes)


def follows(grammar: Rollback, tokens: Sequence[int]) -> bool:
    """Whether an answer is one of the grammar, and complete."""
    place = grammar.start(())
    for token in tokens:
        if not place.allows(token):
            return False
        place = place.after(token)
    return tokens[-1] in grammar.ends


class _Conversation:
    """Conversation with one method; later turns reuse the KV cache of earlier ones."""

    def __init__(self, vlm: VLM, has_turns: bool, options: Mapping[str, Any]) -> None:
        self._vlm, self._options = vlm, options
        self._session = vlm.engine.open(1) if has_turns else None
        self._messages: list[Mapping[str, Any]] = []

    def answer(
        self, turn: UserTurn, seed: int, prediction: str | None = None
    ) -> tuple[Output, dict[str, Any], list[Mapping[str, Any]], float, list[dict[str, Any]]]:
        """Answer a turn: output, statistics, the conversation before the answer, seconds, and draft trees."""
        messages = [*self._messages, *turn.messages]
        trees: list[dict[str, Any]] = []
        emitted = 0
        started = time.perf_counter()
        stream = self._vlm.stream(messages, prediction=prediction, seed=seed, session=self._session, **self._options)
        inputs = time.perf_counter() - started
        for chunk in stream:
            trees += [_tree(self._vlm, tree, emitted) for tree in chunk.trees if tree is not None]
            emitted += len(chunk.tokens[0])
        output = stream.output  # reads the clock, which waits for the device
        seconds = time.perf_counter() - started
        self._messages = [*messages, {"role": "assistant", "content": [{"type": "text", "text": output.text}]}]
        stats = output.stats.as_dict()
        stats["seconds"]["inputs"] = round(inputs, 6)
        return output, stats, messages, seconds, trees


@contextmanager
def _recorded_warnings() -> Iterator[list[str]]:
    """Collect Saccade's own warnings; all warnings are still shown."""
    messages: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", SaccadeWarning)
        show = warnings.showwarning

        def record(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, SaccadeWarning):
                messages.append(str(message))
            show(message, category, *where)

        warnings.showwarning = record  # type: ignore[assignment]
        yield messages


def _pieces(vlm: VLM, tokens: Sequence[int]) -> list[str]:
    """Text completed by each token; the pieces concatenate to the answer."""
    detokenizer = Detokenizer(vlm.processor.tokenizer)
    pieces = [detokenizer.add([token]) for token in tokens]
    if pieces:
        pieces[-1] += detokenizer.finish()
    return pieces


def _tree(vlm: VLM, tree: TreeTrace, start: int) -> dict[str, Any]:
    return {
        "start": start,
        "tokens": list(tree.tokens),
        "parents": list(tree.parents),
        "path": list(tree.path),
        "pieces": [_piece(vlm.processor.tokenizer, token) for token in tree.tokens],
        "signals": {name: list(values) for name, values in tree.signals.items()},
    }


@cache
def _piece(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory of the device, or of the process on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            _CLEAR.write_text("5")  # see proc(5)


def peak_bytes(device: torch.device) -> int | None:
    """Largest number of bytes in use since `reset_peak`; None where the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = _STATUS.read_text().splitlines()
        _CLEAR.write_text("5")  # where the peak cannot be reset it is none of this answer
    except OSError:
        return None
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak.split()[1]) * 1024
