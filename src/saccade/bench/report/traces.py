"""Token view: answers token by token, with each step's verified tree and accepted path."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.bench.check import first_difference
from saccade.bench.metrics import block_efficiency
from saccade.bench.records import Record, Run, starts
from saccade.inputs.media.bounds import FORMATS

LARGEST = 640
"""Longest side, in pixels, of a picture in the report; larger ones are scaled down."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture in the page, or the ``problem`` that prevents it."""

    name: str
    uri: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def embed(folder: Path, name: str) -> Medium:
    """Read the file ``name`` of a run's ``media/`` folder as a PNG or JPEG data URI.

    A file that is missing, is no picture or lies outside the folder yields a `Medium` with a ``problem``.
    """
    from PIL import Image, UnidentifiedImageError

    root = (folder / "media").resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        return Medium(name, problem="lies outside the run's media folder")
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.thumbnail((LARGEST, LARGEST))
            picture = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except FileNotFoundError:
        return Medium(name, problem="is not in the run's media folder")
    except UnidentifiedImageError:
        return Medium(name, problem="is no picture, so the report cannot show it")
    except (OSError, ValueError, Image.DecompressionBombError) as problem:
        return Medium(name, problem=f"cannot be read ({type(problem).__name__})")
    small, kind = io.BytesIO(), "png"
    picture.save(small, "PNG", optimize=True)
    if picture.mode == "RGB" and small.tell() > 60_000:  # a photograph: PNG would be several times larger
        small, kind = io.BytesIO(), "jpeg"
        picture.save(small, "JPEG", quality=80, optimize=True)
    data = base64.b64encode(small.getvalue()).decode("ascii")
    return Medium(name, f"data:image/{kind};base64,{data}", picture.width, picture.height)


KNOWN_MARKS = {
    "target": "the target's own",
    "draft": "drafted and accepted",
    "loose": "loosened: drafted, accepted in place of the target's own token",
    "shifted": "shifted: drafted, accepted because the target's token occurs nearby in the draft",
}
"""Meaning of the marks of `saccade.bench.records.Record`."""
MEANINGS = {**KNOWN_MARKS, "other": "another mark (point at the token to read it)"}


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    text: str  # as displayed, with visible line breaks
    mark: str  # as recorded
    kind: str  # the mark if it is one of `KNOWN_MARKS`, else `other`
    step: int  # number of the step that emitted it; 0 without a tree


@dataclass(frozen=True, slots=True)
class Answer:
    """A method's answer to a prompt."""

    record: Record  # of the answer
    tokens: list[Token]  # its tokens
    marks: list[str]  # kinds that occur, in the order of `KNOWN_MARKS`
    steps: list[dict[str, Any]]  # for the script: tree and accepted path of every step
    summary: str  # length and time
    difference: str  # first difference from plain decoding's answer; empty if equal


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question with its media as data URIs and the methods' answers."""

    prompt_id: str
    task: str
    question: str
    media: list[Medium]
    answers: list[Answer]


def prompts(run: Run, count: int) -> list[Prompt]:
    """Return the first ``count`` traced prompts, or of all prompts when none was traced."""
    ids = list(dict.fromkeys(r.prompt_id for r in run.records if r.trees))
    ids = ids or list(dict.fromkeys(r.prompt_id for r in run.records))
    return [_prompt(run, [r for r in run.records if r.prompt_id == one]) for one in ids[:count]]


def _prompt(run: Run, records: Sequence[Record]) -> Prompt:
    chosen: dict[str, Record] = {}
    for record in records:
        if record.method not in chosen or (record.trees and not chosen[record.method].trees):
            chosen[record.method] = record
    first = records[0]
    plain = next((r for r in chosen.values() if r.method == "plain"), None)
    return Prompt(
        first.prompt_id,
        first.task,
        first.question,
        [embed(run.folder, name) for name in first.media],
        [_answer(r, plain) for r in chosen.values()],
    )


def _answer(record: Record, plain: Record | None) -> Answer:
    steps: list[dict[str, Any]] = []
    numbers = [0] * len(record.tokens)
    for start, tree in zip(starts(record.trees), record.trees, strict=True):
        end = min(start + len(tree["path"]), len(record.tokens))
        numbers[start:end] = [len(steps) + 1] * (end - start)
        steps.append(_step(tree, record, start, end))
    tokens = [
        Token(_visible(piece), mark, mark if mark in KNOWN_MARKS else "other", step)
        for piece, mark, step in zip(record.pieces, record.marks, numbers, strict=True)
    ]
    seen = {token.kind for token in tokens}
    marks = [mark for mark in MEANINGS if mark in seen]
    return Answer(record, tokens, marks, steps, _summary(record), _difference(record, plain))


def _summary(record: Record) -> str:
    efficiency, seconds = block_efficiency(record), record.stats["seconds"]["total"]
    per_pass = "" if efficiency is None else f", {efficiency:.2f} per target pass"
    return f"{len(record.tokens)} tokens in {seconds:.3g} s{per_pass}; ended by {record.finish_reason}"


def _step(tree: dict[str, Any], record: Record, start: int, end: int) -> dict[str, Any]:
    """Data for the page's script: node texts, parents, accepted path, marks of the path and the token after it."""
    path, last = list(tree["path"]), end - 1
    kinds = [m if m in KNOWN_MARKS else "other" for m in record.marks[start:end]]
    bonus = _visible(record.pieces[last]) if end > start else None
    if len(path) > len(kinds):  # the answer ended on a draft token, so no bonus token follows
        bonus = None
    elif kinds and record.marks[last] != "target":  # likewise, in old records, whose paths lack that token
        node = _child(tree, path[-1], record.tokens[last])
        path, bonus = (path if node is None else [*path, node]), (bonus if node is None else None)
    return {
        "start": start,
        "nodes": [_visible(piece) for piece in tree["pieces"]],
        "parents": tree["parents"],
        "path": path,
        "kinds": kinds,
        "bonus": bonus,
    }


def _child(tree: dict[str, Any], parent: int, token: int) -> int | None:
    pairs = enumerate(zip(tree["tokens"], tree["parents"], strict=True))
    return next((node for node, (t, p) in pairs if node and p == parent and t == token), None)


def _difference(record: Record, plain: Record | None) -> str:
    first = None if plain is None else first_difference(record.tokens, plain.tokens)
    if plain is None or first is None:
        return ""
    start = f"Leaves plain decoding's answer at position {first}"
    if first == min(len(record.tokens), len(plain.tokens)):
        return f"{start}, where one of them ends."
    return f"{start}: {record.pieces[first]!r} instead of {plain.pieces[first]!r}."


def _visible(piece: str) -> str:
    """Show line breaks as signs, and an incomplete character as a dot."""
    return piece.replace("\n", "↵\n") or "·"
