"""Keys of items, and the records that earlier attempts have of them."""

from __future__ import annotations

import hashlib
import sqlite3

from saccade.errors import SaccadeError
from saccade.jobs.items import Item
from saccade.jobs.pipes import Streamed
from saccade.journal import Journal


def key_of(*words: str) -> int:
    """Hash texts to a key, equal on every machine; never 0."""
    content = "\0".join(words).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) or 1


def key_of_item(item: Item) -> int:
    """Key of an item with its content."""
    return key_of(item.id, item.version)


class Index:
    """Numbers by key, in 25 bytes per key where a dictionary takes six times as much; for one thread at a time."""

    def __init__(self) -> None:
        self._table = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._table.execute("CREATE TABLE numbers (key INTEGER PRIMARY KEY, number INTEGER)")
        self._table.execute("BEGIN")  # one transaction, or every row would be one

    def get(self, key: int) -> int | None:
        """Number of a key; None for an unknown one."""
        found = self._table.execute("SELECT number FROM numbers WHERE key = ?", (_signed(key),)).fetchone()
        return None if found is None else int(found[0])

    def put(self, key: int, number: int) -> None:
        """Add a key, or replace its number."""
        self._table.execute("REPLACE INTO numbers VALUES (?, ?)", (_signed(key), number))


def _signed(key: int) -> int:
    return key - (1 << 63)


class Known:
    """Records of earlier attempts."""

    def __init__(self, journal: Journal | Streamed, retry_failed: bool = False) -> None:
        self._found, self.timed, self.seconds = Index(), 0, 0.0
        if isinstance(journal, Streamed):
            return
        for number, offset, row in journal.rows():
            try:
                key, failed = int(row["key"], 16), bool(row["failed"])
                if "seconds" in row:
                    self.timed, self.seconds = self.timed + 1, self.seconds + float(row["seconds"])
            except (KeyError, TypeError, ValueError):
                raise SaccadeError(f"{journal.where(number)} is damaged; delete it to continue.") from None
            if not (failed and retry_failed):
                self._found.put(key, 2 * offset + failed)

    def get(self, key: int) -> tuple[int, bool] | None:
        """Offset of an item's record, and whether it failed; None for an unknown item."""
        found = self._found.get(key)
        return None if found is None else (found >> 1, bool(found & 1))
