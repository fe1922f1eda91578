"""Output folder of a run: its journal of answers, and a reader of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from saccade.distill.pocket_source import FILE as DRAWN
from saccade.errors import SaccadeError
from saccade.inputs.conversations import Messages, resolve_media
from saccade.journal import Journal

HEADER = "distill.json"
ANSWERS = "answers.jsonl"
NAMES = HEADER, ANSWERS
_COMPARED = ("source", "options", "target", "processor", "drafter")


class Folder(Journal):
    """Output of one run."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        super().__init__(path, header, NAMES, _COMPARED, later=("processor",), inputs=(DRAWN,))

    def answers(self) -> Iterator[tuple[str, str]]:
        """Id and text of every answer; an unfinished last line is skipped."""
        found: set[str] = set()
        for number, _, row in self.rows():
            name, text = row.get("id"), row.get("answer")
            if name is None or text is None:
                raise SaccadeError(f"{self.where(number)} is damaged; delete it to continue.")
            if name in found:
                raise SaccadeError(f"{self.where(number)}: {name} is answered twice; delete one of them.")
            found.add(name)
            yield name, text


def place_of(path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Return the file of the answers, given it or its folder, the folder of its media, and facts of its target."""
    file = path / ANSWERS if path.is_dir() else path
    try:
        header = json.loads((file.parent / HEADER).read_text(encoding="utf-8"))
        return file, file.parent / Path(header["source"]["media_root"]).expanduser(), dict(header.get("target") or {})
    except (OSError, ValueError, KeyError, TypeError):
        return file, file.parent, {}


_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Answered:
    """A question with the target's answer."""

    id: str  # of the question, unique in its run
    messages: Messages  # the conversation up to the question, media as paths that can be opened
    answer: str  # text
    answer_ids: list[int]  # emitted tokens without the one that ends the answer
    finish: str  # `eos` when the target ended the answer itself
    temperature: float  # 0 for a greedy answer
    eos_id: int | None = None  # the token that ended the answer, where `finish` is `eos`
    prompt_tokens: int | None = None  # of the prompt, visual ones counted; None in files of older versions


class Answers(Sequence[Answered]):
    """The answers of a run; only the offsets of lines are held, 8 bytes each."""

    def __init__(self, path: Path, media_root: Path, header: dict[str, Any]) -> None:
        self.header = header  # content of `distill.json`
        self._path = path
        self._root = media_root
        self._ends = _line_ends(path)

    def __len__(self) -> int:
        return len(self._ends)

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
        start = int(self._ends[number - 1]) if number else 0
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(int(self._ends[number]) - start)
        try:
            row = json.loads(line)
            row["messages"] = resolve_media(row["messages"], self._root)
            return Answered(**row)
        except (ValueError, KeyError, TypeError):
            raise SaccadeError(
                f"{self._path}, line {number + 1} is not an answer; expected a file of `saccade distill`."
            ) from None


def read_answers(path: str | Path, media_root: str | Path | None = None) -> Answers:
    """The answers of a run, finished or not; a last line that is still being written is left out."""
    folder = Path(path).expanduser()
    folder = folder.parent if folder.name == ANSWERS else folder
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        root = folder / header["source"]["media_root"] if media_root is None else Path(media_root)
        return Answers(folder / ANSWERS, root.expanduser(), header)
    except (OSError, ValueError, KeyError, TypeError):
        raise SaccadeError(
            f"There are no answers in {folder}; expected a folder with {HEADER} and {ANSWERS}, made by "
            "`saccade distill`."
        ) from None


def _line_ends(path: Path) -> NDArray[np.int64]:
    """Offsets behind every newline, `[N]`."""
    found = [np.empty(0, np.int64)]
    offset = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset)
            offset += len(block)
    return np.concatenate(found).astype(np.int64) + 1
