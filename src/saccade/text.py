"""Text from tokens, whole or as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or not yet one."""


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids, special tokens left out.

    Spaces are left as the tokens have them: cleaning them up would change text that has been streamed already
    (a space before a full stop is only seen to be too many when the full stop comes).
    """
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


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

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._ids.extend(ids)
        piece = self._new()
        return "" if piece.endswith(INCOMPLETE) else self._give(piece)

    def finish(self) -> str:
        """What was held back."""
        return self._give(self._new())

    def _new(self) -> str:
        before = decode(self._tokenizer, self._ids[self._start : self._read])
        return decode(self._tokenizer, self._ids[self._start :])[len(before) :]

    def _give(self, piece: str) -> str:
        if piece:  # tokens without text of their own (special ones) would not tell where spaces belong
            self._start = self._read
        self._read = len(self._ids)
        return piece
