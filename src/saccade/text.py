"""Text from tokens as they arrive."""

from __future__ import annotations

from typing import Any


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece.

    A piece is held back while its last character is not complete (one character can be several tokens), so the
    pieces joined are the text of all ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids from here on are decoded together, so that spaces between tokens come out right
        self._read = 0  # ids before here are in the text already given

    def add(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text that these ids complete."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if now.endswith("\ufffd") or len(now) < len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What was held back."""
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
