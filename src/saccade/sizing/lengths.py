"""Tokens of prompts and answers, estimated without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from saccade.inputs.chat import normalise
from saccade.inputs.conversations import resolve
from saccade.sizing.model_size import ModelSize

T = TypeVar("T")

LETTERS = 4
"""Letters per token, about as in English prose."""
LOOKED_AT = 128
"""Samples whose pictures are opened, spread evenly over a file."""
_VIDEO = (500, 2000)
"""Visual tokens and patches assumed of a video, which is not opened."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a set of samples."""

    samples: int  # number of them
    text: float  # mean tokens of a prompt's text
    visual: float  # mean visual tokens of a prompt
    patches: float  # mean patches that the vision tower computes for them
    answer: float  # mean tokens of an answer
    longest: tuple[int, int, int, int]  # text, visual tokens, patches and answer of a long sample
    origin: str  # source of these numbers, in words

    @property
    def tokens(self) -> float:
        """Mean tokens of prompt and answer."""
        return self.text + self.visual + self.answer

    def cut(self, most: int) -> Lengths:
        """Return the lengths with answers cut where prompt and answer have more than ``most`` tokens."""
        text, visual, patches, answer = self.longest
        room = max(most - text - visual, 1)
        fits = max(most - self.text - self.visual, 1.0)
        return replace(self, answer=min(self.answer, fits), longest=(text, visual, patches, min(answer, room)))

    def __str__(self) -> str:
        return (
            f"{self.samples} samples of {self.text:.0f} text, {self.visual:.0f} visual and {self.answer:.0f} answer "
            f"tokens on average; {self.origin}"
        )


ASSUMED = (640, 480, 60, 200, 64_000)
"""Without data: width and height of a picture, tokens of a question and of an answer, and number of samples."""


def assumed(size: ModelSize, missing: str, *, samples: int | None = None, answer: int | None = None) -> Lengths:
    """Return lengths where there are no data yet."""
    width, height, text, usual, many = ASSUMED
    samples, answer = many if samples is None else samples, usual if answer is None else answer
    visual, patches = size.picture(width, height)
    origin = f"assumed, with one {width}x{height} picture each: {missing} is not there yet"
    return Lengths(samples, text, visual, patches, answer, (text, visual, patches, answer), origin)


def of_answers(path: Path, media: Path, size: ModelSize) -> Lengths:
    """Return the lengths of a file of `saccade distill`, read once; lines that cannot be read are left out."""
    texts, answers, places, offset = [], [], [], 0
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is not None:
                texts.append(letters(row["messages"]) // LETTERS)
                answers.append(len(row["answer_ids"]))
                places.append(offset)
            offset += len(line)
        seen = []
        for place in spread(places):
            file.seek(place)
            row = _row(file.readline())
            assert row is not None
            seen.append(pictures(row["messages"], media, size))
    origin = f"pictures of {len(seen)} of them looked at, {LETTERS} letters counted as a token"
    return together(texts, answers, seen, origin)


def together(texts: Sequence[int], answers: Sequence[int], seen: Sequence[tuple[int, int]], origin: str) -> Lengths:
    """Return the lengths of samples: text and answer tokens of all, visual tokens and patches of some."""
    visual, patches = zip(*seen, strict=True) if seen else ((0,), (0,))
    return Lengths(
        len(texts),
        _mean(texts),
        _mean(visual),
        _mean(patches),
        _mean(answers),
        (max(texts, default=0), max(visual), max(patches), max(answers, default=0)),
        origin,
    )


def pictures(messages: Sequence[Mapping[str, Any]], media: Path, size: ModelSize) -> tuple[int, int]:
    """Return visual tokens and patches of a prompt; of a picture only the header is read."""
    visual = patches = 0
    for slot in normalise(messages)[1]:
        found = _VIDEO
        if slot.kind == "image" and isinstance(slot.source, str) and not slot.source.startswith("data:"):
            try:
                with Image.open(resolve(slot.source, media)) as image:
                    found = size.picture(*image.size)
            except OSError:
                found = size.picture(*ASSUMED[:2])
        elif slot.kind == "image":
            found = size.picture(*ASSUMED[:2])
        visual, patches = visual + found[0], patches + found[1]
    return visual, patches


def letters(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return the letters of all texts of a prompt."""
    total = 0
    for message in messages:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        total += sum(len(part.get("text") or "") for part in parts)
    return total


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        usable = isinstance(row["messages"], list) and isinstance(row["answer_ids"], list)
    except (ValueError, KeyError, TypeError):
        return None
    return row if usable else None


def spread(items: Sequence[T]) -> Sequence[T]:
    """Return at most `LOOKED_AT` of these, evenly."""
    return items[:: -(-len(items) // LOOKED_AT) or 1]


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(len(values), 1)
