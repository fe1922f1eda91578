"""Blocks of new tokens that run in one packed forward: their bounds, what they attend to, and its outputs.

All rows' new tokens run as one sequence through the matrix products; attention runs row by row over each row's own
entries. Neighbouring rows with equally many tokens at equal distances in the arena form a group, which the kernel takes
as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from saccade import cpu
from saccade.errors import InputError, ModelError


@dataclass(slots=True)
class TokenBlock:
    """New tokens of some rows, equally many of each: a prefill chunk, or one step's draft trees."""

    rows: Sequence[int]  # A rows of the cache
    tokens: Tensor  # `[A, n]` ids
    attention_mask: Tensor | None = None  # `[A or 1, n, T]` bool
    depth: Tensor | None = None  # `[A or 1, T]` positions of the uncommitted entries relative to their row's length
    rope_deltas: Sequence[int] = ()  # per row the offset from its length to its next text position (M-RoPE)
    slot_shifts: Tensor | None = None  # gaps between a row's committed entries, see `MaskPlan.build`
    embeddings: Tensor | None = None  # `[A, n, d]` decoder inputs that replace the tokens' embeddings
    deepstack: Sequence[Tensor] = ()  # features added to the residual stream after the first layers (Qwen3-VL)
    # `[3 or 1, A, n]` position ids that replace those derived from lengths, deltas and depth
    positions: Tensor | None = None
    logits_from: int = 0  # first of the n tokens whose logits are computed; n for none
    chain: int = 0  # leading tokens that follow each other and are committed for certain
    count: int = field(init=False)  # tokens of each row, n

    def __post_init__(self) -> None:
        self.count = self.tokens.shape[1]

    def split_rows(self) -> Iterator[TokenBlock]:
        """One block per row."""
        if len(self.rows) == 1:
            yield self
            return
        for place, row in enumerate(self.rows):
            one = slice(place, place + 1)
            parts: dict[str, Any] = {"tokens": self.tokens[one], "rope_deltas": self.rope_deltas[one]}
            for name in ("attention_mask", "depth", "slot_shifts", "embeddings"):
                tensor = getattr(self, name)
                if tensor is not None and tensor.shape[0] > 1:
                    parts[name] = tensor[one]
            if self.positions is not None:
                parts["positions"] = self.positions[:, one]
            yield replace(self, rows=[row], **parts)


@dataclass(slots=True)
class Requirements:
    """Outputs of the target's forwards that drafters and rules need besides logits."""

    layers: tuple[int, ...] = ()  # hidden states returned by every forward
    # whether the last index is read after (`post`) or before (`pre`) the final norm
    final: Literal["post", "pre"] = "post"
    embeddings: bool = False  # whether prefill returns the decoder's inputs
    # decoder layers whose attention prefill returns (negative ones count from the end); () for all layers, None for no
    # attention
    attention: tuple[int, ...] | None = None
    queries: Literal["words", "all"] = "words"  # tokens whose attention is summed

    @property
    def any(self) -> bool:
        """Whether any output besides logits is required."""
        return bool(self.layers) or self.embeddings or self.attention is not None

    def add_layers(self, *layers: int) -> None:
        """Require more hidden states."""
        self.layers = tuple(sorted({*self.layers, *layers}))

    def add_attention(self, layers: tuple[int, ...] | None, queries: Literal["words", "all"]) -> None:
        """Require attention."""
        wanted = (layers or (), queries)
        if self.attention is not None and (self.attention, self.queries) != wanted:
            raise ModelError(
                f"The target's attention is read in layers {self.attention or 'of all numbers'} of {self.queries} "
                f"already, not in {wanted[0] or 'all'} of {queries}; choose the same for all that read it."
            )
        self.attention, self.queries = wanted


@dataclass(slots=True)
class ForwardOutput:
    """Outputs of one `TokenBlock`."""

    logits: Tensor  # `[A, n - logits_from, V]` in the model's dtype
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer index -> `[A, n, d]`


def concat_outputs(outputs: Sequence[ForwardOutput], starts: Sequence[int] = ()) -> ForwardOutput:
    """Join the outputs of several blocks of equally many tokens along the rows."""
    if len(outputs) == 1 and not any(starts):
        return outputs[0]
    starts = starts or [0] * len(outputs)
    hidden = {}
    for layer in outputs[0].hidden:
        parts = [output.hidden[layer][:, start:] for output, start in zip(outputs, starts, strict=True)]
        hidden[layer] = torch.cat(parts)
    return ForwardOutput(torch.cat([o.logits for o in outputs]), hidden)


def split_outputs(blocks: Sequence[TokenBlock], logits: Tensor, hidden: Mapping[int, Tensor]) -> list[ForwardOutput]:
    """Split a packed forward's logits ``[n, V]`` and hidden states ``[T, d]`` by block."""
    outputs, token, logit = [], 0, 0
    for block in blocks:
        rows, count = block.tokens.shape
        tokens = slice(token, token + rows * count)
        states: dict[int, Tensor] = {}
        if hidden:
            states = {layer: state[tokens].view(rows, count, -1) for layer, state in hidden.items()}
        size = count - block.logits_from
        part = logits[logit : logit + rows * size].view(rows, size, logits.shape[-1])
        outputs.append(ForwardOutput(part, states))
        token = tokens.stop
        logit += rows * size
    return outputs


def pack_deepstack(blocks: Sequence[TokenBlock]) -> list[Tensor]:
    """Deepstack features of the packed sequence, ``[T, d]`` per layer; empty without any."""
    if len(blocks) == 1:
        return list(blocks[0].deepstack)
    depth = max(len(block.deepstack) for block in blocks)
    like = next((block.deepstack[0] for block in blocks if block.deepstack), torch.empty(0, 0))
    parts = []
    for block in blocks:
        zeros = () if block.deepstack else [like.new_zeros(block.tokens.numel(), like.shape[1])] * depth
        parts.append(block.deepstack or zeros)
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


class ContextError(InputError):
    """Sequence longer than the model's context."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__(
            f"The sequence needs {length} tokens but this model's context is {context}; shorten the prompt, "
            "use fewer or smaller images, or lower max_new_tokens."
        )
        self.length, self.context = length, context


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Bounds of one model, in tokens."""

    context: int | None  # longest supported sequence, or None when the configuration has none
    longrope_threshold: int | None  # longest sequence with the short factors of a longrope embedding

    @classmethod
    def of(cls, text_config: Any) -> ModelLimits:
        """Read a decoder's configuration."""
        rope = getattr(text_config, "rope_parameters", None) or {}
        ropes = [rope] if "rope_type" in rope else rope.values()  # one per layer type
        lengths = [r["original_max_position_embeddings"] for r in ropes if r.get("rope_type") == "longrope"]
        return cls(getattr(text_config, "max_position_embeddings", None), min(lengths, default=None))

    def check(self, length: int) -> None:
        """Raise `InputError` when a sequence of ``length`` tokens does not fit the context."""
        if length < 1:
            raise InputError("The prompt is empty; give at least one token of text.")
        if self.context is not None and length > self.context:
            raise ContextError(length, self.context)

    def check_rows(self, prompts: Sequence[int], new: Sequence[int]) -> None:
        """Raise `InputError` for rows that do not fit the context, or one side of the longrope threshold, together."""
        ends = [p + n if p else 0 for p, n in zip(prompts, new, strict=True)]
        for end in ends:
            self.check(end)
        threshold = self.longrope_threshold
        if threshold is not None and not (max(ends) <= threshold or min(prompts) > threshold):
            raise InputError(
                f"This model's rotary embedding (longrope) changes after {threshold} tokens, for all of a pass at "
                f"once, but the rows go from {min(prompts)} to {max(ends)} tokens; stay within {threshold} by a lower "
                "max_new_tokens, or run only longer prompts together."
            )

    def is_long(self, length: int) -> bool:
        """Whether a sequence uses a longrope embedding's long factors."""
        return self.longrope_threshold is not None and length > self.longrope_threshold

    def holds(self, length: int) -> bool:
        """Whether positions of a sequence of ``length`` tokens are never clamped."""
        return self.longrope_threshold is None and (self.context is None or length <= self.context)

    def clamp_positions(self, positions: Tensor, lengths: Sequence[int], ahead: Tensor | None = None) -> Tensor:
        """Clamp positions ``[B, Q]``, ``ahead`` ``[B, 1]`` of the number of tokens, of nodes that are never emitted."""
        bound = self.context
        if self.longrope_threshold is not None and max(lengths) < self.longrope_threshold:
            bound = self.longrope_threshold
        if bound is None:
            return positions
        if ahead is None:
            return positions.clamp(max=bound - 1)
        return positions.minimum(ahead.clamp(min=0) + (bound - 1))


@dataclass(frozen=True)
class MaskPlan:
    """Masks of a model's decoder: a single one, or one per layer type."""

    window: int | None  # sliding window in positions, or None
    kinds: tuple[str, ...]  # keys of the mask dictionary when layers differ; empty for a single tensor
    full_is_causal: bool = False  # whether the entries that an attention mask shows ahead are for sliding layers alone
    chunk: int | None = None  # positions of the chunks beyond which a layer does not attend (Llama 4), or None

    @cached_property
    def reach(self) -> int | None:
        """Longest sequence that all layers attend to in full; None without a bound."""
        if self.window is None or self.chunk is None:
            return self.chunk if self.window is None else self.window
        return min(self.window, self.chunk)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Kinds of layers with masks of `build`."""
        return self.kinds or (ALL,)

    def build(
        self,
        lengths: Sequence[int],
        count: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pending: int = 0,
        attention_mask: Tensor | None = None,
        depth: Tensor | None = None,
        slot_shifts: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Build masks ``[A or 1, n, W]`` of n new entries over all entries of their rows; others as of `TokenBlock`."""
        longest, new = max(lengths), pending + count
        mask, lowest = attention_mask, torch.finfo(dtype).min
        full = None
        if mask is not None:
            full = mask_memory((*mask.shape[:2], longest + new), dtype, device)
            full[:, :, :longest].zero_()
            additive(mask.tril(pending) if self.full_is_causal else mask, dtype, out=full[:, :, longest:])
        elif count > 1:
            full = mask_memory((1, count, longest + new), dtype, device)
            full.fill_(lowest)
            full.triu_(longest + pending + 1)
        is_alike = slot_shifts is None and not (self.full_is_causal and mask is not None)
        if self.reach is None or (is_alike and longest + new <= self.reach):
            return dict.fromkeys(self.names, full)
        if mask is None:
            mask = torch.ones(1, count, new, dtype=torch.bool, device=device).tril(pending)
        if depth is None:
            depth = torch.arange(new, device=device)[None]
        causal = pad(mask, (longest, 0), value=True)
        local = self._local(lengths, depth, count, slot_shifts)
        masks = {kind: additive(causal & near, dtype) for kind, near in local.items()}
        if not self.kinds:
            return {ALL: masks.popitem()[1]}
        return {kind: masks.get(kind, full) for kind in self.kinds}

    def _local(self, lengths: Sequence[int], depth: Tensor, count: int, shifts: Tensor | None) -> dict[str, Tensor]:
        """``[A or 1, n, W]`` bool per kind; entries near each new one, by positions and not by entries."""
        longest, near = max(lengths), {}
        cached = torch.arange(-longest, 0, device=depth.device)[None]
        if shifts is not None:  # negative padding crops
            cached = cached + pad(shifts, (longest - shifts.shape[1], 0))
        rows = max(cached.shape[0], depth.shape[0])
        key = torch.cat([cached.expand(rows, -1), depth.expand(rows, -1)], 1)[:, None]
        query = depth[:, depth.shape[1] - count :, None]
        if self.window is not None:
            near["sliding_attention"] = key > query - self.window
        if self.chunk is not None:
            starts = torch.tensor(lengths, device=depth.device)[:, None, None]
            near["chunked_attention"] = (key + starts) // self.chunk == (query + starts) // self.chunk
        return near


ALIGNMENT = 8
"""Numbers at whose multiples the rows of masks begin on an accelerator: the memory-efficient kernel of CUDA, which
alone takes masks and holds no scores of all queries and keys, copies others in every layer, and misreads offsets."""


def mask_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of a mask ``[..., K]``, to be written."""
    *outer, keys = shape
    width = keys
    if device.type != "cpu":
        width = -(-keys // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(*outer, width, dtype=dtype, device=device)
    return memory[..., :keys]


def _aligned(mask: Tensor | None) -> Tensor | None:
    """Return a mask, or a copy of one that is not as `mask_memory` has it."""
    if mask is None or mask.is_cpu:
        return mask
    *strides, _ = mask.stride()
    if not any(offset % ALIGNMENT for offset in (mask.storage_offset(), *strides)):
        return mask
    return mask_memory(mask.shape, mask.dtype, mask.device).copy_(mask)


def additive(mask: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Convert a bool mask to one that is added to scores in ``dtype``."""
    if out is None:
        out = mask_memory(mask.shape, dtype, mask.device)
    zero, lowest = _bounds(dtype, mask.device)
    return torch.where(mask, zero, lowest, out=out)


@cache
def _bounds(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is added where a mask shows, and where it hides."""
    zero, lowest = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype).to(device)
    return zero, lowest


MAX_PADDING = 128  # most padding slots per row with which rows of different lengths form a group
MAX_FOLDED = {"cuda": 64, "cpu": 16}
"""Most tokens per row for which query heads of one key head run as further queries, by kind of device."""
_MAX_UPCAST = 2**19  # elements of keys whose conversion to float32 costs next to nothing

Masks = Mapping[str, Tensor | None]
"""Additive masks per kind of layer; None where everything is attended."""
ALL = "all"  # kind of layer of a decoder whose layers are alike


@dataclass(slots=True)
class Span:
    """One row's tokens in the packed sequence."""

    row: int  # row of the cache
    first: int  # index of its first token in the packed sequence
    count: int  # its tokens, n
    start: int  # first slot of the row's segment
    visible: int  # attended slots from there on, these tokens' included
    masks: Masks  # `[1, n, W]` per kind of layer, whose last `visible` columns are the row's slots

    def mask(self, kind: str) -> Tensor | None:
        """Additive mask ``[1, 1, n, K]`` of a kind of layer; None where everything is attended."""
        mask = self.masks[kind]
        return None if mask is None else mask[None, :, :, mask.shape[2] - self.visible :]


@dataclass(slots=True)
class RowGroup:
    """Rows that share an attention kernel call."""

    first: int  # index of the first token in the packed sequence
    rows: int  # number of rows, A
    count: int  # tokens of each, n
    start: int  # first slot of the first row's segment
    step: int  # slots from one row's segment to the next one's
    visible: int  # attended slots of every row, K
    masks: dict[str, Tensor | None]  # `[A or 1, 1, n, K]` per kind of layer
    folded: dict[str, Tensor] = field(default_factory=dict)  # the same for queries of several heads

    def folded_mask(self, kind: str, heads: int) -> Tensor | None:
        """Mask of a kind of layer for the queries of ``heads`` heads, one head after the other."""
        mask = self.masks[kind]
        if mask is None:
            return None
        if kind not in self.folded:
            for_each_head = mask.expand(-1, heads, -1, -1)
            memory = mask_memory(for_each_head.shape, mask.dtype, mask.device)
            self.folded[kind] = memory.copy_(for_each_head).flatten(1, 2)[:, None]
        return self.folded[kind]

    def of(self, tensor: Tensor) -> Tensor:
        """View ``[A, H, K, D]`` of a layer's keys or values ``[H, N, D]``."""
        heads, slot, one = tensor.stride()
        size = self.rows, tensor.shape[0], self.visible, tensor.shape[2]
        offset = tensor.storage_offset() + self.start * slot
        return tensor.as_strided(size, (self.step * slot, heads, slot, one), offset)


class Layout:
    """Spans of a forward and the slots that it writes."""

    def __init__(
        self, spans: Sequence[Span], slots: Tensor | slice, total: int = 0, groups: Sequence[RowGroup] | None = None
    ) -> None:
        self.spans = spans  # in the order of the packed sequence, without gaps
        self.slots = slots  # slots of the tokens' entries, `[T]` or a slice
        self.last: int | None = None  # no token has a higher position; None where the host does not know
        self._total = total  # slots of the arena
        self._groups = groups

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        kind: str = ALL,
        kernel: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Compute attention ``[T, H * D_v]`` of queries ``[H, T, D]`` over keys and values ``[H_kv, N, D]``."""
        if self._groups is None:
            self._groups = _group_spans(self.spans, self._total, query)
        times = query.shape[0] // keys.shape[0]
        out = []
        for group in self._groups:
            part = query[:, group.first : group.first + group.rows * group.count] if len(self._groups) > 1 else query
            if group.rows > 1:
                part = part.unflatten(1, (group.rows, group.count)).transpose(0, 1)  # [A, H, n, D]
                own_keys, own_values = group.of(keys), group.of(values)
            else:
                seen = slice(group.start, group.start + group.visible)
                part, own_keys, own_values = part[None], keys[None, :, seen], values[None, :, seen]
            folds = MAX_FOLDED["cuda"] if query.is_cuda else MAX_FOLDED.get(query.device.type, 0)
            if times > 1 and kernel is None and group.count <= folds:
                folded = part.unflatten(1, (-1, times)).flatten(2, 3)  # [A, H_kv, G * n, D]
                mixed = attend(folded, own_keys, own_values, group.folded_mask(kind, times), scale, grouped=False)
                mixed = mixed.unflatten(2, (times, group.count)).flatten(1, 2)
            else:
                mixed = (kernel or attend)(part, own_keys, own_values, group.masks[kind], scale, times > 1)
            out.append(mixed.transpose(1, 2).reshape(group.rows * group.count, -1))
        return out[0] if len(out) == 1 else torch.cat(out)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, grouped: bool) -> Tensor:
    """Compute attention ``[A, H, n, D_v]`` of queries ``[A, H, n, D]``; ``grouped`` where keys have fewer heads.

    On a CPU whose kernel is slow in 16 bits, such inputs run in float32 for a single query, and for several while that
    costs nothing: less rounding, less difference between one query and several. On CUDA the flash kernel runs what has
    no mask, the memory-efficient one a tree; torch computes scores where a head's size is no multiple of 8.
    """
    if grouped and keys.is_cuda:  # its fused kernels take no mask with grouped heads; few queries are folded instead
        times = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
        grouped = False
    low = query.dtype != torch.float32 and query.device.type == "cpu"
    if low and (query.shape[2] == 1 or keys.numel() <= _MAX_UPCAST) and _is_faster_wide(query.dtype):
        mask = None if mask is None else mask.float()
        wide = query.float(), keys.float(), values.float()
        mixed = F.scaled_dot_product_attention(*wide, mask, scale=scale, enable_gqa=grouped)
        return mixed.to(query.dtype)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)


@cache
def _is_faster_wide(dtype: torch.dtype) -> bool:
    """Whether attention of single queries over entries of a 16-bit format is faster on converted ones on this CPU."""

    def measure() -> list[float]:
        query = torch.ones(4, 8, 1, 64, dtype=dtype)
        entries = torch.ones(4, 8, 256, 64, dtype=dtype)
        with torch.inference_mode():
            narrow, wide = cpu.shortest_times(
                lambda: F.scaled_dot_product_attention(query, entries, entries),
                lambda: F.scaled_dot_product_attention(query.float(), entries.float(), entries.float()).to(dtype),
            )
        return [narrow / wide]

    (ratio,) = cpu.remember(f"{str(dtype).removeprefix('torch.')} over float32 attention", measure)
    return ratio > 1


def _group_spans(spans: Sequence[Span], total: int, like: Tensor) -> list[RowGroup]:
    """Group runs of spans at equal distances with equally many tokens and little padding; other spans stay alone."""
    if len(spans) == 1:
        span, masks = spans[0], dict[str, Tensor | None]()
        for kind in span.masks:
            part = span.mask(kind)
            masks[kind] = part if part is None or part.is_cpu else _aligned(part)
        return [RowGroup(span.first, 1, span.count, span.start, 0, span.visible, masks)]
    groups, at = [], 0
    starts = [span.start for span in spans]
    while at < len(spans):
        stop = run_end(starts, at)
        while stop > at + 1 and not _is_group(spans[at:stop], total):
            stop -= 1
        first, rows = spans[at], spans[at:stop]
        visible = max(span.visible for span in rows)
        step = starts[at + 1] - first.start if len(rows) > 1 else 0
        masks = {kind: _joint_mask(rows, kind, visible, like) for kind in first.masks}
        groups.append(RowGroup(first.first, len(rows), first.count, first.start, step, visible, masks))
        at = stop
    return groups


def run_end(starts: Sequence[int], first: int) -> int:
    """Return where the run of rows from ``first`` on ends whose slots lie at equal, positive distances."""
    stop = first + 1
    step = starts[stop] - starts[first] if stop < len(starts) else 0
    while step > 0 and stop < len(starts) and starts[stop] - starts[stop - 1] == step:
        stop += 1
    return stop


def _is_group(spans: Sequence[Span], total: int) -> bool:
    """Whether spans have equally many tokens, and need little padding within the arena."""
    longest = max(span.visible for span in spans)
    padding = sum(longest - span.visible for span in spans)
    is_even = len({span.count for span in spans}) == 1
    return is_even and padding <= MAX_PADDING * len(spans) and spans[-1].start + longest <= total


def _joint_mask(spans: Sequence[Span], kind: str, visible: int, like: Tensor) -> Tensor | None:
    """Mask ``[A, 1, n, K]`` over the longest row's slots; those after the others' are masked."""
    masks = [span.mask(kind) for span in spans]
    is_even = all(span.visible == visible for span in spans)
    if is_even and all(mask is masks[0] for mask in masks):
        return _aligned(masks[0])
    shape, lowest = (len(spans), 1, spans[0].count, visible), torch.finfo(like.dtype).min
    joint = mask_memory(shape, like.dtype, like.device).fill_(lowest)
    for place, (span, mask) in enumerate(zip(spans, masks, strict=True)):
        joint[place, :, :, : span.visible] = 0 if mask is None else mask[0]
    return joint
