"""Earlier answers that suffix decoding drafts from, within a bound of memory and, if asked, in a file."""

from __future__ import annotations

import json
import os
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from saccade.draft.lookup import END, IndexedText
from saccade.errors import MethodError
from saccade.files import PRIVATE, write_file

TOKEN_BYTES = 512  # memory of a token with its n-grams, about


class AnswerStore:
    """Earlier answers by key, within about ``max_bytes`` of memory: the oldest go first.

    With a ``path`` they are also in a file, which its owner alone can read: every answer adds a line, and the file is
    replaced once half of its lines are of answers that have gone. Raises `MethodError` where it is another file or
    cannot be written.
    """

    def __init__(self, max_bytes: int, max_ngram: int, path: Path | None = None, vocab_size: int = 0) -> None:
        self.most = max_bytes // TOKEN_BYTES  # tokens
        self.tokens = 0  # that are kept
        self.texts: dict[str, IndexedText] = {}  # answers of every key, one after the other
        self._answers: deque[tuple[str, array[int]]] = deque()  # with their keys, oldest first
        self._max_ngram = max_ngram
        self._path: Path | None = None
        self._lines = 0  # of the file
        self._header = json.dumps({"suffix store": 1, "vocab_size": vocab_size})
        if path is None:
            return
        try:
            lines = path.read_text("utf-8").splitlines() if path.exists() else []
        except (OSError, ValueError):
            lines = [""]
        if lines and lines[0] != self._header:
            raise MethodError(f"{path} is no store of suffix decoding for this model; give another file.")
        for line in lines[1:]:
            with suppress(ValueError, TypeError):  # where a kill cut it short
                self.add(*json.loads(line))
        self._path = path
        self._write()

    def add(self, key: str, ids: Iterable[int]) -> None:
        """Keep an answer, as far as there is room for it alone."""
        answer = array("q", ids)[: max(self.most - 1, 0)]
        self.texts.setdefault(key, IndexedText(self._max_ngram)).append([*answer, END])
        self._answers.append((key, answer))
        self.tokens += len(answer) + 1
        while self.tokens > self.most:
            oldest, gone = self._answers.popleft()
            self.tokens -= len(gone) + 1
            self.texts[oldest].drop(len(gone) + 1)
            if not self.texts[oldest].held:
                del self.texts[oldest]
        if self._path is None:
            return
        with suppress(OSError, MethodError):  # no answer fails for want of a file
            with open(self._path, "a", encoding="utf-8", opener=_private) as file:
                file.write(_line(key, answer))
            self._lines += 1
            if self._lines > 2 * len(self._answers):
                self._write()

    def _write(self) -> None:
        """Replace the file by the answers that are kept."""
        assert self._path is not None
        content = [self._header + "\n", *(_line(key, answer) for key, answer in self._answers)]
        write_file(self._path, "".join(content), error=MethodError, advice="give another file", is_private=True)
        self._lines = len(self._answers)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)


def _line(key: str, answer: array[int]) -> str:
    return json.dumps([key, answer.tolist()], separators=(",", ":")) + "\n"
