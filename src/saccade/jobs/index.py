"""Map of 64-bit keys to numbers in 16 bytes per place: a dictionary of a million ids would take ten times as much."""

from __future__ import annotations

import hashlib
from array import array

_FIRST = 1 << 10
"""Places of a new index; always a power of two."""
_FULL = 0.6
"""Share of occupied places from which on an index doubles."""


def key_of(*words: str) -> int:
    """Hash texts to a key, equal on every machine; never 0."""
    content = "\0".join(words).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) or 1


class Index:
    """Numbers by key, with open addressing; keys are not removed."""

    def __init__(self) -> None:
        self._keys, self._values, self._count = _empty(_FIRST), _empty(_FIRST, "q"), 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        """Number of a key; None for an unknown one."""
        place = self._place(key)
        return self._values[place] if self._keys[place] else None

    def put(self, key: int, number: int) -> None:
        """Add a key, or replace its number."""
        place = self._place(key)
        if not self._keys[place]:
            self._count += 1
        self._keys[place], self._values[place] = key, number
        if self._count > _FULL * len(self._keys):
            self._grow()

    def _place(self, key: int) -> int:
        """Place of a key, or the free one where it would be."""
        keys, last = self._keys, len(self._keys) - 1
        place = key & last
        while keys[place] not in (0, key):
            place = (place + 1) & last
        return place

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._keys, self._values = _empty(2 * len(keys)), _empty(2 * len(keys), "q")
        for key, value in zip(keys, values, strict=True):
            if key:
                place = self._place(key)
                self._keys[place], self._values[place] = key, value


def _empty(size: int, kind: str = "Q") -> array[int]:
    return array(kind, bytes(8 * size))
