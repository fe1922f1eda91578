"""What keeps a batch full: when entries start, what of a failure is whose, and what is repeated alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.kit import alone, engine, prompts
from saccade.engine import Request
from saccade.engine.batch import Entry, Feed
from saccade.engine.row import RowPlan, plan
from saccade.engine.step import StepRunner
from saccade.errors import InputError
from saccade.processors import stateless

MAX_ROWS = 3
Failing = Callable[[Callable[[list[int]], bool]], list[list[int]]]


@dataclass(eq=False, slots=True)
class Asked(Entry):
    """Prompts by number, each a row."""

    numbers: tuple[int, ...]
    n: int = 6
    processors: Sequence[Any] = ()
    starts: int = field(default=0, init=False)

    @property
    def tokens(self) -> list[list[int]]:
        return [row.output for row in self.rows]

    @property
    def expected(self) -> list[list[int]]:
        return [alone("plain", prompts()[number], n=self.n) for number in self.numbers]


def feed_of(*entries: Asked) -> Feed[Asked]:
    batch = engine("plain").open(MAX_ROWS)

    def starts(entry: Asked) -> list[tuple[Request, RowPlan]]:
        entry.starts += 1
        asked = [prompts()[number] for number in entry.numbers]
        plans = plan(batch.target, asked, max_new_tokens=entry.n, logits_processor=entry.processors)
        return list(zip(map(Request, asked), plans, strict=True))

    feed = Feed(batch, starts, MAX_ROWS)
    for entry in entries:
        feed.add(entry)
    return feed


def run(feed: Feed[Asked]) -> list[Asked]:
    """Entries in the order in which they end."""
    ended = list[Asked]()
    while not feed.is_idle:
        feed.step()
        ended += [entry for entry in feed.pop_changed() if entry.done]
    return ended


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Make steps raise by the numbers of the prompts in them; returns those of every step."""

    def plant(fails: Callable[[list[int]], bool]) -> list[list[int]]:
        stock, steps = StepRunner.run, list[list[int]]()

        def stepped(runner: StepRunner) -> None:
            steps.append([prompts().index(row.request.prompt) for row in runner._state.active])
            if fails(steps[-1]):
                raise RuntimeError("planted")
            stock(runner)

        monkeypatch.setattr(StepRunner, "run", stepped)
        return steps

    return plant


def test_entries_start_in_order_as_rows_are_free(failing: Failing) -> None:
    steps = failing(lambda _: False)
    entries = [Asked((0, 1), n=2), Asked((2,), n=9), Asked((3, 1), n=4), Asked((0,))]
    assert run(feed_of(*entries)) == [entries[0], entries[2], entries[1], entries[3]]
    assert [entry.tokens for entry in entries] == [entry.expected for entry in entries]
    assert max(map(len, steps)) == MAX_ROWS, "an entry starts whole where one row is free; the batch holds the others"
    assert steps[0] == [0, 1, 2]


def test_entries_of_a_step_that_failed_are_repeated_each_alone_before_any_that_waits(failing: Failing) -> None:
    steps = failing(lambda numbers: 1 in numbers)
    entries = [Asked((number,)) for number in (0, 1, 2, 3)]
    feed = feed_of(*entries)
    feed.step()
    assert feed.pop_changed() == []
    feed.fill()
    assert (feed.running, feed.has_room) == (entries[:1], False)
    ended = run(feed)
    assert [entry.numbers for entry in ended] == [(0,), (1,), (2,), (3,)]
    assert steps[0] == [0, 1, 2]
    assert all(len(numbers) == 1 for numbers in steps[1:]), "the last suspect, too, and nobody joins it"
    assert [entry.starts for entry in entries] == [2, 2, 2, 1]
    assert str(entries[1].error) == "planted"
    assert [entry.tokens for entry in ended if entry.error is None] == [entries[n].expected for n in (0, 2, 3)]


def test_an_entry_of_several_rows_is_repeated_once_and_fails_whole(failing: Failing) -> None:
    steps = failing(lambda numbers: 1 in numbers)
    bad, good = Asked((0, 1)), Asked((2,))
    feed = feed_of(bad, good)
    assert set(run(feed)) == {bad, good}
    assert steps[:2] == [[0, 1, 2], [0, 1]]
    assert (bad.starts, good.starts) == (2, 2)
    assert bad.error is not None
    assert good.tokens == good.expected
    assert feed.batch.is_idle


def test_a_row_that_fails_by_itself_ends_its_entry_alone() -> None:
    """The entry's other row goes, and no neighbour is repeated, also where the step before is unread."""
    length = len(prompts()[0])

    def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == length + 1 and ids[0, :length].tolist() == list(prompts()[0].ids):
            raise RuntimeError("mine")
        return scores

    bad, good = Asked((0, 1), n=30, processors=[stateless(raising)]), Asked((2,))
    feed = feed_of(bad, good)
    feed.step()
    assert run(feed) == [bad, good]
    assert str(bad.error) == "mine"
    assert all(len(tokens) < bad.n for tokens in bad.tokens), "an answer is of no use without the other"
    assert (bad.starts, good.starts) == (1, 1)
    assert good.tokens == good.expected


def test_an_entry_that_cannot_start_ends_with_its_error() -> None:
    bad, good = Asked((0,), n=0), Asked((1,))
    feed = feed_of(bad, good)
    feed.fill()
    assert (feed.running, feed.pop_changed()) == ([good], [bad])
    assert isinstance(bad.error, InputError)
    feed.add(bad)
    feed.step()
    feed.clear()
    assert (feed.is_idle, feed.batch.is_idle, feed.pop_changed()) == (True, True, []), "nothing of them is left"


def test_an_entry_is_cancelled_wherever_it_is(failing: Failing) -> None:
    failing(lambda numbers: len(numbers) > 2)
    entries = [Asked((number,)) for number in (0, 1, 2, 3)]
    feed = feed_of(*entries)
    assert feed.cancel(entries[3]), "it waits"
    feed.step()
    assert feed.pop_changed() == []
    assert list(feed.suspects) == entries[:3]
    assert feed.cancel(entries[1]), "it waits to be repeated"
    feed.step()
    assert feed.running == [entries[0]]
    assert feed.cancel(entries[0]), "its row runs"
    assert feed.batch.is_idle
    assert feed.pop_changed() == [], "its step is of no interest any more"
    assert run(feed) == [entries[2]]
    assert not any(map(feed.cancel, entries)), "all have ended"
    assert entries[2].tokens == entries[2].expected


def test_an_entry_of_another_batch_is_not_cancelled() -> None:
    """Whoever waits for an answer of a batch that broke may leave once another batch is in its place."""
    theirs, ours, later = Asked((0,)), Asked((1,), n=30), [Asked((number,), n=3) for number in (2, 3, 0)]
    broken, feed = feed_of(theirs), feed_of(ours)
    broken.step()
    feed.step()
    assert not feed.cancel(theirs)
    for entry in later:
        feed.add(entry)
    assert run(feed) == [*later, ours]
    assert [entry.tokens for entry in (ours, *later)] == [entry.expected for entry in (ours, *later)], "in its own slot"


def test_steps_that_are_read_during_the_next_step_are_read_once() -> None:
    entry, read = Asked((0,)), list[list[Asked]]()
    feed = feed_of(entry)
    feed.batch.meanwhile = lambda: read.append(feed.pop_changed())
    for _ in range(3):
        feed.step()
    assert read == [[], [entry], [entry]]
    assert feed.pop_changed() == [entry]
    assert feed.pop_changed() == []
