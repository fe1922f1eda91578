"""Inputs and outputs of a target forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.errors import ModelError
from saccade.target_model.layout import ALL

Mask = Tensor | dict[str, Tensor]


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
    deepstack: Sequence[Tensor] = ()  # features added to the residual stream behind the first layers (Qwen3-VL)
    # `[3 or 1, A, n]` position ids that replace those derived from lengths, deltas and depth
    positions: Tensor | None = None
    logits_from: int = 0  # first of the n tokens whose logits are computed; n for none

    @property
    def count(self) -> int:
        """Tokens of each row."""
        return self.tokens.shape[1]

    def split_rows(self) -> Iterator[TokenBlock]:
        """One block per row."""
        if len(self.rows) == 1:
            yield self
            return
        for index, row in enumerate(self.rows):
            one = slice(index, index + 1)

            def own(tensor: Tensor | None, one: slice = one) -> Tensor | None:
                return tensor if tensor is None or tensor.shape[0] == 1 else tensor[one]

            yield TokenBlock(
                rows=[row],
                tokens=self.tokens[one],
                attention_mask=own(self.attention_mask),
                depth=own(self.depth),
                rope_deltas=self.rope_deltas[one] if self.rope_deltas else (),
                slot_shifts=own(self.slot_shifts),
                embeddings=own(self.embeddings),
                positions=None if self.positions is None else self.positions[:, one],
                logits_from=self.logits_from,
            )


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
    starts = starts or [0] * len(outputs)
    if len(outputs) == 1 and starts[0] == 0:
        return outputs[0]
    hidden = {
        layer: torch.cat([o.hidden[layer][:, start:] for o, start in zip(outputs, starts, strict=True)])
        for layer in outputs[0].hidden
    }
    return ForwardOutput(torch.cat([o.logits for o in outputs]), hidden)


def split_outputs(blocks: Sequence[TokenBlock], logits: Tensor, hidden: Mapping[int, Tensor]) -> list[ForwardOutput]:
    """Split a packed forward's outputs by block.

    Shapes: logits ``[n, V]``; hidden ``[T, d]``.
    """
    outputs, token, logit = [], 0, 0
    for block in blocks:
        rows, count = block.tokens.shape
        states = {i: s[token : token + rows * count].view(rows, count, -1) for i, s in hidden.items()}
        size = rows * (count - block.logits_from)
        part = logits[logit : logit + size].view(rows, count - block.logits_from, logits.shape[-1])
        outputs.append(ForwardOutput(part, states))
        token, logit = token + rows * count, logit + size
    return outputs


def pack_deepstack(blocks: Sequence[TokenBlock]) -> list[Tensor]:
    """Deepstack features of the packed sequence, ``[T, d]`` per layer; empty without any."""
    packed = []
    for layer in range(max(len(block.deepstack) for block in blocks)):
        like = next(block.deepstack[0] for block in blocks if block.deepstack)
        packed.append(
            torch.cat(
                [
                    b.deepstack[layer] if b.deepstack else like.new_zeros(b.tokens.numel(), like.shape[-1])
                    for b in blocks
                ]
            )
        )
    return packed


@contextmanager
def replaced_embeddings(
    decoder: nn.Module, embeddings: Tensor, mask: Mask, deepstack: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Replace the inputs of the model's decoder while the context is open.

    Shapes: embeddings ``[1, n, d]``; deepstack ``[n, d]``.
    """
    calls = []

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        calls.append(module)
        if args or kwargs.get("position_ids") is None:
            raise ModelError(
                f"{type(module).__name__} is not called with positions by name, so that its embeddings cannot be "
                "replaced; use another model or plain text."
            )
        kwargs = {**kwargs, "inputs_embeds": embeddings, "attention_mask": mask}
        if "input_ids" in kwargs:
            kwargs["input_ids"] = None
        if deepstack:
            everywhere = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
            kwargs.update(visual_pos_masks=everywhere, deepstack_visual_embeds=list(deepstack))
        return args, kwargs

    handle = decoder.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ModelError(
            f"{type(decoder).__name__} was called {len(calls)} times in one forward, where once was expected."
        )


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Masks of a model's decoder: a single one, or one per layer type."""

    window: int | None  # sliding window in positions, or None
    kinds: tuple[str, ...]  # keys of the mask dictionary when layers differ; empty for a single tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Kinds of layers with masks of `build`."""
        return self.kinds or (ALL,)

    def build(
        self,
        attention_mask: Tensor | None,
        lengths: Sequence[int],
        count: int,
        pending: int,
        depth: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        slot_shifts: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Build masks of n new entries over all entries of their rows.

        Shapes: attention_mask ``[A or 1, n, T]``; depth ``[A or 1, T]``; slot_shifts ``[A, S]``; returns ``[A or 1, n,
        W]``.
        """
        longest, new = max(lengths), pending + count
        near = self.window is None or (slot_shifts is None and longest + new <= self.window)
        mask = attention_mask
        full = None
        if mask is not None:
            full = torch.zeros(*mask.shape[:2], longest + new, dtype=dtype, device=device)
            full[:, :, longest:].masked_fill_(~mask, torch.finfo(dtype).min)
        elif count > 1:
            lowest = torch.finfo(dtype).min
            full = torch.full((1, count, longest + new), lowest, dtype=dtype, device=device)
            full = full.triu_(longest + pending + 1)
        if near:
            return dict.fromkeys(self.names, full)
        if mask is None:
            mask = torch.ones(1, count, new, dtype=torch.bool, device=device).tril(pending)
        if depth is None:
            depth = torch.arange(new, device=device)[None]
        inside = self._in_window(longest, depth, count, slot_shifts)
        window = additive(pad(mask, (longest, 0), value=True) & inside, dtype)
        if not self.kinds:
            return {ALL: window}
        return {"full_attention": full, "sliding_attention": window}

    def _in_window(self, longest: int, depth: Tensor, count: int, shifts: Tensor | None) -> Tensor:
        """``[A or 1, n, W]`` bool; entries inside each new one's window.

        The window counts positions, not entries: siblings share one, and ``shifts`` correct for gaps.
        """
        assert self.window is not None
        cached = torch.arange(-longest, 0, device=depth.device)[None]
        if shifts is not None:  # negative padding crops
            cached = cached + pad(shifts, (longest - shifts.shape[1], 0))
        rows = max(cached.shape[0], depth.shape[0])
        key = torch.cat([cached.expand(rows, -1), depth.expand(rows, -1)], 1)
        query = depth[:, depth.shape[1] - count :]
        return key[:, None] > query[..., None] - self.window


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to one that is added to scores in ``dtype``."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)
