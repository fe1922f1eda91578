"""The arena holds what a list per row would hold, whatever is written, kept, cropped, grown, moved and released."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from families import FAMILIES
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import QUANTUM, RowCache
from saccade.target_model.context import Context

ROWS = 3
SHAPES = [(2, 4, 4), (2, 4, 4), (1, 3, 5)]  # heads, width of keys, width of values; the last layer is unlike
NO_MASKS: dict[str, Tensor | None] = {"all": None}


class Reference:
    """The same with lists: every entry is one number, unique over the test."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.pending: list[list[int]] = [[] for _ in range(ROWS)]
        self.next = count(1)

    def numbers(self, n: int) -> list[int]:
        return [next(self.next) for _ in range(n)]


def entries(numbers: list[int], layer: int, kind: str) -> Tensor:
    """``[H, n, D]`` whose every value tells entry, layer, kind, head and place."""
    heads, key_width, value_width = SHAPES[layer]
    width = key_width if kind == "key" else value_width
    own = torch.arange(heads)[:, None, None] * 10.0 + torch.arange(width)
    return torch.tensor(numbers)[None, :, None] * 1000.0 + layer * 100 + 50 * (kind == "value") + own


def new_cache() -> RowCache:
    return RowCache([torch.device("cpu")] * len(SHAPES), ROWS)


def write(cache: RowCache, parts: list[tuple[list[int], list[list[int]]]]) -> None:
    """A forward: per part its rows and the new entries of each, equally many within a part."""
    cache.plan_layout([(rows, len(numbers[0]), NO_MASKS) for rows, numbers in parts])
    packed = [n for _, numbers in parts for new in numbers for n in new]
    for layer in range(len(SHAPES)):
        cache.layers[layer].write(entries(packed, layer, "key"), entries(packed, layer, "value"))


def add(cache: RowCache, reference: Reference, row: int, n: int, keep: bool = True) -> None:
    new = reference.numbers(n)
    cache.reserve(row, cache.lengths[row] + cache.pending[row] + n)
    write(cache, [([row], [new])])
    reference.pending[row] += new
    if keep:
        commit(cache, reference, row, range(len(reference.pending[row])))


def commit(cache: RowCache, reference: Reference, row: int, chosen: range | list[int]) -> None:
    cache.commit([row], [list(chosen)])
    reference.rows[row] += [reference.pending[row][i] for i in chosen]
    reference.pending[row] = []


def assert_holds(cache: RowCache, reference: Reference) -> None:
    """Every row has its entries in every layer; no two segments overlap, and free slots are zeros."""
    assert cache.lengths == list(map(len, reference.rows))
    assert cache.pending == list(map(len, reference.pending))
    segments = sorted((cache.start(r), cache.capacity(r)) for r in range(ROWS) if cache.capacity(r))
    ends = [0, *(start + capacity for start, capacity in segments)]
    assert all(end <= start for end, (start, _) in zip(ends, segments, strict=False))
    assert ends[-1] <= cache.slots
    starts = [*(start for start, _ in segments), cache.slots]
    for layer in (layer for layer in cache.layers if layer.is_initialized):
        for end, start in zip(ends, starts, strict=True):
            assert not layer.keys[:, end:start].any()
            assert not layer.values[:, end:start].any()
    for row in range(ROWS):
        numbers = reference.rows[row] + reference.pending[row]
        if not numbers:
            continue
        at = cache.start(row)
        for layer in range(len(SHAPES)):
            for kind, tensor in (("key", cache.layers[layer].keys), ("value", cache.layers[layer].values)):
                assert torch.equal(tensor[:, at : at + len(numbers)], entries(numbers, layer, kind))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_sequence_of_operations_leaves_what_lists_would_hold(data: st.DataObject) -> None:
    """The arena exceeds the most slots only where the segments together do, whatever gaps lie between them."""
    cache, reference, fits = new_cache(), Reference(), True
    cache.max_slots = most = data.draw(st.integers(4, 12)) * QUANTUM
    for _ in range(data.draw(st.integers(1, 20))):
        step = data.draw(
            st.sampled_from(["forward", "forward", "commit", "commit", "drop", "crop", "reserve", "release", "expect"])
        )
        row = data.draw(st.integers(0, ROWS - 1))
        if step == "forward":  # several rows, in parts of their own lengths, in any order
            order = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
            parts = []
            for one in order:
                n = data.draw(st.sampled_from([1, 2, 3, 70]))
                cache.reserve(one, cache.lengths[one] + cache.pending[one] + n)
                new = reference.numbers(n)
                parts.append(([one], [new]))
                reference.pending[one] += new
            write(cache, parts)
        elif step == "commit":
            places = range(len(reference.pending[row]))
            chosen = sorted(data.draw(st.sets(st.sampled_from(places)))) if places else []
            commit(cache, reference, row, chosen)
        elif step == "drop":
            cache.drop([row])
            reference.pending[row] = []
        elif step == "crop":
            length = data.draw(st.integers(0, 90))
            cache.crop(row, length)
            reference.rows[row], reference.pending[row] = reference.rows[row][:length], []
        elif step == "reserve":
            cache.reserve(row, data.draw(st.integers(1, most)))
        elif step == "release":
            exported = cache.export(row) if reference.rows[row] else []
            cache.release(row)
            for layer, (keys, values) in enumerate(exported):
                assert torch.equal(keys[0], entries(reference.rows[row], layer, "key"))
                assert torch.equal(values[0], entries(reference.rows[row], layer, "value"))
            reference.rows[row], reference.pending[row] = [], []
        else:
            cache.preallocate(data.draw(st.integers(1, most)))
        fits = fits and sum(map(cache.capacity, range(ROWS))) <= most
        assert not fits or cache.slots <= most
        assert_holds(cache, reference)


def test_a_row_that_grows_in_place_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    cache.preallocate(4 * QUANTUM)
    add(cache, Reference(), 0, 5)
    monkeypatch.setattr(cache, "_copy", lambda *_: pytest.fail("entries were copied"))
    cache.reserve(0, 2 * QUANTUM)
    assert (cache.start(0), cache.capacity(0)) == (0, 2 * QUANTUM)


def test_many_rows_make_the_arena_grow_seldom() -> None:
    """Growing copies all that is held, so that a batch that fills row by row would stutter."""
    cache, sizes = RowCache([torch.device("cpu")] * 2, 32), set()
    for row in range(32):
        cache.reserve(row, 200)
        sizes.add(cache.slots)
    assert len(sizes) <= 9
    assert cache.slots <= 1.5 * 32 * 256


def test_memory_is_in_multiples_of_a_quantum_per_row() -> None:
    cache = RowCache([torch.device("cpu")] * 2, ROWS)
    assert cache.nbytes == 0
    cache.reserve(0, 2)
    cache.plan_layout([([0], 2, NO_MASKS)])
    cache.layers[0].write(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))
    per_slot = 2 * 2 * (4 + 4) * 4  # layers, heads, keys and values, bytes of a float
    assert cache.nbytes == QUANTUM * per_slot
    cache.reserve(0, 7)
    assert cache.capacity(0) == QUANTUM
    cache.reserve(1, QUANTUM + 1)
    assert cache.nbytes == 3 * QUANTUM * per_slot


@pytest.mark.parametrize("name", ["gemma3n", "gemma4", "gemma4_text"])
def test_memory_counts_layers_of_several_sizes_and_none_that_share_entries(name: str) -> None:
    target = Target(FAMILIES[name].model())
    context = Context(target, 1)
    context.load(0, Prompt((1, 20, 30)))
    assert context.cache.nbytes == context.cache.slots * target.entry_bytes
    kinds = target.text_config.layer_types[: len(target.layers) - target.text_config.num_kv_shared_layers]
    heads = {"sliding_attention": 2 * 16, "full_attention": {"gemma3n": 2 * 16, "gemma4": 2 * 32}.get(name, 32)}
    assert target.entry_bytes == 2 * 4 * sum(heads[kind] for kind in kinds)


def test_only_entries_that_change_place_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, reference = new_cache(), Reference()
    for row in range(ROWS):
        add(cache, reference, row, 4, keep=False)
    moved: list[tuple[int, int]] = []
    monkeypatch.setattr(cache, "_move", moved.extend)
    cache.commit(range(ROWS), [[0, 1], [0, 2], []])
    assert moved == [(QUANTUM + 2, QUANTUM + 1)]
    assert cache.lengths == [2, 2, 0]


def test_entries_beyond_the_capacity_are_an_error_not_an_overwrite() -> None:
    cache = new_cache()
    with pytest.raises(ModelError, match="has no slots yet"):
        cache.plan_layout([([0], 1, NO_MASKS)])
    cache.reserve(0, 4)
    cache.plan_layout([([0], QUANTUM, NO_MASKS)])
    with pytest.raises(ModelError, match=f"has {QUANTUM} slots but {QUANTUM + 1} are needed"):
        cache.plan_layout([([0], 1, NO_MASKS)])
