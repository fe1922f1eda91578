"""Recurrent layers on draft trees: gated delta nets, Mamba-2 and short convolutions.

A row has a state of constant size in such a layer: the last inputs of its short convolution, and a matrix per head. One
forward computes every node of every branch from the committed state S. With c the decays summed along the path from the
root, the values u that nodes write are, for the delta rule,

    (I + B) u = beta (v - exp(c) S^T k),   B_ij = beta_i exp(c_i - c_j) (k_i . k_j) for the strict ancestors j of i

which is unit lower triangular in any topological order, so that all branches need one triangular solve; for Mamba-2
they are v itself. Outputs are ``exp(c_i) S^T q_i + sum_j exp(c_i - c_j) (q_i . k_j) u_j`` over ancestors and the node,
and the state after an accepted path is ``exp(c) S + sum_j exp(c - c_j) k_j u_j^T``, without a forward.

transformers' modules stay as they are: the functions for convolution and scan that they look up in their own module are
wrapped once, and the wrappers act while a `RecurrentLayer` is updated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from saccade.errors import ModelError

RECURRENT_TYPES = {"linear_attention", "conv"}
"""Kinds of layers, as configurations name them, that have a recurrent state."""
STATELESS_TYPES = {"moe", "mlp"}  # kinds of layers without attention or state
UNMASKED_TYPES = RECURRENT_TYPES | STATELESS_TYPES  # kinds of layers that take no attention mask
CHECKPOINTS = 4  # earlier states of a row that later prompts can start from
UNLIMITED = (0.0, float("inf"))  # limits of Mamba-2's steps that change none of them


EMPTY = torch.empty(0)


class Paths:
    """New tokens of some rows in the packed sequence, and the uncommitted tokens that each of them follows.

    Args:
        mask: ``[A or 1, n, T]`` bool of the n tokens after the chain: ancestors among T tokens and themselves; the
            first T - n are those of ``earlier`` forwards.
        chain: leading tokens of each row that follow each other and are committed for certain.
        places: where the rows' states are among those of all rows.
    """

    repeat: Callable[[Tensor], None] | None = None
    """Commits, in one launch, by a table of every row (`RecurrentStates.commit`); None where that was not captured."""

    def __init__(
        self,
        rows: Sequence[int],
        places: slice | Tensor,
        first: int,
        count: int,
        mask: Tensor,
        chain: int = 0,
        earlier: Paths | None = None,
    ) -> None:
        self.rows, self.first, self.count, self.chain = list(rows), first, count, chain
        self.places = places
        self.live = set(rows)  # those whose tokens are neither committed nor dropped
        self.mask, self.new = mask, count - chain
        self.pending = mask.shape[2] - self.new
        own = mask.sum(-1) - 1
        self.rank: Tensor = (
            own if earlier is None else torch.cat([earlier.rank.expand(len(own), -1), own], 1)
        )  # [A or 1, T]
        self._windows: dict[int, Tensor] = {}

    def part(self, packed: Tensor) -> Tensor:
        """View ``[A, count, ...]`` of a packed tensor ``[1, T, ...]``."""
        rows = len(self.rows)
        return packed[0, self.first : self.first + rows * self.count].view(rows, self.count, *packed.shape[2:])

    @cached_property
    def strict(self) -> Tensor:
        """``[A or 1, n, T]`` bool of the tokens' strict ancestors."""
        return self.mask.tril(self.pending - 1)

    def windows(self, width: int) -> Tensor:
        """Places ``[A or 1, n, width]`` of the inputs before each token, in ``width`` committed ones and T tokens."""
        if not self.new:
            return self.rank.new_zeros(1, 0, width)
        if width not in self._windows:
            back = torch.arange(width, 0, -1, device=self.rank.device)
            rank = self.rank[:, self.pending :, None] - back  # [A or 1, n, width]
            match = self.strict[:, :, None] & (self.rank[:, None, None] == rank[..., None])
            self._windows[width] = torch.where(rank < 0, rank + width, match.byte().argmax(-1) + width)
        return self._windows[width]


@dataclass(slots=True)
class PendingTokens:
    """A layer's uncommitted tokens of some rows; tensors but the inputs are float32."""

    paths: Paths  # of the last forward
    inputs: Tensor  # `[A, width + T, C]` of the convolution; the first ones are committed, or of the chain
    windows: Tensor  # `[A, T, width]`, see `Paths.windows`
    before: PendingTokens | None  # tokens of earlier forwards; None once their tensors are taken over
    state: Tensor | None = None  # `[A, H, d_k, d_v]` after the chain; None where that is the committed one
    keys: Tensor = EMPTY  # `[A, H, T, d_k]`
    values: Tensor = EMPTY  # `[A, H, T, d_v]` written values u
    decay: Tensor = EMPTY  # `[A, H, T]` logarithms, summed along the path
    gates: Tensor = EMPTY  # `[A, H, T]` logarithms of each token

    def scan(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """Outputs ``[A, H, n, d_v]`` of new tokens after a state, and what they write.

        Shapes: state as of the class; q, k ``[A, H, n, d_k]``; v ``[A, H, n, d_v]``; g, beta ``[A, H, n]``.
        """
        mask, known, before = self.paths.mask[:, None], self.paths.pending, self.before
        self.gates = g if before is None else torch.cat([before.gates, g], 2)
        self.keys = k if before is None else torch.cat([before.keys, k], 2)
        decay = self.gates @ self.paths.mask.to(g).mT  # [A, H, n]
        self.decay = decay if before is None else torch.cat([before.decay, decay], 2)
        between = (decay[..., None] - self.decay[..., None, :]).masked_fill(~mask, float("-inf")).exp()  # [A, H, n, T]
        into, values = decay.exp()[..., None], v
        both = q if beta is None else torch.cat([q, k], 2)
        product, at_root = both @ self.keys.mT, both @ state
        if beta is not None:
            new = self.paths.new
            read = beta[..., None] * between * product[:, :, new:]
            values = beta[..., None] * (v - into * at_root[:, :, new:])
            product, at_root = product[:, :, :new], at_root[:, :, :new]
            if before is not None:
                values = values - read[..., :known] @ before.values
            if new > 1:
                # on CUDA by cuBLAS, whose routines a graph captures but for those that return numbers to the host
                values = torch.linalg.solve_triangular(read[..., known:], values, upper=False, unitriangular=True)
        self.values = values if before is None else torch.cat([before.values, values], 2)
        self.before = None
        return into * at_root + (between * product) @ self.values


HELD = ("inputs", "windows", "keys", "values", "decay", "gates")  # fields of `PendingTokens` that wait for a commit


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """A recurrent layer of a `RowCache`, with the interface of transformers' modules."""

    def __init__(self, states: RecurrentStates) -> None:
        super().__init__()
        self._states = states
        self.inputs = EMPTY  # `[rows, width, C]` last inputs of the convolution
        self.state: Tensor | None = None  # `[rows, H, d_k, d_v]` float32; None without a scan
        self.pending: list[PendingTokens] = []

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """States are allocated by the first convolution and the first scan."""

    def note_limit(self) -> None:
        """Note that decoded tokens leave other states than the same tokens in a prompt."""
        self._states.decoded_differ = True

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Announce this layer's convolution, whose inputs are ``[1, C, T]``."""
        _ACTIVE[:] = [self]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **_: Any) -> Any:
        return recurrent_states

    def convolve(
        self, run: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """Convolve ``[1, C, T]`` along every token's path; ``run`` is the module's own convolution of ``[1, C, n]``.

        Shapes: weight ``[C, width + 1]``; bias ``[C]``.
        """
        width, packed = weight.shape[1] - 1, x.mT
        if not self.inputs.numel():
            self.inputs = x.new_zeros(self._states.rows, width, x.shape[1])
        out = []
        parts: list[PendingTokens] = []
        for paths in self._states.paths:
            new, before = paths.part(packed), self._find(paths)
            inputs = self.inputs[paths.places] if before is None else before.inputs
            if paths.chain:
                seen = torch.cat([inputs, new[:, : paths.chain]], 1)
                out.append(run(seen.mT).mT[0, width:])
                inputs = seen[:, seen.shape[1] - width :]
            inputs = torch.cat([inputs, new[:, paths.chain :]], 1)
            windows = paths.windows(width).expand(len(new), -1, -1)
            if paths.new:
                out.append(_convolved(inputs, windows, weight, bias, activation))
            if before is not None:
                windows = torch.cat([before.windows, windows], 1)
            parts.append(PendingTokens(paths, inputs, windows, before))
        self.add(parts)
        return (out[0] if len(out) == 1 else torch.cat(out)).T[None]

    def scan(
        self,
        run: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    ) -> Tensor:
        """Outputs ``[1, T, H, d_v]`` of the recurrence along every token's path.

        Shapes: of the tensors, q, k ``[1, T, H, d_k]``; v ``[1, T, H, d_v]``; g, beta ``[1, T, H]``, all float32.

        Args:
            run: output and last state of a range of the packed sequence after a state, by the module's own scan.
        """
        _, k, v, _, _ = tensors
        if self.state is None:
            self.state = k.new_zeros(self._states.rows, k.shape[2], k.shape[3], v.shape[3])
        out = []
        for paths in self._states.paths:
            part = self.part(paths)
            part.state = None if part.before is None else part.before.state
            state = self.state[paths.places] if part.state is None else part.state
            if paths.chain:
                mixed, part.state = run(slice(paths.first, paths.first + paths.chain), state)
                out.append(mixed[0])
                state = part.state
            if paths.new:
                new = [None if t is None else paths.part(t)[:, paths.chain :].transpose(1, 2) for t in tensors]
                out.append(part.scan(state, *new).transpose(1, 2).flatten(0, 1))  # type: ignore[arg-type]
        return (out[0] if len(out) == 1 else torch.cat(out))[None]

    def add(self, parts: Sequence[PendingTokens]) -> None:
        """Make tokens pending, in place of others of their rows."""
        taken = {row for part in parts for row in part.paths.rows}
        self.pending = [*(p for p in self.pending if not taken & set(p.paths.rows)), *parts]

    def part(self, paths: Paths) -> PendingTokens:
        """The pending tokens of a forward's paths."""
        return next(part for part in self.pending if part.paths is paths)

    def _find(self, paths: Paths) -> PendingTokens | None:
        if not paths.pending:
            return None
        (before,) = [p for p in self.pending if p.paths.rows == paths.rows]
        return before

    def commit(self, part: PendingTokens, places: Tensor, rows: Tensor, counts: Tensor, path: Tensor) -> None:
        """Commit the paths ``[a, L]`` of rows at ``places`` of a part, of which ``counts`` nodes are on the path."""
        width = part.windows.shape[2]
        if not part.windows.shape[1]:
            self.inputs[rows] = part.inputs[places]
            if part.state is not None and self.state is not None:
                self.state[rows] = part.state[places]
            return
        last = path.gather(1, (counts - 1).clamp(min=0)[:, None])  # [a, 1]
        after = torch.cat([part.windows[places[:, None], last, 1:][:, 0], last + width], 1)
        chosen = torch.where(counts[:, None] > 0, after, torch.arange(width, device=path.device))
        self.inputs[rows] = part.inputs[places[:, None], chosen]
        if self.state is None:
            return
        state = self.state[rows] if part.state is None else part.state[places]
        heads, is_some = part.decay.shape[1], counts[:, None, None] > 0
        index = path[:, None].expand(-1, heads, -1)  # [a, H, L]
        decay = part.decay[places].gather(2, index)
        final = decay.gather(2, (counts - 1).clamp(min=0)[:, None, None].expand(-1, heads, 1)) * is_some  # [a, H, 1]
        on_path = torch.arange(path.shape[1], device=path.device) < counts[:, None]
        weight = (final - decay).exp().masked_fill(~on_path[:, None], 0)
        keys = part.keys[places].gather(2, index[..., None].expand(-1, -1, -1, part.keys.shape[3]))
        values = part.values[places].gather(2, index[..., None].expand(-1, -1, -1, part.values.shape[3]))
        self.state[rows] = final.exp()[..., None] * state + (keys * weight[..., None]).mT @ values


def _convolved(inputs: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Convolution ``[A * n, C]`` of the last n inputs ``[A, width + T, C]``, each after a window ``[A, n, width]``."""
    rows, count, width = windows.shape
    length = inputs.shape[1]
    own = torch.arange(length - count, length, device=inputs.device)
    places = torch.cat([windows, own[None, :, None].expand(rows, -1, 1)], 2)
    if rows > 1:
        places = places + torch.arange(0, rows * length, length, device=inputs.device)[:, None, None]
    taken = inputs.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, (rows, count, width + 1))
    mixed = (taken.float() * weight.float().T).sum(2)
    if bias is not None:
        mixed = mixed + bias
    if activation is not None:
        mixed = ACT2FN[activation](mixed)
    out: Tensor = mixed.to(inputs.dtype).flatten(0, 1)
    return out


class RecurrentStates:
    """States of all recurrent layers of a `RowCache`, and the earlier ones that a later prompt can start from."""

    def __init__(self, rows: int, layers: int) -> None:
        self.rows = rows
        self.layers = [RecurrentLayer(self) for _ in range(layers)]
        self.paths: list[Paths] = []  # of the current forward
        self._every: Tensor | None = None  # numbers of all rows
        self.decoded_differ = False  # whether a prompt has to run tokens again that were decoded
        self._saved: list[list[tuple[int, list[Tensor]]]] = [[] for _ in range(rows)]  # by row: length and states

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        saved = [t for row in self._saved for _, tensors in row for t in tensors]
        return sum(t.numel() * t.element_size() for t in (*saved, *self._tensors()))

    @property
    def pending_bytes(self) -> int:
        """Bytes of all pending tokens."""
        parts = [part for layer in self.layers for part in layer.pending]
        return sum(getattr(part, name).nbytes for part in parts for name in HELD)

    @property
    def is_waiting(self) -> bool:
        """Whether tokens of any row are pending."""
        return any(layer.pending for layer in self.layers[:1])

    def _tensors(self) -> list[Tensor]:
        return [t for layer in self.layers for t in (layer.inputs, layer.state) if t is not None and t.numel()]

    def plan(self, parts: Sequence[tuple[Sequence[int], int, Tensor | None, int, int]], device: torch.device) -> None:
        """Prepare the paths of the next forward: rows, tokens of each, mask, chain and pending tokens per block."""
        known = {id(p.paths): p.paths for layer in self.layers[:1] for p in layer.pending}
        self.paths, first = [], 0
        for rows, count, mask, chain, pending in parts:
            earlier = (
                next((p for p in known.values() if p.rows == list(rows) and p.live == set(rows)), None)
                if pending
                else None
            )
            if pending and earlier is None:
                raise ModelError(
                    "Rows with pending tokens ran in other groups than before, which is a bug worth reporting."
                )
            if mask is None:
                mask = torch.ones(1, count, pending + count, dtype=torch.bool, device=device).tril_(pending)
            mask = mask[:, chain:, chain:] if chain else mask
            self.paths.append(Paths(rows, self._places(rows, device), first, count, mask, chain, earlier))
            first += len(rows) * count

    def _places(self, rows: Sequence[int], device: torch.device) -> slice | Tensor:
        """Index of some rows that needs no number of the host on the device."""
        first, count = rows[0], len(rows)
        if list(rows) == list(range(first, first + count)):
            return slice(first, first + count)
        if self._every is None:
            self._every = torch.arange(self.rows, device=device)
        return torch.cat([self._every[row : row + 1] for row in rows])

    def resume(self, parts: Sequence[PendingTokens]) -> None:
        """Note that a graph has written tokens, which were those of ``parts`` by layer when it was captured."""
        paths = parts[0].paths
        paths.live = set(paths.rows)
        for layer, part in zip(self.layers, parts, strict=True):
            layer.add([part])

    @torch.inference_mode()
    def commit(self, rows: Sequence[int], chosen: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Commit chosen pending tokens of some rows after ``lengths`` others, in order, and drop their others."""
        ways = {row: way for row, way in zip(rows, chosen, strict=True) if way}
        for paths in {id(p.paths): p.paths for layer in self.layers[:1] for p in layer.pending}.values():
            mine = [row for row in paths.rows if row in ways and row in paths.live]
            if not mine:
                continue
            if paths.chain:
                (row,) = mine
                if list(ways[row][: paths.chain]) != list(range(paths.chain)):
                    raise ModelError("A part of a prompt's chunk was committed, which is a bug worth reporting.")
                self._save(row, lengths[rows.index(row)] + paths.chain, paths)
            nodes = [[i - paths.chain for i in ways[row][paths.chain :]] for row in mine]
            longest = max(1, *map(len, nodes)) if paths.repeat is None else paths.pending + paths.new
            table = []
            for row, way in zip(mine, nodes, strict=True):
                padding = [0] * (longest - len(way))
                table.append([paths.rows.index(row), row, len(way), *way, *padding])
            if paths.repeat is not None:  # of as many rows as were captured
                table += table[:1] * (len(paths.rows) - len(mine))
            numbers = torch.tensor(table)
            if paths.mask.is_cuda:
                numbers = numbers.pin_memory()
            numbers = numbers.to(paths.mask.device, non_blocking=True)
            if paths.repeat is not None:
                paths.repeat(numbers)
                continue
            self.apply([layer.part(paths) for layer in self.layers], numbers)
        self.drop(rows)

    def apply(self, parts: Sequence[PendingTokens], table: Tensor) -> None:
        """Commit nodes of every layer's part; per row ``[a, 3 + L]`` its place there, itself, how many, and which."""
        for layer, part in zip(self.layers, parts, strict=True):
            layer.commit(part, table[:, 0], table[:, 1], table[:, 2], table[:, 3:])

    def drop(self, rows: Sequence[int]) -> None:
        """Drop all pending tokens of some rows."""
        for layer in self.layers:
            for part in layer.pending:
                part.paths.live.difference_update(rows)
            layer.pending = [part for part in layer.pending if part.paths.live]

    def _save(self, row: int, length: int, paths: Paths) -> None:
        """Retain the states after a row's chain."""
        states: list[Tensor] = []
        for layer in self.layers:
            part = layer.part(paths)
            states.append(part.inputs[0, : part.windows.shape[2]].clone())
            if part.state is not None:
                states.append(part.state[0].clone())
        saved = [entry for entry in self._saved[row] if entry[0] < length]
        self._saved[row] = [*saved, (length, states)][-CHECKPOINTS:]

    def resumable(self, row: int, length: int, current: int) -> int:
        """The most of ``length`` leading tokens of a row (of ``current``) after which its states are known."""
        if length >= current and not self.decoded_differ:
            return length
        return max((at for at, _ in self._saved[row] if at <= length), default=0)

    @torch.inference_mode()
    def restore(self, row: int, length: int) -> None:
        """Return a row to the states after ``length`` tokens."""
        saved = next((tensors for at, tensors in self._saved[row] if at == length), None)
        self._saved[row] = [entry for entry in self._saved[row] if entry[0] <= length]
        if saved is None and length:
            raise ModelError(f"The states after {length} tokens are not known, which is a bug worth reporting.")
        for number, tensor in enumerate(self._tensors()):
            tensor[row] = 0 if saved is None else saved[number]
        self.drop([row])


# -- transformers' functions -------------------------------------------------------------------------------------

_ACTIVE: list[RecurrentLayer] = []
"""The layer whose convolution runs next."""
_SCANNING: list[RecurrentLayer] = []
"""The layer whose scan runs next."""


def has_tree_form(layer: nn.Module) -> bool:
    """Whether a recurrent layer calls a convolution that is wrapped here."""
    return any(hasattr(sys.modules[type(module).__module__], "causal_conv1d_fn") for module in layer.modules())


def wrap_functions(decoder: nn.Module) -> None:
    """Let the recurrent modules of a decoder run on draft trees."""
    for name in {type(module).__module__ for module in decoder.modules()}:
        module: Any = sys.modules[name]
        has_scan = any(hasattr(module, function) for function in list(_WRAPPERS)[1:])
        for function, wrapper in _WRAPPERS.items():
            original = getattr(module, function, None)
            if original is not None and not hasattr(original, "saccade_wraps"):
                wrapped: Any = wraps(original)(wrapper(original, has_scan))
                wrapped.saccade_wraps = original
                setattr(module, function, wrapped)


def _convolution(original: Callable[..., Any], has_scan: bool) -> Callable[..., Any]:
    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
    ) -> Tensor:
        def run(part: Tensor) -> Any:
            return original(part, weight, bias, activation=activation, **options)

        _SCANNING.clear()
        if not _ACTIVE:
            plain: Tensor = run(x)
            return plain
        layer = _ACTIVE.pop()
        if has_scan:
            _SCANNING.append(layer)
        return layer.convolve(run, x, weight, bias, activation)

    return convolve


def _delta_rule(original: Callable[..., Any], _: bool) -> Callable[..., Any]:
    def scan(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if not _SCANNING:
            return original(query, key, value, g=g, beta=beta, **options)

        def run(part: slice, state: Tensor) -> Any:
            tensors = [t[:, part] for t in (query, key, value)]
            own = {**options, "initial_state": state, "output_final_state": True}
            return original(*tensors, g=g[:, part], beta=beta[:, part], **own)

        times = value.shape[2] // key.shape[2]
        q, k = (t.repeat_interleave(times, 2).float() for t in (query, key))
        if options.get("use_qk_l2norm_in_kernel"):
            q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q = q * q.shape[-1] ** -0.5
        out = _SCANNING.pop().scan(run, (q, k, value.float(), g.float(), beta.float()))
        return out.to(query.dtype), None

    return scan


def _state_space(original: Callable[..., Any], _: bool) -> Callable[..., Any]:
    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any) -> Any:
        if not _SCANNING:
            return original(x, dt, A, B, C, chunk_size, **options)

        def run(part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
            own = {**options, "initial_states": state.mT, "return_final_states": True, "D": None}
            out, last = original(*(t[:, part] for t in (x, dt)), A, *(t[:, part] for t in (B, C)), chunk_size, **own)
            return out, last.mT

        steps = dt if options.get("dt_bias") is None else dt + options["dt_bias"].to(dt.dtype)
        steps = (F.softplus(steps) if options.get("dt_softplus") else steps).float()
        layer = _SCANNING.pop()
        if tuple(options.get("dt_limit", UNLIMITED)) != UNLIMITED:  # of chunks; decoding a token knows no limit
            layer.note_limit()
        times = x.shape[2] // B.shape[2]
        k, q = (t.float().repeat_interleave(times, 2) for t in (B, C))
        out = layer.scan(run, (q, k, x.float() * steps[..., None], A.float() * steps, None))
        if options.get("D") is not None:
            out = out + options["D"][..., None] * x.float()
        return (out, None) if options.get("return_final_states") else out

    return scan


_WRAPPERS = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
