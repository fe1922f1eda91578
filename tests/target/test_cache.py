"""The slot cache holds what a list per row would hold, whatever is written, kept, cropped and grown."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.errors import ModelError
from saccade.target.cache import SlotCache

BATCH = 3
SHAPES = [(2, 4, 4), (2, 4, 4), (1, 3, 5)]  # heads, width of keys, width of values; the last layer is unlike


class Reference:
    """The same with lists: every entry is one number, unique over the test."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(BATCH)]
        self.pending: list[list[int]] = [[] for _ in range(BATCH)]
        self.next = count(1)

    def numbers(self, n: int) -> list[int]:
        return [next(self.next) for _ in range(n)]


def entries(numbers: list[list[int]], layer: int, kind: str) -> Tensor:
    """``[B, H, Q, D]`` whose every value tells entry, layer, kind, head and place."""
    heads, key_width, value_width = SHAPES[layer]
    width = key_width if kind == "key" else value_width
    own = torch.arange(heads)[:, None, None] * 10.0 + torch.arange(width)
    return torch.tensor(numbers)[:, None, :, None] * 1000.0 + layer * 100 + 50 * (kind == "value") + own


def write(cache: SlotCache, numbers: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    return [
        cache.update(entries(numbers, layer, "key"), entries(numbers, layer, "value"), layer)
        for layer in range(len(SHAPES))
    ]


def assert_holds(
    seen: list[tuple[Tensor, Tensor]], rows: list[list[int]], pending: list[list[int]] | None = None
) -> None:
    """Every row's first slots are its entries, in every layer; pending ones stand behind the longest row."""
    first = max(map(len, rows))
    for layer, tensors in enumerate(seen):
        for kind, tensor in zip(("key", "value"), tensors, strict=True):
            assert tensor.shape[0] == len(rows)
            for row, numbers in enumerate(rows):
                expected = entries([numbers], layer, kind)[0]
                assert torch.equal(tensor[row, :, : len(numbers)], expected)
                if pending is not None:
                    expected = entries([pending[row]], layer, kind)[0]
                    assert torch.equal(tensor[row, :, first:], expected)


def new_cache(capacity: int = 8) -> SlotCache:
    return SlotCache([torch.device("cpu")] * len(SHAPES), BATCH, capacity)


def assert_part_holds(
    data: st.DataObject, cache: SlotCache, reference: Reference, make_room: Callable[[int], None]
) -> None:
    """Some rows alone hold their entries, and behind their longest what was written through them."""
    first = data.draw(st.integers(0, BATCH - 1))
    rows = slice(first, data.draw(st.integers(first + 1, BATCH)))
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    make_room(sum(counts))
    pending: list[list[int]] = [[] for _ in reference.rows[rows]]
    for n in counts:
        new = [reference.numbers(n) for _ in pending]
        pending = [a + b for a, b in zip(pending, new, strict=True)]
        part = cache.part(rows)
        part.writing_nodes(n)
        assert_holds(write(part, new), reference.rows[rows], pending)
    if data.draw(st.booleans()):
        cache.drop_pending()
    else:
        cache.keep([[]] * BATCH)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sequence_of_operations_leaves_what_lists_would_hold(data: st.DataObject) -> None:
    cache, reference = new_cache(), Reference()
    grown = 8

    def make_room(n: int) -> None:
        nonlocal grown
        needed = max(map(len, reference.rows)) + len(reference.pending[0]) + n
        if needed > grown:
            grown = needed + data.draw(st.integers(0, 3))
            cache.grow(grown)

    for _ in range(data.draw(st.integers(1, 10))):
        step = data.draw(
            st.sampled_from(["prompt", "nodes", "nodes", "keep", "keep", "drop", "crop", "part"])
        )
        if step == "prompt":
            row, n = data.draw(st.integers(0, BATCH - 1)), data.draw(st.integers(1, 4))
            reference.pending = [[] for _ in range(BATCH)]
            make_room(n)
            new = reference.numbers(n)
            cache.writing_prompt(row, n)
            reference.rows[row] += new
            assert_holds(write(cache, [new]), [reference.rows[row]])
            cache.keep_first(row, n)
        elif step == "nodes":
            n = data.draw(st.integers(1, 4))
            make_room(n)
            new_rows = [reference.numbers(n) for _ in range(BATCH)]
            slots = cache.writing_nodes(n)
            for row in range(BATCH):
                reference.pending[row] += new_rows[row]
            seen = write(cache, new_rows)
            assert seen[0][0].shape[2] == slots == max(map(len, reference.rows)) + len(reference.pending[0])
            assert_holds(seen, reference.rows, reference.pending)
        elif step == "keep":
            pending = range(len(reference.pending[0]))
            chosen = [
                sorted(data.draw(st.sets(st.sampled_from(pending)) if pending else st.just(set())))
                for _ in range(BATCH)
            ]
            cache.keep(chosen)
            for row, indices in enumerate(chosen):
                reference.rows[row] += [reference.pending[row][i] for i in indices]
            reference.pending = [[] for _ in range(BATCH)]
        elif step == "part":
            if cache.nbytes == 0:
                continue
            cache.drop_pending()
            reference.pending = [[] for _ in range(BATCH)]
            assert_part_holds(data, cache, reference, make_room)
        elif step == "drop":
            cache.drop_pending()
            reference.pending = [[] for _ in range(BATCH)]
        else:
            cache.drop_pending()
            reference.pending = [[] for _ in range(BATCH)]
            row, length = data.draw(st.integers(0, BATCH - 1)), data.draw(st.integers(0, 6))
            cache.crop(row, length)
            reference.rows[row] = reference.rows[row][:length]
        assert cache.lengths == list(map(len, reference.rows))
    make_room(1)
    last = [reference.numbers(1) for _ in range(BATCH)]
    cache.writing_nodes(1)
    pending = [a + b for a, b in zip(reference.pending, last, strict=True)]
    assert_holds(write(cache, last), reference.rows, pending)


def test_no_part_runs_beside_entries_of_all_rows() -> None:
    cache = new_cache()
    cache.writing_nodes(1)
    write(cache, [[1]] * BATCH)
    with pytest.raises(ModelError, match="keep or drop them"):
        cache.part(slice(0, 1))
    cache.drop_pending()
    assert cache.part(slice(0, 1)).batch == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 7), st.integers(1, 5))
def test_a_run_moves_over_places_of_its_own(held: int, gap: int, n: int) -> None:
    """A shorter row's entries move to its end, also where that is less far than they are many."""
    cache = new_cache(capacity=held + gap + n)
    for row, length in enumerate((held + gap, held)):
        cache.writing_prompt(row, length)
        write(cache, [list(range(length))])
        cache.keep_first(row, length)
    cache.writing_nodes(n)
    write(cache, [[100 * row + i for i in range(n)] for row in range(1, BATCH + 1)])
    cache.keep([[], range(n), []])
    cache.writing_prompt(1, 0)
    assert_holds(write(cache, [[]]), [[*range(held), *range(200, 200 + n)]])


def test_memory_is_what_was_asked_for() -> None:
    cache = SlotCache([torch.device("cpu")] * 2, BATCH, 10)
    assert cache.nbytes == 0
    cache.writing_prompt(0, 2)
    cache.update(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4), 0)
    per_slot = 2 * 2 * (4 + 4) * 4  # layers, heads, keys and values, bytes of a float
    assert cache.nbytes == BATCH * 10 * per_slot
    cache.grow(7)
    assert cache.capacity == 10
    cache.grow(12)
    assert cache.nbytes == BATCH * 12 * per_slot


def test_only_entries_that_change_place_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    moved: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(cache, "_move", lambda source, target: moved.append((source, target)))
    cache.writing_nodes(4)
    write(cache, [[1, 2, 3, 4]] * BATCH)
    cache.keep([[0, 1], [0, 2], []])
    assert moved == [([8 + 2], [8 + 1])]
    cache.writing_nodes(2)
    cache.keep([[0, 1], [0], []])
    assert len(moved) == 1


def test_only_what_is_kept_of_a_shorter_row_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    cache.writing_prompt(1, 3)
    write(cache, [[1, 2, 3]])
    cache.keep_first(1, 3)
    moved: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(cache, "_move", lambda source, target: moved.append((source, target)))
    cache.writing_nodes(2)
    write(cache, [[4, 5]] * BATCH)
    cache.keep([[0, 1], [0, 1], []])
    assert moved == [([3, 4], [0, 1])]
    assert cache.lengths == [2, 5, 0]


def test_entries_beyond_the_capacity_are_an_error_not_an_overwrite() -> None:
    cache = new_cache(capacity=4)
    with pytest.raises(ModelError, match="has 4 slots per row but 5 are needed"):
        cache.writing_prompt(0, 5)
    cache.writing_nodes(3)
    with pytest.raises(ModelError, match="has 4 slots per row but 5 are needed"):
        cache.writing_nodes(2)
