"""Options of a distillation, its prompts, and its plan: deduplicated questions in batches, equal in every attempt."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.data.conversations import (
    Conversation,
    Messages,
    check_media,
    media_parts,
    parse_conversation,
    resolve,
    sources_of,
    text_of,
)
from saccade.errors import InputError, SaccadeError
from saccade.files import check_reread, write_file
from saccade.jobs.items import json_row_at, json_rows
from saccade.jobs.job import key_of
from saccade.options import check_keys, check_whole
from saccade.pocket import WORLD, Sample, draw, lacks
from saccade.pocket.sample import UNSEEN_BY_HEADS

FIRST_SEED = 1_000_000
"""Pocket samples for training are drawn from here on; evaluation, benchmarks and the demo draw below."""
WINDOW = 32  # batches whose questions are sorted by length together; a larger window sorts better and shuffles less


@dataclass(frozen=True, slots=True)
class Options:
    """Choice of questions and decoding, which determine the answers; a resumed run must repeat them."""

    sampled_share: float = 0.5  # share of the questions answered by sampling; the others are answered greedily
    temperature: float = 1.0  # of the sampled answers, whose distribution is cut nowhere (no top-p, no top-k)
    max_new_tokens: int = 256  # longest answer
    batch: int = 8  # questions per batch
    seed: int = 0  # decides which questions are sampled, and their draws
    history: str = "reference"  # content of earlier assistant turns
    limit: int | None = None  # number of questions, the first ones; None for all
    count: int = 1000  # of a pocket source, samples of every task
    first_seed: int = FIRST_SEED  # of a pocket source, number of the first sample
    grammar: str = "dense"  # of a pocket source, `dense` or `verbose`

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch", "count", *(["limit"] if self.limit is not None else [])):
            check_whole(getattr(self, name), 1, name, error=InputError)
        if not 0 <= self.sampled_share <= 1:
            raise InputError(f"sampled_share must be from 0 (all greedy) to 1, not {self.sampled_share}.")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(
                f"temperature must be above 0, not {self.temperature}; for greedy answers set sampled_share to 0 "
                "(--sampled-share 0 on the command line)."
            )
        if self.history not in ("reference", "own"):
            raise InputError(f"history must be reference or own, not {self.history!r}.")
        if self.first_seed < FIRST_SEED:
            raise InputError(
                f"first_seed must be at least {FIRST_SEED}, not {self.first_seed}; evaluation draws below."
            )

    @classmethod
    def checked(cls, on_bad_line: str, options: Mapping[str, Any]) -> Options:
        """Return the options of a run."""
        if on_bad_line not in ("stop", "skip"):
            raise InputError(f"on_bad_line must be stop or skip, not {on_bad_line!r}.")
        check_keys(options, cls.__slots__, "Options of a distillation", error=InputError)
        return cls(**options)

    def samples(self, name: str) -> bool:
        """Whether the question of that id is answered by sampling."""
        return key_of(f"{self.seed}/share/{name}") >> 1 < self.sampled_share * 2**63

    def seed_of(self, name: str) -> int:
        """Return the seed of a question's random generator: a function of its id, equal in every attempt."""
        return key_of(f"{self.seed}/draws/{name}") >> 1

    def decoding(self, sampled: bool) -> dict[str, Any]:
        """Arguments of `saccade.VLM.generate`; the checkpoint's own penalties stay."""
        sampling = {"temperature": float(self.temperature), "top_k": 0, "top_p": 1.0} if sampled else {}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": sampled, **sampling}


class Duplicates:
    """Index of questions that finds repeated ones.

    Two questions are equal when their messages are equal and their media have the same bytes. Bytes are read only where
    the texts and the sizes of all files agree.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._digest = lru_cache(maxsize=4096)(_file_digest)
        self._alike: dict[bytes, tuple[str, list[str]] | None] = {}
        self._same: dict[bytes, str] = {}

    def first(self, name: str, messages: Sequence[dict[str, Any]]) -> str:
        """Return the name of the first equal question; its own when it is new."""
        sources = [resolve(s, self._root) for part in media_parts(messages) for s in sources_of(part)]
        bare = [  # with the number of files in place of every medium
            [p if p["type"] == "text" else {"type": p["type"], "files": len(sources_of(p))} for p in message["content"]]
            for message in messages
        ]
        texts = [{**message, "content": content} for message, content in zip(messages, bare, strict=True)]
        sizes = []
        for source in sources:
            sizes.append(len(source) if source.startswith("data:") else Path(source).stat().st_size)
        rough = _hash(texts, sizes)
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


def _hash(*content: Any) -> bytes:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


def _file_digest(source: str) -> str:
    if source.startswith("data:"):
        return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    with open(source, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@dataclass(frozen=True, slots=True)
class PlannedQuestion:
    """One question."""

    id: str  # unique in the run: the conversation's own, followed by `/1`, `/2`, ... when it has several questions
    line: int  # number of its line in the prompt set, from 1
    offset: int  # of that line, in bytes
    message: int  # index of the user message to be answered
    sampled: bool  # answered by sampling, not greedily
    length: tuple[int, int]  # of the expected answer and of the prompt, in characters
    before: tuple[tuple[int, str], ...] = ()
    """Message index and question id of every answer of the target in its history."""

    def messages(self, conversation: Conversation, answers: Mapping[str, str]) -> Messages:
        """Return the conversation up to the question, with the target's answers in their places."""
        messages: Messages = [*conversation.messages[: self.message + 1]]
        for index, earlier in self.before:
            if earlier not in answers:
                raise InputError(f"the answer to its earlier turn {earlier} is missing")
            messages[index] = {"role": "assistant", "content": [{"type": "text", "text": answers[earlier]}]}
        return messages


@dataclass(slots=True)
class QuestionPlan:
    """Questions of a run."""

    batches: list[list[PlannedQuestion]] = field(default_factory=list)  # in their order of generation
    conversations: int = 0  # number of usable lines
    duplicates: int = 0  # number of questions left out because an equal one is planned
    problems: list[str] = field(default_factory=list)  # one sentence per line that cannot be used

    @property
    def questions(self) -> list[PlannedQuestion]:
        return [question for batch in self.batches for question in batch]


class Prompts:
    """A file of conversations: one JSON object per line, or one array of them."""

    def __init__(self, path: Path, root: Path) -> None:
        check_reread(path, SaccadeError)
        if not path.is_file():
            raise SaccadeError(
                f"There is no file {path}; give JSON lines or a JSON array, or pocket:TASK for built-in prompts."
            )
        self.path = path  # of the file
        self.root = root  # folder to which the paths of its media are relative

    @property
    def digest(self) -> str:
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise SaccadeError(f"Cannot read the prompts in {self.path}: {problem.strerror}.") from problem

    def at(self, offset: int) -> Conversation:
        """Return the conversation of the row at an offset in bytes."""
        return parse_conversation(json_row_at(self.path, offset).decode())

    def where(self, line: int) -> str:
        """Name a line for messages."""
        return f"{self.path}, line {line}"


def make_plan(prompts: Prompts, options: Options, on_bad_line: str) -> QuestionPlan:
    """Read the prompt set once, and plan its batches."""
    plan, known, names = QuestionPlan(), Duplicates(prompts.root), set[str]()
    rounds: dict[int, list[PlannedQuestion]] = {}
    planned = 0
    for number, offset, line in json_rows(prompts.path):
        if planned == options.limit:
            break
        try:
            conversation = parse_conversation(line.decode())
            check_media(conversation.messages, prompts.root)
        except UnicodeDecodeError:
            refuse(plan.problems, f"{prompts.where(number)}: it is not UTF-8 text.", on_bad_line)
            continue
        except InputError as problem:
            refuse(plan.problems, f"{prompts.where(number)}: {problem}.", on_bad_line)
            continue
        plan.conversations += 1
        ids = _unique_ids(conversation.id or f"line-{number}", number, len(conversation.questions), names)
        before: tuple[tuple[int, str], ...] = ()
        for round_, (name, message) in enumerate(zip(ids, conversation.questions, strict=True)):
            history, replaced = conversation.messages[: message + 1], {index for index, _ in before}
            compared = [{"role": "assistant", "content": []} if i in replaced else m for i, m in enumerate(history)]
            first = known.first(name, compared)
            if first != name:
                plan.duplicates += 1
            elif planned != options.limit:
                reference = conversation.messages[message + 1 : message + 2]
                expected = len(text_of(reference[0])) if reference else 0
                length = expected, sum(len(text_of(m)) for m in history)
                question = PlannedQuestion(name, number, offset, message, options.samples(name), length, before)
                rounds.setdefault(round_ if options.history == "own" else 0, []).append(question)
                planned += 1
            if options.history == "own":
                before = (*before, (message + 1, first))
    if not planned:
        problems = f" {plan.problems[0]}" if plan.problems else ""
        raise SaccadeError(
            f"{prompts.path} holds no question; expected one JSON object per line, or one array.{problems}"
        )
    for _, questions in sorted(rounds.items()):
        plan.batches += _batches(questions, options.batch)
    return plan


def refuse(problems: list[str], sentence: str, on_bad_line: str) -> None:
    """Record the fault of a line, or raise `SaccadeError` if it ends the run."""
    if on_bad_line == "stop":
        raise SaccadeError(
            sentence.rstrip(".") + "; correct the line, or leave such lines out with on_bad_line='skip' (--on-bad-line "
            "skip on the command line)."
        )
    problems.append(sentence)


def _unique_ids(name: str, line: int, count: int, names: set[str]) -> list[str]:
    """Ids of a conversation's questions, whose name is followed by its line where one of them is taken."""
    while True:
        ids = [name] if count == 1 else [f"{name}/{number}" for number in range(1, count + 1)]
        if names.isdisjoint({name, *ids}):
            names.update({name, *ids})
            return ids
        name = f"{name}@{line}"


def _batches(questions: Sequence[PlannedQuestion], size: int) -> Iterator[list[PlannedQuestion]]:
    """Group neighbours of the prompt set by decoding and length."""
    for start in range(0, len(questions), WINDOW * size):
        window = questions[start : start + WINDOW * size]
        for sampled in (False, True):
            alike = sorted((q for q in window if q.sampled == sampled), key=lambda q: q.length)
            yield from (alike[at : at + size] for at in range(0, len(alike), size))


PREFIX = "pocket:"
FILE = "prompts.jsonl"
MEDIA = "media"


def tasks_of(source: str, grammar: str) -> list[str]:
    """Tasks named by ``pocket:TASK,TASK``; ``pocket:all`` names all that the built-in heads were trained on."""
    named = [name.strip() for name in source.removeprefix(PREFIX).split(",") if name.strip()]
    tasks = [task for task in WORLD if task not in UNSEEN_BY_HEADS] if named == ["all"] else list(dict.fromkeys(named))
    if not tasks:
        raise InputError(f"{source!r} names no task; give pocket:all, or pocket: and some of {', '.join(WORLD)}.")
    for task in tasks:
        if reason := lacks(task, grammar):
            raise InputError(reason)
    return tasks


def write_prompts(folder: Path, tasks: Sequence[str], options: Options) -> Path:
    """Draw the samples into ``prompts.jsonl`` and ``media/``, unless an earlier attempt did.

    Videos are saved as single frames, which need no decoder and lose nothing.
    """
    path = folder / FILE
    if path.is_file():
        return path

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            for seed in range(options.first_seed, options.first_seed + options.count):
                for task in tasks:
                    line = _line(draw(seed, task, options.grammar), seed, folder)
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    write_file(path, write, advice="free some space or choose another folder")
    return path


def _line(sample: Sample, seed: int, folder: Path) -> dict[str, Any]:
    """Sample as a conversation with its true answers, its media saved."""
    numbers = itertools.count()

    def saved(picture: Image.Image) -> str:
        path = f"{MEDIA}/{sample.task}/{seed}-{next(numbers)}.png"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        picture.save(folder / path, format="PNG")
        return path

    messages = sample.messages()
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = saved(part["image"])
            elif part["type"] == "video":
                part["video"] = [saved(frame) for frame in part["video"]]
    answer = {"role": "assistant", "content": [{"type": "text", "text": sample.answer}]}
    return {"id": f"{sample.task}-{seed}", "messages": [*messages, answer]}
