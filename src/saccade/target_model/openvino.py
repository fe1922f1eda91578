"""Forwards of a lean decoder as OpenVINO graphs on a CPU, on keys and values in memory of ours.

A forward of few tokens spends half of its time around the matrix products; a graph fuses what is there, and keeps the
weights packed. Lengths, commits and rollbacks stay the cache's (`RowCache`), whose entries are in blocks here. A mask
covers new tokens only: where it hides pending ones, as in the levels of a draft tree, these run again with it.
What the graphs do not take (windows that end, a layer's input alone) runs on the lean decoder, on copies of entries.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from operator import add
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from saccade import cpu
from saccade.errors import SaccadeWarning
from saccade.options import INT8
from saccade.target_model.cache import RowCache
from saccade.target_model.executor import Ahead, Unread
from saccade.target_model.lean import LeanDecoder, LeanExecutor
from saccade.target_model.linear import SHARE
from saccade.target_model.openvino_graph import BLOCK, GraphBuilder, missing, runtime
from saccade.target_model.token_blocks import ForwardOutput, Requirements, TokenBlock, pack_deepstack, split_outputs

_GAIN = 0.95  # share of the lean decoder's time below which OpenVINO is the default
_KEPT = 256  # most tokens of a row's block that are kept for later ones, which may hide some
_NO_MASK = np.zeros(0, np.uint8), np.zeros(0, np.int32)


def obstacle(target: Any, decoder: LeanDecoder) -> str:
    """Why OpenVINO cannot run a `Target`'s lean decoder, as part of a sentence; empty if it can."""
    if target.device.type != "cpu":
        return f"it runs on CPUs alone, not on {target.device.type}"
    if target.exact:
        return "exact mode controls the order of sums, which OpenVINO does not tell"
    if target.dtype not in (torch.float32, torch.bfloat16):
        return f"it runs models in float32 and bfloat16, not in {target.dtype}"
    if target.dtype == torch.bfloat16 and not cpu.has_instructions(torch.bfloat16):
        return "this processor has no instructions for bfloat16"
    size, free = sum(p.nbytes for p in target.decoder.parameters()), cpu.available_memory()
    if free is not None and size > SHARE * free:
        return "it holds the weights a second time, for which there is too little memory"
    if decoder.is_adapted:
        return "adapters run on the lean decoder"
    return ""


@dataclass(slots=True)
class _Bound:
    """A graph's request, and the arrays that its tensors share, which OpenVINO does not keep."""

    request: Any
    held: dict[str, Any] = field(default_factory=dict)
    memory: Any = None  # identifies the cache's

    def put(self, name: str, values: Any) -> None:
        """Write values to an input's own array, which OpenVINO reads without being told."""
        held = self.held.get(name)
        if held is not None and held.shape == values.shape:
            held[...] = values
        else:
            self.give(name, np.array(values, order="C"))

    def give(self, name: str, array: Any) -> None:
        """Share an array as an input or output."""
        self.held[name] = array
        self.request.set_tensor(name, runtime().Tensor(array, shared_memory=True))


@dataclass(slots=True)
class _Rows:
    """What a forward's attention has of its rows."""

    spans: list[tuple[int, int]]  # first slot and number of slots of every row's segment
    past: list[int]  # entries before the tokens
    counts: list[int]  # tokens
    masks: list[Any]  # `[n, n]` of uint8; None for causal attention


@dataclass(slots=True)
class _Part:
    """Pending tokens of a row, for a later forward that hides some of them."""

    x: Tensor  # `[n, d]`
    angles: Tensor  # `[n, 2 * D]`
    mask: Tensor | None  # `[n, F + n]` bool


class OpenVinoExecutor(LeanExecutor):
    """A lean decoder as OpenVINO graphs, which are compiled when they are first needed."""

    name = "openvino"

    def __init__(self, target: Any, decoder: LeanDecoder) -> None:
        super().__init__(target, decoder)
        self._int8 = target.weights == INT8
        # Where a window ends, the lean decoder goes on, which does not round.
        self.rounds = self._int8 and target.traits.masks.reach is None
        self._bound: dict[Any, _Bound] = {}
        self._pending: WeakKeyDictionary[RowCache, dict[int, list[_Part]]] = WeakKeyDictionary()
        self._lock = RLock()  # taken again where a cache is given back in between
        decoder.watch(target.embedding_weight)

    @classmethod
    def of(cls, target: Any, decoder: LeanDecoder, named: bool = False) -> OpenVinoExecutor | None:
        """Return the executor of a `Target`; None where it does not fit or, unless it was chosen, is not faster."""
        if missing():
            return None
        if problem := obstacle(target, decoder):
            if named:
                warnings.warn(
                    f"{target.model.config._name_or_path or 'The model'} runs without OpenVINO: {problem}.",
                    SaccadeWarning,
                    stacklevel=2,
                )
            return None
        made = cls(target, decoder)
        if target.chosen == "auto" and not made._is_faster():
            return None
        return made

    def _is_faster(self) -> bool:
        """Whether one token and eight take less time than on the lean decoder, measured once per machine and shape."""
        target, size = self.target, self.decoder.size
        cache = self.new_cache(1, BLOCK)
        cache.reserve(0, BLOCK)

        def run(forward: Any, count: int) -> None:
            forward(cache, [TokenBlock([0], torch.zeros(1, count, dtype=torch.long))], Requirements())
            cache.drop([0])

        def measure() -> list[float]:
            ways = self.forward, LeanExecutor(target, self.decoder).forward
            ours, theirs = zip(
                *(cpu.shortest_times(*(partial(run, way, n) for way in ways)) for n in (1, 8)), strict=True
            )
            return [sum(ours) / sum(theirs)]

        kind = str(target.dtype).removeprefix("torch.") + (" int8" if self._int8 else "")
        name = f"OpenVINO {version('openvino')} over lean {size} {kind} {torch.get_num_threads()} threads"
        return cpu.remember(name, measure)[0] < _GAIN

    @property
    def is_current(self) -> bool:
        """As of `Executor`; graphs are compiled again if weights have changed."""
        if self.decoder.take_changes():
            with self._lock:
                self._bound.clear()
        return super().is_current

    def new_cache(self, rows: int, max_slots: int, in_levels: bool = False) -> RowCache:
        """As of `Executor`; one without blocks, for the lean decoder, where levels would run earlier ones again."""
        if in_levels and self.decoder.is_small:
            return super().new_cache(rows, max_slots, in_levels)
        shape = self.target.cache_shape
        return RowCache(max_slots=max_slots, rows=rows, block=BLOCK, spare=int(self.rounds), **shape)

    def keep(self, cache: RowCache) -> None:
        """As of `Executor`: none; its memory is given up."""
        with self._lock:
            for bound in self._bound.values():
                if bound.memory and bound.memory[0] == id(cache):
                    bound.memory = None
                    bound.held = {name: array for name, array in bound.held.items() if "." not in name}

    def forward(self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements) -> list[ForwardOutput]:
        """As of `Executor`."""
        if not self._takes(cache, blocks):
            self._pending.pop(cache, None)  # or what was kept of an earlier step may be as long as this one's
            return super().forward(cache, blocks, requirements)
        target = self.target
        x, deepstack = target.embedded(blocks), pack_deepstack(blocks)
        angles = self.decoder.angles(x, target.positions_of(cache, blocks))
        rows, again = self._rows(cache, blocks)
        wanted, kept, known = _wanted(blocks), None, self._remember(cache, blocks, x, angles)
        if again:
            x, angles, kept = _joined(known, rows)
            wanted = kept if wanted is None else kept[wanted]
        wanted = np.arange(len(x), dtype=np.int32) if wanted is None else wanted
        if self.rounds and len(x) == 1:  # alone it would not be rounded; the next slot is written again later
            x, angles, rows.counts[0], kept = x.expand(2, -1), angles.expand(2, -1), 2, np.zeros(1, np.int32)
        layers = tuple(layer for layer in requirements.layers if layer)  # the first one's is the input
        logits = x.new_empty(len(wanted), target.vocab_size, dtype=torch.float32)
        hidden = {layer: x.new_empty(x.shape, dtype=torch.float32) for layer in layers}
        with self._lock:
            bound = self._graph(cache, "forward", layers, requirements.final, len(deepstack))
            bound.put("x", x.float().numpy())
            bound.put("angles", angles.float().numpy())
            for index, features in enumerate(deepstack):
                bound.put(f"deepstack.{index}", features.float().numpy())
            bound.put("wanted", wanted)
            self._place(bound, rows)
            bound.give("logits", logits.numpy())
            for layer, state in hidden.items():
                bound.give(f"hidden.{layer}", state.numpy())
            bound.request.infer()
        for block in blocks:
            for row in block.rows:
                cache.pending[row] += block.count
        if 0 in requirements.layers:
            hidden[0] = x.clone()
        if kept is not None:
            hidden = {layer: state[kept] for layer, state in hidden.items()}
        dtype = target.dtype
        return split_outputs(blocks, logits.to(dtype), {layer: state.to(dtype) for layer, state in hidden.items()})

    def run_ahead(self, cache: RowCache, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """As of `Executor`: in one graph."""
        rows, tokens, steps, vocab = ahead
        if isinstance(tokens, Unread):
            return None
        counts = list(map(len, tokens))
        pasts = [cache.lengths[row] + cache.pending[row] for row in rows]
        longest = max(map(add, pasts, counts)) + steps - 1
        reach = self.target.traits.masks.reach
        if cache.block == 1 or (reach is not None and longest > reach) or vocab > len(self.target.embedding_weight):
            return None
        segments = list[tuple[int, int]]()
        for row, past, count in zip(rows, pasts, counts, strict=True):
            cache.check_room(row, past + count + steps - 1)
            segments.append((cache.start(row), cache.capacity(row)))
        places = [at + place for at, count in zip(first, counts, strict=True) for place in range(count)]
        places += [at + count + step for step in range(steps - 1) for at, count in zip(first, counts, strict=True)]
        positions = torch.tensor(places)
        context = self.target.traits.limits.context
        positions = positions if context is None else positions.clamp(max=context - 1)
        angles = self.decoder.angles(self.decoder._norm[None], positions[None])
        logits = torch.empty(steps, len(rows), vocab)
        self._pending.pop(cache, None)
        with self._lock:
            bound = self._graph(cache, "ahead", steps, vocab)
            bound.put("ids", np.array(list(chain.from_iterable(tokens)), np.int32))
            bound.put("angles", angles.float().numpy())
            self._place(bound, _Rows(segments, pasts, counts, []))
            bound.give("logits", logits.numpy())
            bound.request.infer()
        for row, count in zip(rows, counts, strict=True):
            cache.pending[row] += count + steps - 1
        return logits

    # -- what runs -----------------------------------------------------------------------------------------

    def _takes(self, cache: RowCache, blocks: Sequence[TokenBlock]) -> bool:
        """Whether a graph runs these blocks: no window ends within their rows' entries."""
        if cache.block == 1:
            return False
        reach, known = self.target.traits.masks.reach, self._pending.get(cache, {})
        hides = any(_hides(block, cache.pending[block.rows[0]]) for block in blocks)
        for block in blocks:
            before = cache.pending[block.rows[0]]
            for row in block.rows:
                seen = cache.lengths[row] + cache.pending[row] + block.count
                if block.slot_shifts is not None or (reach is not None and seen > reach):
                    return False
                kept = sum(len(part.x) for part in known.get(row, ())) if before else 0
                if hides and (block.deepstack or block.count > _KEPT or kept != before):
                    return False
                cache.check_room(row, seen)
        return True

    def _rows(self, cache: RowCache, blocks: Sequence[TokenBlock]) -> tuple[_Rows, bool]:
        """Places, lengths and masks of the rows, and whether some of their pending tokens have to run again."""
        rows, again = _Rows([], [], [], []), False
        for block in blocks:
            before, mask = cache.pending[block.rows[0]], block.attention_mask
            again |= _hides(block, before)
            shown = None if mask is None or block.count == 1 else mask[:, :, before:].contiguous().view(torch.uint8)
            for place, row in enumerate(block.rows):
                rows.spans.append((cache.start(row), cache.capacity(row)))
                rows.past.append(cache.lengths[row] + before)
                rows.counts.append(block.count)
                rows.masks.append(None if shown is None else shown[min(place, len(shown) - 1)].numpy())
        return rows, again

    def _remember(self, cache: RowCache, blocks: Sequence[TokenBlock], x: Tensor, angles: Tensor) -> list[list[_Part]]:
        """Keep pending tokens for forwards that hide some of them; return those of every row."""
        known, at, parts = self._pending.setdefault(cache, {}), 0, []
        for block in blocks:
            mask = block.attention_mask
            for place, row in enumerate(block.rows):
                part = slice(at, at + block.count)
                own = None if mask is None else mask[min(place, len(mask) - 1)]
                before = known.get(row, []) if cache.pending[row] else []
                known[row] = [*before, _Part(x[part], angles[part], own)] if block.count <= _KEPT else []
                parts.append(known[row])
                at += block.count
        return parts

    # -- requests ------------------------------------------------------------------------------------------

    def _graph(self, cache: RowCache, kind: str, *key: Any) -> _Bound:
        """Return the request of a graph of some kind, bound to a cache's memory."""
        low = self.target.dtype == torch.bfloat16
        key = (torch.get_num_threads(), kind, *key)
        bound = self._bound.get(key)
        if bound is None:
            builder = GraphBuilder(self.decoder, self._int8, low, self.rounds)
            if kind == "ahead":
                compiled = builder.ahead(self.target.embedding_weight, *key[2:])
            else:
                compiled = builder.forward(*key[2:])
            bound = self._bound[key] = _Bound(compiled.create_infer_request())
        self._bind(bound, cache, low)
        return bound

    def _bind(self, bound: _Bound, cache: RowCache, low: bool) -> None:
        layers = cache.layers
        if not layers[0].is_initialized:
            like = torch.zeros(1, self.decoder.kv_heads, 1, self.decoder.head_dim, dtype=self.target.dtype)
            for layer in layers:
                layer.lazy_initialization(like, like)
        memory = id(cache), layers[0].keys.data_ptr(), layers[0].keys.shape
        if bound.memory == memory:
            return
        bound.memory = memory
        tensor = runtime().Tensor
        for index, layer in enumerate(layers):
            for name, entries in ((f"keys.{index}", layer.keys), (f"values.{index}", layer.values)):
                if low:
                    raw = entries.view(torch.int16).numpy()
                    bound.held[name] = raw
                    bound.request.set_tensor(name, tensor(raw, list(raw.shape), runtime().Type.bf16))
                else:
                    bound.give(name, entries.numpy())

    def _place(self, bound: _Bound, rows: _Rows) -> None:
        """Give where rows are, and what of each other their new tokens see."""
        if rows.spans != bound.held.get("spans"):
            bound.held["spans"] = rows.spans
            numbers = [np.arange(start // BLOCK, (start + size) // BLOCK, dtype=np.int32) for start, size in rows.spans]
            bound.put("block_indices", np.concatenate(numbers))
            bound.put("block_indices_begins", _begins([len(each) for each in numbers]))
        bound.put("past_lens", np.array(rows.past, np.int32))
        bound.put("subsequence_begins", _begins(rows.counts))
        longest = max(map(add, rows.past, rows.counts))
        bound.put("max_context_len", np.array(longest, np.int32))
        bias = _NO_MASK
        if any(mask is not None for mask in rows.masks):
            masks = [
                np.tri(count, dtype=np.uint8) if mask is None else mask
                for mask, count in zip(rows.masks, rows.counts, strict=True)
            ]
            bias = np.concatenate([mask.ravel() for mask in masks]), _begins([mask.size for mask in masks])
        if rows.masks and (len(bias[0]) or len(bound.held.get("qq_bias", "?"))):
            bound.put("qq_bias", bias[0])
            bound.put("qq_bias_begins", bias[1])


def _hides(block: TokenBlock, before: int) -> bool:
    """Whether some of the entries that were pending before are hidden from a block's tokens."""
    mask = block.attention_mask
    return bool(before) and mask is not None and not bool(mask[:, :, :before].all())


def _joined(known: Sequence[Sequence[_Part]], rows: _Rows) -> tuple[Tensor, Tensor, Any]:
    """Put every row's pending tokens before its new ones; return all, and the places of the new ones."""
    parts, kept, at = list[_Part](), [], 0
    for place, own in enumerate(known):
        count, total = rows.counts[place], sum(len(part.x) for part in own)
        mask, after = np.zeros((total, total), np.uint8), 0
        for part in own:
            n = len(part.x)
            shown = np.tri(n, after + n, after, np.uint8) if part.mask is None else part.mask.numpy()
            mask[after : after + n, : after + n] = shown
            after += n
        rows.past[place] -= total - count
        rows.counts[place], rows.masks[place] = total, mask
        parts += own
        kept.append(np.arange(at + total - count, at + total, dtype=np.int32))
        at += total
    x, angles = torch.cat([part.x for part in parts]), torch.cat([part.angles for part in parts])
    return x, angles, np.concatenate(kept)


def _begins(sizes: Sequence[int]) -> Any:
    return np.cumsum([0, *sizes], dtype=np.int32)


def _wanted(blocks: Sequence[TokenBlock]) -> Any:
    """Indices of the tokens whose logits are computed; None for all."""
    if not any(block.logits_from for block in blocks):
        return None
    indices, start = [], 0
    for block in blocks:
        stop = start + block.tokens.numel()
        each = np.arange(start, stop, dtype=np.int32).reshape(-1, block.count)
        indices.append(each[:, block.logits_from :].ravel())
        start = stop
    return np.concatenate(indices)
