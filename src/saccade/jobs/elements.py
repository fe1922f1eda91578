"""Rows of a JSON file, one after another: JSON lines, or one array, which need not fit the memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_BLOCK = 1 << 16


def rows(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), offset in bytes and text of every row of JSON lines, or of a JSON array.

    Blank lines are left out. From an element of an array that cannot be parsed on, the rest of the file comes as one
    element, as it is; an array without its end gives ``[`` as the last one.
    """
    with path.open("rb") as file:
        if _is_array(file):
            yield from elements(file)
            return
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def row_at(path: Path, offset: int) -> bytes:
    """Return the text of the row at an offset of `rows`."""
    with path.open("rb") as file:
        is_array = _is_array(file)
        file.seek(offset)
        return _Window(file).value() if is_array else file.readline()


def elements(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield the same of a file that is one array."""
    window = _Window(file)
    window.skip("[")
    number = 0
    while (first := window.skip(",")) not in ("", "]"):
        number += 1
        offset = window.offset
        yield number, offset, window.value()
    if not first:
        yield number + 1, window.offset, b"["


def _is_array(file: IO[bytes]) -> bool:
    begin = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return begin.startswith(b"[")


class _Window:
    """Part of a file that is in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._text, self._at, self.offset = file, "", 0, 0
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        self._scan = json.JSONDecoder().raw_decode

    def skip(self, separator: str) -> str:
        """Move behind white space and one separator; return the next letter, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                letter = self._text[self._at]
                if letter == separator:
                    separator = ""
                elif letter not in " \t\r\n\ufeff":
                    return letter
                self._at += 1
                self.offset += 3 if letter == "\ufeff" else 1
            if not self._more():
                return ""

    def value(self) -> bytes:
        """Move behind a value and return its text; all that is left where there is none."""
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except (ValueError, RecursionError):
                end = 0
            if 0 < end < len(self._text) or not self._more():
                end = end or len(self._text)
                piece = self._text[self._at : end].encode(errors="surrogateescape")
                self._at = end
                self.offset += len(piece)
                return piece

    def _more(self) -> bool:
        """Read on, as much as there is already, and forget what has been passed; False at the end."""
        self._text, self._at = self._text[self._at :], 0
        block = self._file.read(max(_BLOCK, len(self._text)))
        self._text += self._decode(block, final=not block)
        return bool(block)
