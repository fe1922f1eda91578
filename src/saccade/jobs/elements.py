"""Elements of a JSON array in a file, one after another: an array of a million samples need not fit the memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO

_BLOCK = 1 << 16


def elements(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number (from 1) and JSON text of every element of an array.

    From an element that cannot be parsed on, the rest of the file comes as one element, as it is; an array without its
    end gives ``[`` as the last one.
    """
    window = _Window(file)
    window.skip("[")
    number = 0
    while (first := window.skip(",")) not in ("", "]"):
        number += 1
        piece = window.value()
        yield number, piece.encode(errors="surrogateescape")
    if not first:
        yield number + 1, b"["


class _Window:
    """Part of a file that is in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._text, self._at = file, "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape").decode
        self._scan = json.JSONDecoder().raw_decode

    def skip(self, separator: str) -> str:
        """Move behind white space and one separator; return the next letter, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                letter = self._text[self._at]
                if letter == separator:
                    separator = ""
                elif letter not in " \t\r\n":
                    return letter
                self._at += 1
            if not self._more():
                return ""

    def value(self) -> str:
        """Move behind a value and return its text; all that is left where there is none."""
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except (ValueError, RecursionError):
                end = 0
            if 0 < end < len(self._text) or not self._more():
                piece = self._text[self._at : end or len(self._text)]
                self._at = end or len(self._text)
                return piece

    def _more(self) -> bool:
        """Read on, as much as there is already, and forget what has been passed; False at the end."""
        self._text, self._at = self._text[self._at :], 0
        block = self._file.read(max(_BLOCK, len(self._text)))
        self._text += self._decode(block, final=not block)
        return bool(block)
