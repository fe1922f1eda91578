"""Items are prepared ahead, but never more than a window of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from saccade.errors import SaccadeError
from saccade.jobs.item_worker import Feed


def test_every_item_is_prepared_once_and_never_more_than_the_window_ahead() -> None:
    lock, read, taken, most = threading.Lock(), 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal read, most
        for number in range(200):
            with lock:
                read += 1
                most = max(most, read - taken)
            yield number

    feed: Feed[int, int] = Feed(items(), lambda number: number * number, threads=3, ahead=5)
    found = []
    while not feed.is_empty:
        result = feed.take(wait=True)
        if result is not None:
            found.append(result)
        if len(found) % 50 == 0:
            time.sleep(0.05)  # the workers could run away
        with lock:
            taken = len(found)
    feed.close()
    assert sorted(found) == [n * n for n in range(200)]
    assert most <= 6, "the window, and the one that has just been taken"


def test_what_is_not_ready_is_not_waited_for() -> None:
    gate = threading.Event()
    feed: Feed[int, bool] = Feed(iter([1]), lambda _: gate.wait(), threads=1, ahead=1)
    assert feed.take(wait=False) is None
    assert not feed.is_empty
    gate.set()
    assert feed.take(wait=True) is True
    assert feed.take(wait=True) is None
    assert feed.is_empty
    feed.close()


def test_a_source_that_breaks_is_told_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise SaccadeError("The file is gone.")

    feed: Feed[int, int] = Feed(items(), lambda number: number, threads=1, ahead=4)
    assert feed.take(wait=True) == 1
    with pytest.raises(SaccadeError, match="is gone"):
        feed.take(wait=True)
    feed.close()
