"""Deterministic plan of a run: deduplicated questions in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade.distill import pocket_source
from saccade.distill.options import Options
from saccade.errors import InputError, SaccadeError
from saccade.inputs.conversations import (
    Conversation,
    Messages,
    check_media,
    media_parts,
    parse_conversation,
    resolve,
    sources_of,
    text_of,
)
from saccade.jobs.elements import row_at, rows


class Duplicates:
    """Index of questions that finds repeated ones.

    Two questions are equal when their messages are equal and their media have the same bytes. Bytes are read only where
    the texts and the sizes of all files agree.
    """

    def __init__(self, root: Path, digest: Callable[[str], str] | None = None) -> None:
        self._root = root
        self._digest = lru_cache(maxsize=4096)(digest or _file_digest)
        self._alike: dict[bytes, tuple[str, list[str]] | None] = {}
        self._same: dict[bytes, str] = {}

    def first(self, name: str, messages: Sequence[dict[str, Any]]) -> str:
        """Return the name of the first equal question; its own when it is new."""
        sources = [resolve(s, self._root) for part in media_parts(messages) for s in sources_of(part)]
        rough = _hash(_bare(messages), [_size(s) for s in sources])
        if rough not in self._alike:
            self._alike[rough] = (name, sources)
            return name
        earlier = self._alike[rough]
        if earlier is not None:  # only now are the first one's media read
            self._same[self._exact(rough, earlier[1])] = earlier[0]
            self._alike[rough] = None
        return self._same.setdefault(self._exact(rough, sources), name)

    def _exact(self, rough: bytes, sources: Sequence[str]) -> bytes:
        return _hash(rough.hex(), [self._digest(source) for source in sources])


def _bare(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the number of files in place of every medium."""
    return [
        {
            **message,
            "content": [
                p if p["type"] == "text" else {"type": p["type"], "files": len(sources_of(p))}
                for p in message["content"]
            ],
        }
        for message in messages
    ]


def _hash(*content: Any) -> bytes:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


def _size(source: str) -> int:
    return len(source) if source.startswith("data:") else Path(source).stat().st_size


def _file_digest(source: str) -> str:
    if source.startswith("data:"):
        return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    with open(source, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


WINDOW = 32
"""Batches whose questions are sorted by length together; a larger window sorts better and shuffles less."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    id: str  # unique in the run: the conversation's own, followed by `/1`, `/2`, ... when it has several questions
    line: int  # number of its line in the prompt set, from 1
    offset: int  # of that line, in bytes
    message: int  # index of the user message to be answered
    sampled: bool  # answered by sampling, not greedily
    length: tuple[int, int]  # of the expected answer and of the prompt, in characters
    # message index and question id of every answer of the target in its history
    before: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class Plan:
    """Questions of a run."""

    batches: list[list[Item]] = field(default_factory=list)  # in their order of generation
    conversations: int = 0  # number of usable lines
    duplicates: int = 0  # number of questions left out because an equal one is planned
    problems: list[str] = field(default_factory=list)  # one sentence per line that cannot be used

    @property
    def items(self) -> Iterator[Item]:
        """All questions, in their order of generation."""
        return (item for batch in self.batches for item in batch)


class Prompts:
    """A file of conversations: one JSON object per line, or one array of them."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path  # of the file
        self.root = root  # folder to which the paths of its media are relative
        try:
            with path.open("rb") as file:
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise SaccadeError(
                f"Cannot read the prompts in {path}: {problem.strerror}; give JSON lines, a JSON array or pocket:TASK."
            ) from problem

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, offset and content of every row."""
        return rows(self.path)

    def at(self, offset: int) -> Conversation:
        """Return the conversation of the row at an offset in bytes."""
        return parse_conversation(row_at(self.path, offset).decode())

    def where(self, line: int) -> str:
        """Name a line for messages."""
        return f"{self.path}, line {line}"


def check_source(source: str, options: Options) -> None:
    """Raise `SaccadeError` for a prompt set that does not exist, without reading it."""
    if source.startswith(pocket_source.PREFIX):
        pocket_source.tasks_of(source, options.grammar)
    elif not Path(source).expanduser().is_file():
        raise SaccadeError(
            f"There is no file {source}; give JSON lines or a JSON array, or pocket:TASK for built-in prompts."
        )


def make_plan(prompts: Prompts, options: Options, on_bad_line: str) -> Plan:
    """Read the prompt set once, and plan its batches."""
    plan, known, names = Plan(), Duplicates(prompts.root), set[str]()
    rounds: dict[int, list[Item]] = {}
    planned = 0
    for number, offset, line in prompts.lines():
        if planned == options.limit:
            break
        try:
            conversation = _read(line, prompts.root)
        except InputError as problem:
            refuse(plan.problems, f"{prompts.where(number)}: {problem}.", on_bad_line)
            continue
        plan.conversations += 1
        name = _unique(conversation.id or f"line-{number}", number, len(conversation.questions), names)
        for round_, item, is_new in _items(conversation, name, number, offset, options, known):
            if not is_new:
                plan.duplicates += 1
            elif planned != options.limit:
                rounds.setdefault(round_ if options.history == "own" else 0, []).append(item)
                planned += 1
    if not planned:
        problems = f" {plan.problems[0]}" if plan.problems else ""
        raise SaccadeError(
            f"{prompts.path} holds no question; expected one JSON object per line, or one array.{problems}"
        )
    for _, items in sorted(rounds.items()):
        plan.batches += _batches(items, options.batch)
    return plan


def refuse(problems: list[str], sentence: str, on_bad_line: str) -> None:
    """Record the fault of a line, or raise `SaccadeError` if it ends the run."""
    if on_bad_line == "stop":
        raise SaccadeError(
            sentence.rstrip(".") + "; correct the line, or leave such lines out with on_bad_line='skip' (--on-bad-line "
            "skip on the command line)."
        )
    problems.append(sentence)


def _read(line: bytes, root: Path) -> Conversation:
    try:
        conversation = parse_conversation(line.decode())
    except UnicodeDecodeError:
        raise InputError("it is not UTF-8 text") from None
    check_media(conversation.messages, root)
    return conversation


def _unique(name: str, line: int, count: int, names: set[str]) -> str:
    """Return the name, with its line appended where it or an id of its questions is taken."""
    while not names.isdisjoint({name, *_ids(name, count)}):
        name = f"{name}@{line}"
    names.update({name, *_ids(name, count)})
    return name


def _ids(name: str, count: int) -> list[str]:
    """Ids of a conversation's questions."""
    return [name] if count == 1 else [f"{name}/{number}" for number in range(1, count + 1)]


def _items(
    conversation: Conversation, name: str, line: int, offset: int, options: Options, known: Duplicates
) -> Iterator[tuple[int, Item, bool]]:
    """Yield round, item, and whether it is new, for every question of a conversation."""
    questions = conversation.questions
    ids = _ids(name, len(questions))
    own = options.history == "own"
    before: tuple[tuple[int, str], ...] = ()
    for round_, message in enumerate(questions):
        item = ids[round_]
        history = conversation.messages[: message + 1]
        answered = {index for index, _ in before}
        compared = [{"role": "assistant", "content": []} if index in answered else m for index, m in enumerate(history)]
        first = known.first(item, compared)
        reference = conversation.messages[message + 1 : message + 2]
        length = (len(text_of(reference[0])) if reference else 0, sum(len(text_of(m)) for m in history))
        yield (
            round_,
            Item(item, line, offset, message, options.samples(item), length, before),
            first == item,
        )
        if own:
            before = (*before, (message + 1, first))


def _batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Group neighbours of the prompt set by decoding and length."""
    for start in range(0, len(items), WINDOW * size):
        window = items[start : start + WINDOW * size]
        for sampled in (False, True):
            alike = sorted((i for i in window if i.sampled == sampled), key=lambda i: i.length)
            yield from (alike[at : at + size] for at in range(0, len(alike), size))


def messages_of(item: Item, conversation: Conversation, answers: Mapping[str, str]) -> Messages:
    """Return the conversation up to the question, with the target's answers in the places that the item names."""
    messages: Messages = [*conversation.messages[: item.message + 1]]
    for index, earlier in item.before:
        if earlier not in answers:
            raise InputError(f"the answer to its earlier turn {earlier} is missing")
        answer: dict[str, Any] = {"type": "text", "text": answers[earlier]}
        messages[index] = {"role": "assistant", "content": [answer]}
    return messages
