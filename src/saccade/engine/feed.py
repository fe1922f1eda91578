"""Entries that keep a running batch full; those of a step that failed as a whole are repeated one by one."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from saccade.engine.batch import RunningBatch
from saccade.engine.row import Request, Row, RowPlan


@dataclass(eq=False, slots=True)
class Entry:
    """Rows that are answered, fail and are repeated together."""

    rows: list[Row] = field(default_factory=list, init=False)  # in the batch; none while it waits
    error: BaseException | None = field(default=None, init=False)  # why it failed
    is_suspect: bool = field(default=False, init=False)  # whether it was in a step that failed, so that it runs alone
    submitted: float = field(default_factory=time.perf_counter, init=False)

    @property
    def done(self) -> bool:
        """Whether it has failed, or all of its rows have ended."""
        return self.error is not None or (bool(self.rows) and all(row.done for row in self.rows))


Queued = TypeVar("Queued", bound=Entry)


class Feed(Generic[Queued]):
    """A running batch with the entries that wait for it, used by the thread that owns the batch.

    Args:
        batch: holds rows of this feed alone.
        starts: makes the requests and plans of an entry's rows; called again if the entry is repeated.
        max_rows: an entry starts while fewer rows than these run.
    """

    def __init__(
        self, batch: RunningBatch, starts: Callable[[Queued], Iterable[tuple[Request, RowPlan]]], max_rows: int
    ) -> None:
        self.batch = batch
        self.waiting = deque[Queued]()
        self.suspects = deque[Queued]()  # each is repeated alone, before any that waits
        self._starts, self._max_rows = starts, max_rows
        self._entries = dict[int, Queued]()  # entries by `id` of their running rows
        self._stepped = dict[Row, None]()  # rows of the steps since the last `read`, in order
        self._unstarted = list[Queued]()  # entries that could not start since the last `read`

    @property
    def running(self) -> list[Queued]:
        """Entries with rows in the batch, oldest first."""
        return list(dict.fromkeys(self._entries.values()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is to be read."""
        return not (self._entries or self.waiting or self.suspects or self._unstarted)

    @property
    def has_room(self) -> bool:
        """Whether an entry that is added now starts with the next `fill`."""
        return not self.waiting and self._takes_more

    @property
    def _takes_more(self) -> bool:
        isolates = self.suspects or any(entry.is_suspect for entry in self._entries.values())
        return not isolates and len(self._entries) < self._max_rows

    def add(self, entry: Queued) -> None:
        """Queue an entry, which is read with its error if it cannot start."""
        (self.suspects if entry.is_suspect else self.waiting).append(entry)

    def cancel(self, entry: Queued) -> bool:
        """Remove an entry before the next step; False if it has ended, or was never added."""
        for queue in (self.waiting, self.suspects):
            if entry in queue:
                queue.remove(entry)
                return True
        return self._remove(entry)

    def clear(self) -> None:
        """Cancel all entries, and forget what is unread."""
        for entries in (self.waiting, self.suspects, self._stepped, self._unstarted):
            entries.clear()
        for entry in self.running:
            self._remove(entry)

    def fill(self) -> None:
        """Start entries for which there is room."""
        if self.suspects and not self._entries:
            self._start(self.suspects.popleft())
        while self.waiting and self._takes_more:
            self._start(self.waiting.popleft())

    def step(self) -> None:
        """Start entries for which there is room, and run a step of the batch; `read` may be called while it runs."""
        self.fill()
        if self._entries:
            rows = [row for row, _ in self.batch.step()]
            self._stepped |= dict.fromkeys(rows)

    def read(self) -> list[Queued]:
        """Return the entries that have new steps or have ended since the last call.

        An error that several rows share is the step's: their entries are repeated, each alone, and once.
        """
        rows, self._stepped = self._stepped, {}
        changed, self._unstarted = dict.fromkeys(self._unstarted), []
        failures = Counter(id(row.error) for row in rows if row.error is not None)
        for row in rows:
            entry = self._entries.get(id(row))
            if entry is None:
                continue  # it was cancelled, or ended by another row
            if row.error is not None:
                self._remove(entry)
                changed.pop(entry, None)
                if failures[id(row.error)] > 1 and not entry.is_suspect:
                    entry.rows, entry.is_suspect = [], True
                    self.suspects.append(entry)
                    continue
                entry.error = row.error
            elif row.done:
                del self._entries[id(row)]
            changed[entry] = None
        return list(changed)

    def _start(self, entry: Queued) -> None:
        try:
            entry.rows = [self.batch.prepare(*start) for start in self._starts(entry)]
        except Exception as error:
            entry.error = error
            self._unstarted.append(entry)
            return
        for row in entry.rows:
            row.submitted = entry.submitted  # it has waited for the batch, too
            self._entries[id(row)] = entry
            self.batch.queue(row)

    def _remove(self, entry: Queued) -> bool:
        """Take an entry's rows out of the batch; False if none was there."""
        ids = [id(row) for row in entry.rows if self._entries.pop(id(row), None) is not None]
        for row in entry.rows:
            self.batch.cancel(row)
        return bool(ids)
