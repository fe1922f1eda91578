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


class Seen:
    """The questions so far.

    Two questions are the same when their messages are and their media have the same bytes. Bytes are read only where
    the texts and the sizes of all files agree.

    Args:
        root: folder of the media.
        digest: hash of what lies in a file.
    """

    def __init__(self, root: Path, digest: Callable[[str], str] | None = None) -> None:
        self._root = root
        self._digest = lru_cache(maxsize=4096)(digest or _file_digest)
        self._alike: dict[bytes, tuple[str, list[str]] | None] = {}
        self._same: dict[bytes, str] = {}

    def first(self, name: str, messages: Sequence[dict[str, Any]]) -> str:
        """The name under which this question came first; its own when it is new."""
        sources = [resolve(s, self._root) for part in media_parts(messages) for s in sources_of(part)]
        rough = _hash(_bare(messages), [_size(s) for s in sources])
        if rough not in self._alike:
            self._alike[rough] = (name, sources)
            return name
        earlier = self._alike[rough]
        if earlier is not None:  # the second of its kind: now the first one's media are read, too
            self._same[self._exact(rough, earlier[1])] = earlier[0]
            self._alike[rough] = None
        return self._same.setdefault(self._exact(rough, sources), name)

    def _exact(self, rough: bytes, sources: Sequence[str]) -> bytes:
        return _hash(rough.hex(), [self._digest(source) for source in sources])


def _bare(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the number of files in the place of every medium."""
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
"""Batches whose questions are sorted by length together; more would sort better, and mix the prompt set less."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        id: unique in the run: the conversation's own, with ``/1``, ``/2``, ... behind it when it asks several.
        line: of the prompt set, from 1.
        offset: of that line, in bytes.
        message: number of the message that asks.
        sampled: answered by sampling, not greedily.
        length: expected answer and prompt, in characters.
        before: ids of the answers in its history by the number of their message, where it holds the target's own.
    """

    id: str
    line: int
    offset: int
    message: int
    sampled: bool
    length: tuple[int, int]
    before: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class Plan:
    """What a run asks.

    Attributes:
        batches: in the order in which they are asked; a batch is sampled or greedy as a whole.
        conversations: lines that could be used.
        duplicates: questions left out because the same one is asked already.
        problems: one sentence per line that cannot be used.
    """

    batches: list[list[Item]] = field(default_factory=list)
    conversations: int = 0
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def items(self) -> Iterator[Item]:
        """Every question, in the order in which they are asked."""
        return (item for batch in self.batches for item in batch)


class Prompts:
    """A file of conversations, one JSON object per line.

    Args:
        path: of the file.
        root: folder to which the paths of its media are relative.

    Raises:
        SaccadeError: the file cannot be read.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.root = root
        try:
            with path.open("rb") as file:
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise SaccadeError(
                f"Cannot read the prompts in {path}: {problem.strerror}; give a file of JSON lines, or pocket:TASK."
            ) from problem

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, offset and content of every line that is not blank."""
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)

    def at(self, offset: int) -> Conversation:
        """The conversation of the line that starts there."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return parse_conversation(file.readline().decode())

    def where(self, line: int) -> str:
        """A line, for messages."""
        return f"{self.path}, line {line}"


def check_source(source: str, options: Options) -> None:
    """Raise `SaccadeError` for a prompt set that is not there, without reading it."""
    if source.startswith(pocket_source.PREFIX):
        pocket_source.tasks_of(source, options.grammar)
    elif not Path(source).expanduser().is_file():
        raise SaccadeError(
            f"There is no file {source}; give a file of JSON lines, or pocket:TASK for built-in prompts."
        )


def make_plan(prompts: Prompts, options: Options, on_bad_line: str) -> Plan:
    """Read the whole prompt set once.

    Args:
        on_bad_line: ``stop`` at a line that cannot be used, or ``skip`` it.

    Raises:
        SaccadeError: nothing can be asked, or a line cannot be used and ``on_bad_line`` is ``stop``.
    """
    plan, seen, names = Plan(), Seen(prompts.root), set[str]()
    rounds: dict[int, list[Item]] = {}
    asked = 0
    for number, offset, line in prompts.lines():
        if asked == options.limit:
            break
        try:
            conversation = _read(line, prompts.root)
        except InputError as problem:
            refuse(plan.problems, f"{prompts.where(number)}: {problem}.", on_bad_line)
            continue
        plan.conversations += 1
        name = _unique(conversation.id or f"line-{number}", number, len(conversation.questions), names)
        for round_, item, is_new in _items(conversation, name, number, offset, options, seen):
            if not is_new:
                plan.duplicates += 1
            elif asked != options.limit:
                rounds.setdefault(round_ if options.history == "own" else 0, []).append(item)
                asked += 1
    if not asked:
        problems = f" {plan.problems[0]}" if plan.problems else ""
        raise SaccadeError(
            f"{prompts.path} holds no question to ask; expected one JSON object per line.{problems}"
        )
    for _, items in sorted(rounds.items()):
        plan.batches += _batches(items, options.batch)
    return plan


def refuse(problems: list[str], sentence: str, on_bad_line: str) -> None:
    """Note what is wrong with a line, or raise `SaccadeError` if it ends the run."""
    if on_bad_line == "stop":
        raise SaccadeError(
            sentence.rstrip(".")
            + "; correct the line, or leave such lines out with on_bad_line='skip' (--on-bad-line "
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
    """The name, with the line behind it when something earlier is called so, or as one of its questions would be."""
    while not names.isdisjoint({name, *_ids(name, count)}):
        name = f"{name}@{line}"
    names.update({name, *_ids(name, count)})
    return name


def _ids(name: str, count: int) -> list[str]:
    """Of a conversation's questions."""
    return [name] if count == 1 else [f"{name}/{number}" for number in range(1, count + 1)]


def _items(
    conversation: Conversation, name: str, line: int, offset: int, options: Options, seen: Seen
) -> Iterator[tuple[int, Item, bool]]:
    """Round, item, and whether nobody has asked it before, for every question of a conversation."""
    questions = conversation.questions
    ids = _ids(name, len(questions))
    own = options.history == "own"
    before: tuple[tuple[int, str], ...] = ()
    for round_, message in enumerate(questions):
        item = ids[round_]
        history = conversation.messages[: message + 1]
        answered = {index for index, _ in before}
        compared = [
            {"role": "assistant", "content": []} if index in answered else m
            for index, m in enumerate(history)
        ]
        first = seen.first(item, compared)
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
    """Neighbours in the prompt set that decode alike and are about equally long."""
    for start in range(0, len(items), WINDOW * size):
        window = items[start : start + WINDOW * size]
        for sampled in (False, True):
            alike = sorted((i for i in window if i.sampled == sampled), key=lambda i: i.length)
            yield from (alike[at : at + size] for at in range(0, len(alike), size))


def asked_messages(item: Item, conversation: Conversation, answers: Mapping[str, str]) -> Messages:
    """The conversation up to the question, with the target's own earlier answers where the item holds them.

    Raises:
        InputError: an earlier answer is missing, because its question could not be asked.
    """
    told: Messages = [*conversation.messages[: item.message + 1]]
    for index, earlier in item.before:
        if earlier not in answers:
            raise InputError(f"the answer to its earlier turn {earlier} is missing")
        answer: dict[str, Any] = {"type": "text", "text": answers[earlier]}
        told[index] = {"role": "assistant", "content": [answer]}
    return told
