"""Text from tokens, whole or as they arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

INCOMPLETE = "\ufffd"
"""Replacement character of tokenizers for bytes that form no complete character."""


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode ids to text without special tokens; cleaned up spaces would change text that has been streamed already."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of ids as streamed: the joined pieces of a `Detokenizer`.

    It differs from `decode` only where bytes form no character and the tokenizer also replaces valid characters before
    them (byte fallback), because streamed text cannot be withdrawn.
    """
    text = Detokenizer(tokenizer)
    return text.add(ids) + text.finish()


@cache
def _bytes_by_sign() -> dict[str, int]:
    """Signs that stand for bytes in byte-level vocabularies: printable ones for themselves, as GPT-2 has it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TokenTexts:
    """Texts and bytes of single tokens, as they are inside of a text.

    Some tokenizers strip the space at the beginning of a text, which a token alone would lose.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._length = len(self._decode(self._before))

    def text(self, token: int) -> str:
        """Text of a token; replacement characters for parts of characters."""
        return self._decode([*self._before, token])[self._length :]

    def utf8(self, token: int) -> bytes:
        """UTF-8 of a token, which may be a part of a character."""
        text = self.text(token)
        piece = self._tokenizer.convert_ids_to_tokens(token) if INCOMPLETE in text else None
        if isinstance(piece, str):
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):  # byte fallback
                return bytes([int(piece[3:5], 16)])
            if all(sign in _bytes_by_sign() for sign in piece):
                return bytes(_bytes_by_sign()[sign] for sign in piece)
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Incremental decoder of a growing list of ids.

    Incomplete characters (one character can be several tokens) are held back, so the joined pieces are the text of all
    ids (see `text_of`), whatever the number of ids per call.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids from here on are decoded together, for correct spaces between tokens
        self._read = 0  # ids before here are in the text returned so far

    def add(self, ids: Sequence[int]) -> str:
        """Append ids and return the text that they complete."""
        first = len(self._ids)
        self._ids.extend(ids)
        piece = self._new(len(self._ids))
        if INCOMPLETE not in piece:
            return self._return(piece, len(self._ids))
        # Invalid bytes may spoil their neighbours: decode token by token, whatever the number of ids per call.
        return "".join(self._complete(stop) for stop in range(first + 1, len(self._ids) + 1))

    def finish(self) -> str:
        """Return the text held back."""
        return self._return(self._new(len(self._ids)), len(self._ids))

    def _complete(self, stop: int) -> str:
        piece = self._new(stop)
        return "" if piece.endswith(INCOMPLETE) else self._return(piece, stop)

    def _new(self, stop: int) -> str:
        """Text of the ids before ``stop`` that has not been returned."""
        before = decode(self._tokenizer, self._ids[self._start : self._read])
        text = decode(self._tokenizer, self._ids[self._start : stop])
        if not text.startswith(before):  # spoilt by the new ids
            return decode(self._tokenizer, self._ids[self._read : stop])
        return text[len(before) :]

    def _return(self, piece: str, stop: int) -> str:
        # Tokens without text (special ones, or a leading space, which some tokenizers drop) show neither the place of
        # spaces nor spoilt characters.
        if piece.strip(" "):
            self._start = self._read
        self._read = stop
        return piece
