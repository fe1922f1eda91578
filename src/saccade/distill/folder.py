"""Answers of a distillation, read from its folder."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from saccade.data.conversations import Messages, resolve_media
from saccade.errors import SaccadeError

HEADER, ANSWERS = "distill.json", "answers.jsonl"


def place_of(path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Return the file of the answers, by its path or its folder's, the folder of its media, and facts of its target."""
    file = path / ANSWERS if path.is_dir() else path
    try:
        header = json.loads((file.parent / HEADER).read_text(encoding="utf-8"))
        return file, file.parent / Path(header["source"]["media_root"]).expanduser(), dict(header.get("target") or {})
    except (OSError, ValueError, KeyError, TypeError):
        return file, file.parent, {}


@dataclass(frozen=True, slots=True)
class Answered:
    """A question with the target's answer."""

    id: str  # of the question, unique in its run
    messages: Messages  # the conversation up to the question, media as paths that can be opened
    answer: str  # text
    answer_ids: list[int]  # emitted tokens without the one that ends the answer
    finish: str  # `eos` when the target ended the answer itself
    temperature: float  # 0 for a greedy answer
    prompt_tokens: int  # of the prompt, visual ones counted
    eos_id: int | None = None  # the token that ended the answer, where `finish` is `eos`


class AnswerFile(Sequence[Answered]):
    """The answers of a run; only the offsets of lines are held, 8 bytes each."""

    def __init__(self, path: Path, media_root: Path, header: dict[str, Any]) -> None:
        self.header = header  # content of `distill.json`
        self._path, self._root = path, media_root
        self._starts = array("q", [0])  # of lines, and after the last whole one
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Answered: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answered]: ...
    def __getitem__(self, index: int | slice) -> Answered | list[Answered]:
        """One answer, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"There is no answer {index}; there are {len(self)}.")
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            line = file.readline()
        try:
            row = json.loads(line)
            row["messages"] = resolve_media(row["messages"], self._root)
            return Answered(**row)
        except (ValueError, KeyError, TypeError):
            raise SaccadeError(
                f"{self._path}, line {number + 1} is not an answer; expected a file of `saccade distill`."
            ) from None


def read_answers(path: str | Path) -> AnswerFile:
    """The answers of a run, finished or not; a last line that is still being written is left out."""
    folder = Path(path).expanduser()
    folder = folder.parent if folder.name == ANSWERS else folder
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        root = folder / Path(header["source"]["media_root"]).expanduser()
        return AnswerFile(folder / ANSWERS, root, header)
    except (OSError, ValueError, KeyError, TypeError):
        raise SaccadeError(
            f"There are no answers in {folder}; expected a folder with {HEADER} and {ANSWERS}, made by "
            "`saccade distill`."
        ) from None
