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


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids as it is streamed: the pieces of a `Detokenizer`, joined.

    It is what `decode` gives, but where bytes make no character and the tokenizer turns valid ones before them into
    replacement characters too (byte fallback does): what has been streamed cannot be taken back.
    """
    text = Detokenizer(tokenizer)
    return text.add(ids) + text.finish()


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece.

    A piece is held back while its last character is not complete (one character can be several tokens), so the
    pieces joined are the text of all ids (see `text_of`), however many ids come at a time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids from here on are decoded together, so that spaces between tokens come out right
        self._read = 0  # ids before here are in the text already given

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        first = len(self._ids)
        self._ids.extend(ids)
        piece = self._new(len(self._ids))
        if INCOMPLETE not in piece:
            return self._give(piece, len(self._ids))
        # Bytes that make no character may spoil those beside them: token by token, or blocks would tell.
        return "".join(self._complete(stop) for stop in range(first + 1, len(self._ids) + 1))

    def finish(self) -> str:
        """What was held back."""
        return self._give(self._new(len(self._ids)), len(self._ids))

    def _complete(self, stop: int) -> str:
        piece = self._new(stop)
        return "" if piece.endswith(INCOMPLETE) else self._give(piece, stop)

    def _new(self, stop: int) -> str:
        """The text of the ids before ``stop`` that has not been given."""
        before = decode(self._tokenizer, self._ids[self._start : self._read])
        text = decode(self._tokenizer, self._ids[self._start : stop])
        if not text.startswith(before):  # spoilt by what came
            return decode(self._tokenizer, self._ids[self._read : stop])
        return text[len(before) :]

    def _give(self, piece: str, stop: int) -> str:
        # Tokens without text of their own (special ones, or a space, which some tokenizers drop in front) would not
        # tell where spaces belong, nor whether they were spoilt.
        if piece.strip(" "):
            self._start = self._read
        self._read = stop
        return piece
