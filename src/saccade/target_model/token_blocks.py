"""Blocks of new tokens that run in one forward: their bounds, what is required of the forward, and its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

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
    deepstack: Sequence[Tensor] = ()  # features added to the residual stream behind the first layers (Qwen3-VL)
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
                f"This model's rotary embedding (longrope) changes behind {threshold} tokens, for all of a pass at "
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
