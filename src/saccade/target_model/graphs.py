"""CUDA graphs of decoding forwards, each of a fixed shape and run in one launch.

A decoder of 32 layers takes some 500 launches, which last longer than the work of a small draft model, or of one row of
a large one. A captured forward takes one. It repeats its operations on the same memory with the same shapes, so

- its inputs have memory of their own, filled before every replay: tokens, positions, each row's first slot, and masks;
- tokens per row and keys come in few sizes (`QUERIES`, `keys_for`): padding is at the end, and hidden by masks;
- slots and masks are computed inside, from the inputs; nothing is read by the host.

A chain of greedy tokens is one graph, in which each forward runs on the likeliest token of the one before. So are
drafts of heads and trees of draft models (`saccade.draft.captured`). Of hybrids the model's own modules are captured;
what their recurrent layers keep of new tokens is copied to memory that all graphs of a cache share, where a second
graph commits a path. So a graph belongs to rows, and while tokens of any rows are pending, none runs.

A forward is captured when it comes for the third time, and its replay compared with the ordinary one: where their
logits differ, or capturing fails, no graphs are used any more.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.errors import SaccadeWarning
from saccade.target_model.agreement import are_close
from saccade.target_model.cache import RowCache, on_device
from saccade.target_model.executor import SWITCH, Ahead, Unread
from saccade.target_model.lean import LeanDecoder, LeanExecutor
from saccade.target_model.linear import ModuleGuard
from saccade.target_model.recurrent import HELD, PendingTokens
from saccade.target_model.stock import StockExecutor
from saccade.target_model.token_blocks import (
    ALL,
    ForwardOutput,
    Layout,
    Requirements,
    RowGroup,
    TokenBlock,
    additive,
    run_end,
)

QUERIES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # tokens per row of captured forwards
FEWEST_KEYS = 256
MOST_TOKENS = 256  # tokens of all rows beyond which a forward is not captured: the work outlasts the launches
SEEN = 3  # occurrences of a forward from which on it is captured
MOST_GRAPHS = 64  # graphs of a cache; those not used for longest go first
_MOST_COUNTED = 1024

_CAPTURING = Lock()  # a process has one capture under way at a time

Captured = tuple[Callable[[], None], Any]
"""The replay of a function, and the function's outputs, whose memory a replay overwrites."""


def capture_cuda(function: Callable[[], Any], pool: Any) -> Captured:
    """Capture a function as a CUDA graph on the current device, in the pool of an earlier one, if any."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are chosen and workspaces allocated by the first calls
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _CAPTURING, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs


CAPTURES: dict[str, Callable[..., Captured]] = {"cuda": capture_cuda}  # capturing function by kind of device


@dataclass(frozen=True, slots=True)
class Shape:
    """All that is fixed in a captured forward."""

    starts: tuple[int, ...]  # first slot of each row's segment
    queries: int  # tokens per row, padding included
    keys: int  # slots per row that attention reads, as far as the arena goes
    pending: int | None  # uncommitted entries before the tokens; None for causal attention, whose first slot tells
    last: bool  # whether only the last token's logits are computed
    layers: tuple[int, ...] = ()
    final: Any = "post"
    ahead: tuple[int, int] = (1, 0)  # greedy tokens, and the leading ids that they are chosen from
    rows: tuple[int, ...] = ()  # whose recurrent states it reads; () without such


@dataclass(slots=True)
class _Step:
    """A captured forward, with the memory of its inputs and outputs, which nothing else holds."""

    shape: Shape
    starts: Tensor  # `[A]` those of the shape
    tokens: Tensor  # `[A, n]`
    positions: Tensor  # `[1, A, n]`
    first: Tensor  # `[A]` slot of each row's first token
    mask: Tensor | None = None  # `[A, n, T]` bool over the uncommitted entries; None for causal attention
    last: Tensor | None = None  # `[A]` index of each row's last token, packed; None where all have logits
    replay: Any = None  # repeats it
    logits: Any = None  # `[A, n, V]` of the last replay, or `[A, 1, V]`
    hidden: Any = None  # layer index -> `[A, n, d]`
    parts: list[PendingTokens] = field(default_factory=list)  # by recurrent layer, what a replay writes of the tokens

    def output(self, count: int) -> ForwardOutput:
        """Copy the outputs of ``count`` tokens per row, which the next replay overwrites."""
        logits = self.logits if self.shape.last else self.logits[:, :count]
        hidden = {layer: state[:, :count].clone() for layer, state in self.hidden.items()}
        return ForwardOutput(logits.clone(), hidden)


def keys_for(slots: int) -> int:
    """Round slots up to a number of keys of captured forwards: 256, 384, 512, 768, 1024, 1536, ..."""
    keys = FEWEST_KEYS
    while keys < slots:
        keys = keys * 3 // 2 if keys & (keys - 1) == 0 else keys * 4 // 3
    return keys


class GraphExecutor:
    """A lean decoder or the modules of a hybrid with graphs, and the cache that its last owner gave back, whose graphs
    the next one finds."""

    name = "graphs"
    rounds, fixed_shapes = False, True

    def __init__(self, target: Any, decoder: LeanDecoder | None) -> None:
        self.target, self.decoder = target, decoder
        self.device = target.device
        self.ordinary: LeanExecutor | StockExecutor = target.stock_modules
        self._guard: LeanDecoder | ModuleGuard
        if decoder is None:
            self._guard = ModuleGuard(target.model, (target.decoder, target.output_embeddings), ())
        else:
            decoder.reads_positions = False
            self._guard = decoder
            self.ordinary = LeanExecutor(target, decoder)
        self.early_exit = self.ordinary.early_exit
        self.lm_head = self.ordinary.lm_head
        self.enabled = True
        self.moves = 0
        self.lock = Lock()
        head = target.output_embeddings
        self._weights = [*target.decoder.parameters(), *target.decoder.buffers()]
        self._weights += head.parameters()
        self._addresses = [w.data_ptr() for w in self._weights]
        self._pool: Any = None
        self._logits: dict[int, Tensor] = {}
        self.spare: RowCache | None = None
        inner = max(w.shape[-2] for layer in target.layers for w in layer.parameters() if w.dim() > 1)
        logits = 2 * target.vocab_size  # of all powers of two of tokens
        activations = 8 * target.embedding_weight.shape[1] + 4 * inner
        mask = target.traits.limits.context or 0
        numbers = logits + activations + mask
        self._of_forwards: int = MOST_TOKENS * numbers * target.dtype.itemsize
        self._of_drafts = 0

    @classmethod
    def of(cls, target: Any, decoder: LeanDecoder | None, named: bool = False) -> GraphExecutor | None:
        """Return the executor of a `Target`; None where its forwards are not captured."""
        if target.device.type not in CAPTURES:
            if named:
                warnings.warn(
                    f"There are no graphs on {target.device.type} devices, so the model runs on ordinary operations.",
                    SaccadeWarning,
                    stacklevel=2,
                )
            return None
        # Angles of these depend on the longest sequence, which the host reads.
        rope = getattr(target.text_config, "rope_parameters", None) or {}
        changes = rope.get("rope_type") == "dynamic" or target.traits.limits.longrope_threshold is not None
        return None if changes else cls(target, decoder)

    @property
    def reserved(self) -> int:
        """As of `Executor`."""
        pending = 2 * MOST_TOKENS * int(self.target.pending_bytes)  # in sizes of powers of two
        return self._of_forwards + self._of_drafts + pending

    @property
    def is_current(self) -> bool:
        """As of `Executor`."""
        self.check_weights()
        return self._guard.is_current

    def reserve_drafts(self) -> bool:
        """Count captured drafts, too: logits of two levels, of one of them in float32 as well."""
        size = 2 * self.target.dtype.itemsize + 4
        self._of_drafts = MOST_TOKENS * self.target.vocab_size * size
        return True

    def check_weights(self) -> None:
        """Drop all graphs if weights have moved."""
        addresses = [w.data_ptr() for w in self._weights]
        if addresses != self._addresses:
            self._addresses = addresses
            self.moves += 1

    def new_cache(self, rows: int, max_slots: int, in_levels: bool) -> RowCache:
        """As of `Executor`; the one that was given back if it has so many rows and no more slots."""
        spare, self.spare = self.spare, None
        if spare is not None and spare.rows == rows and spare.slots <= max_slots:
            spare.reset()
            spare.max_slots = max_slots
            return spare
        made = self.ordinary.new_cache(rows, max_slots, in_levels)
        made.graphs = StepGraphs(self, made)
        return made

    def keep(self, cache: RowCache) -> None:
        """As of `Executor`."""
        self.spare = cache

    def forward(self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements) -> list[ForwardOutput]:
        """As of `Executor`."""
        ordinary = partial(self.ordinary.forward, cache, blocks, requirements)
        if cache.graphs is None or len(blocks) > 1:
            return ordinary()
        return [cache.graphs.run(blocks[0], requirements, ordinary)]

    def run_ahead(self, cache: RowCache, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """As of `Executor`: in one graph, once there is one."""
        if cache.graphs is None or not self.enabled:
            return None
        chained: Tensor | None = cache.graphs.run_ahead(first, ahead)
        return chained

    def capture(self, function: Callable[[], Any]) -> Captured:
        """Capture a function; what was allocated while it ran is shared with the other graphs, but for its outputs."""
        if self.device.type != "cuda":
            return CAPTURES[self.device.type](function, None)
        with torch.cuda.device(self.device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            return CAPTURES["cuda"](function, self._pool)

    def share(self, logits: Tensor) -> Tensor:
        """Copy logits ``[n, V]`` to memory that all graphs share, since each replay's are copied before the next."""
        size = 1 << (len(logits) - 1).bit_length()
        if size not in self._logits:  # by the first call, which is not captured
            self._logits[size] = logits.new_zeros(size, logits.shape[1])
        return self._logits[size][: len(logits)].copy_(logits)

    def give_up(self, reason: str) -> None:
        """Use no graphs from now on, and say so."""
        self.enabled = False
        warnings.warn(
            f"Decoding runs without CUDA graphs, which is slower: {reason}. {SWITCH}=lean turns them off without "
            "this message.",
            SaccadeWarning,
            stacklevel=2,
        )


class Graphs:
    """Captured functions by all that is fixed in them, on the memory of some caches and weights."""

    def __init__(self, pool: GraphExecutor) -> None:
        self._pool = pool
        self._steps: OrderedDict[Any, Any] = OrderedDict()
        self._seen: Counter[Any] = Counter()
        self._moves: tuple[int, ...] = ()
        self.replays = 0

    def _current(self, shape: Any, *moves: int) -> Any:
        """The function captured for a shape; None without one. ``moves`` count how often memory that it reads moved."""
        if moves != self._moves:
            self._steps.clear()
            self._moves = moves
        step = self._steps.get(shape)
        if step is not None:
            self._steps.move_to_end(shape)
            self.replays += 1
        return step

    def _is_due(self, shape: Any) -> bool:
        """Count a function that is not captured; whether it has come often enough to be."""
        if len(self._seen) >= _MOST_COUNTED:
            self._seen.clear()
        self._seen[shape] += 1
        return self._seen[shape] >= SEEN

    def _captured(self, capture: Callable[[], Any]) -> Any:
        """Capture a function and replay it; None, and no graphs from now on, where that fails."""
        try:
            with self._pool.lock:
                step = capture()
                self._replay(step)
        except Exception as problem:  # of any kernel, allocator or driver; the step itself has not run yet
            first, *_ = str(problem).strip().splitlines() or [""]
            self._pool.give_up(f"capturing failed ({type(problem).__name__}: {first})")
            return None
        return step

    def _replay(self, step: Any) -> None:
        step.replay()

    def _keep(self, shape: Any, step: Any, agrees: bool) -> None:
        """Keep what was captured if ``agrees``, its replay with ordinary operations; else use no graphs any more."""
        if not agrees:
            return self._pool.give_up("a captured forward gave other logits than the same one without a graph")
        self._steps[shape] = step
        while len(self._steps) > MOST_GRAPHS:
            self._steps.popitem(last=False)
        return None


class StepGraphs(Graphs):
    """Captured forwards of one cache."""

    def __init__(self, pool: GraphExecutor, cache: RowCache) -> None:
        super().__init__(pool)
        self._cache = cast("RowCache", weakref.proxy(cache))  # which owns this
        self._held: dict[tuple[int, str, int], Tensor] = {}  # by layer, field and size, of `PendingTokens`
        self.drafts: dict[Any, Graphs] = {}  # of a draft model's trees (`saccade.draft.captured`)

    def run(
        self, block: TokenBlock, requirements: Requirements, ordinary: Callable[[], list[ForwardOutput]]
    ) -> ForwardOutput:
        """Run a block by its graph, or ``ordinary`` where it has none."""
        shape = self._shape(block, requirements) if self._pool.enabled else None
        if shape is None:
            return ordinary()[0]
        step = self._known(shape)
        if step is None:
            return self._first(shape, block, ordinary)
        with self._pool.lock:
            self._fill(step, block)
            self._replay(step)
            output = step.output(block.count)
        for row in block.rows:
            self._cache.pending[row] += block.count
        return output

    def run_ahead(self, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """Run a chain by its graph; None where it has none. Arguments as of `Executor`."""
        rows, tokens, steps, _ = ahead
        unread = tokens if isinstance(tokens, Unread) else None
        counts = [len(each) for each in tokens] if unread is None else [unread.tokens.shape[1]] * len(rows)
        shape = self._chain_shape(ahead, counts)
        if shape is None:
            return None
        ends = [self._cache.start(row) + self._cache.lengths[row] + self._cache.pending[row] for row in rows]
        if unread is None:
            padded = [[*each, *[0] * (shape.queries - len(each))] for each in tokens]
            places = zip(padded, ends, counts, first, strict=True)
            table = on_device([[*each, *place] for each, *place in places], self._pool.device)
        else:
            filled = pad(unread.tokens, (0, shape.queries - counts[0]))
            at, position = on_device([ends, first], self._pool.device)
            table = torch.cat([filled, torch.stack([at, unread.counts, position], 1)], 1)
        logits = self._run_chain(shape, table, first, ahead)
        if logits is not None and unread is None:
            for row, count in zip(rows, counts, strict=True):
                self._cache.pending[row] += (shape.queries if shape.rows else count) + steps - 1
        return logits

    def _run_chain(self, shape: Shape, table: Tensor, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """Run a chain by its graph, captured now if it is due; ``table`` as of `_capture_ahead`."""
        step = self._known(shape)
        if step is None:
            if not self._is_due(shape):
                return None
            step = self._captured(lambda: self._capture_ahead(shape, table))
            if step is None:
                return None
            read = [row[: row[shape.queries + 1]] for row in table.tolist()]
            chained = step.logits[..., : ahead.vocab].clone()
            self._keep(shape, step, self._chains_agree(chained, first, ahead._replace(tokens=read)))
            if not self._pool.enabled:
                return None
        with self._pool.lock:
            step.tokens.copy_(table)
            self._replay(step)
            logits: Tensor = step.logits[..., : ahead.vocab].clone()
        return logits

    def _chain_shape(self, ahead: Ahead, counts: Sequence[int]) -> Shape | None:
        """What a graph of a chain after so many tokens of every row would be fixed to; None where it gets none."""
        cache, target, most = self._cache, self._pool.target, max(counts)
        if most > QUERIES[-1] or ahead.vocab > len(target.embedding_weight):
            return None
        queries = each_row = next(size for size in QUERIES if size >= most)
        own: tuple[int, ...] = ()
        if cache.states is not None:
            if isinstance(ahead.tokens, Unread) or cache.states.is_waiting:
                return None
            queries, each_row = most, most + ahead.steps - 1
            own = tuple(ahead.rows)
        if each_row * len(counts) > MOST_TOKENS:
            return None
        longest = 0
        for row, count in zip(ahead.rows, counts, strict=True):
            after = cache.lengths[row] + cache.pending[row] + max(each_row, count + ahead.steps - 1)
            if after > cache.capacity(row):
                return None
            longest = max(longest, after)
        reach = target.traits.masks.reach
        if reach is not None and longest > reach:
            return None
        starts = tuple(map(cache.start, ahead.rows))
        chain = ahead.steps, ahead.vocab
        return Shape(starts, queries, keys_for(longest), None, last=True, ahead=chain, rows=own)

    def _known(self, shape: Shape) -> _Step | None:
        step: _Step | None = self._current(shape, self._cache.moves, self._pool.moves)
        return step

    def _replay(self, step: _Step) -> None:
        step.replay()
        if not step.parts:
            return
        assert self._cache.states is not None
        self._cache.states.resume(step.parts)
        if step.parts[0].paths.repeat is None:
            self._capture_commit(step)

    def _capture_commit(self, step: _Step) -> None:
        """Capture that paths of a replay's tokens are committed, in which now there is none."""
        states, paths = self._cache.states, step.parts[0].paths
        assert states is not None
        padding = [0] * (1 + paths.pending + paths.new)
        rows = [[place, row, *padding] for place, row in enumerate(paths.rows)]
        table = on_device(rows, self._pool.device)
        replay, _ = self._pool.capture(lambda: states.apply(step.parts, table))
        lock = self._pool.lock

        def repeat(numbers: Tensor) -> None:
            with lock:
                table.copy_(numbers)
                replay()

        paths.repeat = repeat

    def _hold(self) -> list[PendingTokens]:
        """Copy what recurrent layers keep of the forward's tokens to where operations of no other graph write."""
        states = self._cache.states
        if states is None:
            return []
        (paths,) = states.paths
        parts = [layer.part(paths) for layer in states.layers]
        for name in HELD:
            old = [getattr(part, name) for part in parts]
            new = [self._memory(place, name, tensor) for place, tensor in enumerate(old)]
            if new[0].numel():
                torch._foreach_copy_(new, old)
            for part, tensor in zip(parts, new, strict=True):
                setattr(part, name, tensor)
        paths.rank = self._memory(-1, "rank", paths.rank).copy_(paths.rank)
        return parts

    def _memory(self, place: int, name: str, like: Tensor) -> Tensor:
        """Memory for a tensor, allocated by the first call, which is not captured."""
        size = 1 << (like.numel() - 1).bit_length() if like.numel() else 0
        if (place, name, size) not in self._held:
            self._held[place, name, size] = like.new_empty(size)
        return self._held[place, name, size][: like.numel()].view(like.shape)

    def _first(self, shape: Shape, block: TokenBlock, ordinary: Callable[[], list[ForwardOutput]]) -> ForwardOutput:
        """Run a forward that has no graph; capture one if it has come often enough."""
        step = self._captured(lambda: self._capture(shape, block)) if self._is_due(shape) else None
        if step is None:
            return ordinary()[0]
        ours = step.output(block.count).logits.float()
        output = ordinary()[0]
        self._keep(shape, step, are_close(ours, output.logits.float(), self._pool.target.dtype))
        return output

    def _chains_agree(self, chained: Tensor, first: Sequence[int], ahead: Ahead) -> bool:
        """Whether ordinary forwards over all tokens of a chain give its logits ``[steps, A, V]``."""
        pool, cache = self._pool, self._cache
        assert not isinstance(ahead.tokens, Unread)
        for place, (row, tokens) in enumerate(zip(ahead.rows, ahead.tokens, strict=True)):
            ours, pending = chained[:, place], cache.pending[row]
            every = torch.cat([on_device(tokens, pool.device), ours[:-1].argmax(-1)])
            positions = torch.arange(first[place], first[place] + len(every), device=pool.device)
            block = TokenBlock([row], every[None], positions=positions[None, None], logits_from=len(tokens) - 1)
            (output,) = pool.ordinary.forward(cache, [block], Requirements())
            cache.pending[row] = pending
            if not are_close(ours.float(), output.logits[0, :, : ahead.vocab].float(), pool.target.dtype):
                return False
        return True

    def _capture_ahead(self, shape: Shape, table: Tensor) -> _Step:
        """Capture a chain; ``table`` ``[A, n + 3]``: each row's tokens, the first one's slot, count, position."""
        pool, cache, target = self._pool, self._cache, self._pool.target
        rows, size, device = len(shape.starts), shape.queries, pool.device
        steps, vocab = shape.ahead
        starts = on_device(shape.starts, device)
        table = table.clone()
        step = _Step(shape, starts, table, table, table)
        bound = target.traits.limits.context or torch.iinfo(torch.long).max
        one = replace(shape, queries=1)

        def forward() -> tuple[Tensor, dict[int, Tensor]]:
            tokens = table[:, :size]
            first, count, position = table[:, size:].unbind(1)
            new = torch.arange(size, device=device)
            begins = torch.arange(0, rows * size, size, device=device)
            last = begins + count - 1
            visible = new < count[:, None]  # `[A, T]` pending tokens that are no padding
            levels: list[Tensor] = []
            for each in (shape, *[one] * (steps - 1)):
                if levels:
                    tokens = levels[-1][:, :vocab].max(-1, keepdim=True).indices
                    new = new[:1]
                after, mask = 0, None
                if levels and shape.rows:  # a row's padding stays pending, before these tokens
                    after = size + len(levels) - 1
                    visible = pad(visible, (0, 1), value=True)
                    each, mask = replace(one, pending=after), visible[:, None]
                lay_out(cache, each, starts, first, target.dtype, target.traits.masks.names, mask, after)
                positions = (position[:, None] + new).clamp(max=bound - 1).flatten()[None]
                indices = None if levels else last
                logits, _ = pool.ordinary.compute(cache, tokens, positions, Requirements(), indices)
                levels.append(logits)
                passed = 1 if len(levels) > 1 else count
                first = first + (size if shape.rows and len(levels) == 1 else passed)
                position = position + passed
            step.parts = self._hold()
            joined = pool.share(torch.cat(levels))
            return joined.view(steps, rows, -1), {}

        step.replay, (step.logits, step.hidden) = pool.capture(forward)
        return step

    def _capture(self, shape: Shape, block: TokenBlock) -> _Step:
        pool, cache, target = self._pool, self._cache, self._pool.target
        rows, device = len(shape.starts), pool.device
        starts = on_device(shape.starts, device)
        requirements = Requirements(shape.layers, shape.final)
        tokens = torch.zeros(rows, shape.queries, dtype=torch.long, device=device)
        step = _Step(shape, starts, tokens, tokens[None].clone(), tokens[:, 0].clone())
        if shape.pending is not None:
            step.mask = tokens.new_zeros(rows, shape.queries, shape.pending + shape.queries, dtype=torch.bool)
        if shape.last:
            step.last = step.first.clone()
        self._fill(step, block)

        def forward() -> tuple[Tensor, dict[int, Tensor]]:
            lay_out(cache, shape, starts, step.first, target.dtype, target.traits.masks.names, step.mask)
            positions = step.positions.flatten(1)
            logits, states = pool.ordinary.compute(cache, step.tokens, positions, requirements, step.last)
            step.parts = self._hold()
            logits = pool.share(logits)
            hidden = {layer: state.view(rows, shape.queries, -1) for layer, state in states.items()}
            return logits.view(rows, -1, logits.shape[-1]), hidden

        step.replay, (step.logits, step.hidden) = pool.capture(forward)
        return step

    def _shape(self, block: TokenBlock, requirements: Requirements) -> Shape | None:
        """Return what a graph of the block would be fixed to; None for a block that is not captured."""
        cache, count = self._cache, block.count
        special = (block.embeddings, block.positions, block.slot_shifts)
        last = block.logits_from == count - 1 and count > 1
        if any(tensor is not None for tensor in special) or block.deepstack or (block.logits_from and not last):
            return None
        starts = tuple(cache.start(row) for row in block.rows)
        ends = [cache.lengths[row] + cache.pending[row] for row in block.rows]
        room = min(cache.capacity(row) - end for end, row in zip(ends, block.rows, strict=True))
        if count > min(room, QUERIES[-1]):  # a lack of room is reported by the ordinary forward
            return None
        queries = next(size for size in QUERIES if size >= count)
        rows: tuple[int, ...] = ()
        if cache.states is not None:
            if block.chain or cache.states.is_waiting:
                return None
            queries = count
            rows = tuple(block.rows)
        queries = queries if queries <= room else count
        visible = max(ends) + queries
        window = self._pool.target.traits.masks.window
        if queries * len(starts) > MOST_TOKENS or (window is not None and visible > window):
            return None
        pending = None if block.attention_mask is None else cache.pending[block.rows[0]]
        required = requirements.layers, requirements.final
        return Shape(starts, queries, keys_for(visible), pending, last, *required, rows=rows)

    def _fill(self, step: _Step, block: TokenBlock) -> None:
        """Copy a block to the memory of a graph's inputs. Padding tokens keep what was there."""
        cache, count, rows = self._cache, block.count, block.rows
        pending = cache.pending[rows[0]]
        step.tokens[:, :count].copy_(block.tokens)
        step.positions[:, :, :count].copy_(self._pool.target.place(cache, block))
        if len(rows) == 1:
            step.first.fill_(cache.ends(rows)[0] + pending)
        else:
            torch.add(cache.numbers.get(cache.ends(rows)), pending, out=step.first)
        if step.mask is not None:
            assert block.attention_mask is not None
            known = pending + count
            step.mask[:, :count, :known].copy_(block.attention_mask)
            if count < step.shape.queries:  # entries of padding, which no token may attend to
                step.mask[:, :count, known:].fill_(value=False)
        if step.last is not None:
            torch.arange(count - 1, len(rows) * step.shape.queries, step.shape.queries, out=step.last)


def lay_out(
    cache: RowCache,
    shape: Shape,
    starts: Tensor,
    first: Tensor,
    dtype: torch.dtype,
    kinds: Sequence[str] = (ALL,),
    mask: Tensor | None = None,
    after: int = 0,
) -> None:
    """Lay out a captured forward in a cache; ``after``: pending tokens before it in recurrent layers."""
    if cache.states is not None:
        cache.states.plan([(shape.rows, shape.queries, mask, 0, after)], starts.device)
    new = torch.arange(shape.queries, device=starts.device)
    groups = _groups(shape, _mask(shape, starts, first, dtype, mask), cache.slots, kinds)
    cache.layout = Layout([], (first[:, None] + new).flatten(), cache.slots, groups)


def _groups(shape: Shape, mask: Tensor, slots: int, kinds: Sequence[str]) -> list[RowGroup]:
    """Rows by attention kernel call, which those too near the end of an arena of ``slots`` share with none."""
    groups, at = [], 0
    while at < len(shape.starts):
        start, stop = shape.starts[at], run_end(shape.starts, at)
        if shape.starts[stop - 1] + shape.keys > slots:
            stop = at + 1
        step = shape.starts[at + 1] - start if stop > at + 1 else 0
        keys = min(shape.keys, slots - start)
        masks: dict[str, Tensor | None] = dict.fromkeys(kinds, mask[at:stop, ..., :keys])  # alike within a window
        groups.append(RowGroup(at * shape.queries, stop - at, shape.queries, start, step, keys, masks))
        at = stop
    return groups


def _mask(shape: Shape, starts: Tensor, first: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Additive mask ``[A, 1, n, K]`` over the slots of each row's segment."""
    keys = torch.arange(shape.keys, device=starts.device)
    first = first - starts  # counted within the segments
    if mask is None:
        new = torch.arange(shape.queries, device=starts.device)
        last = first[:, None] + new  # [A, n]
        return additive(keys <= last[..., None], dtype)[:, None]
    assert shape.pending is not None
    after = keys - (first - shape.pending)[:, None]  # [A, K] index among the uncommitted entries
    known = mask.shape[2]
    index = after.clamp(0, known - 1)[:, None]
    visible = mask.gather(2, index.expand(-1, shape.queries, -1))
    uncommitted = visible & (after < known)[:, None]
    return additive((after < 0)[:, None] | uncommitted, dtype)[:, None]
