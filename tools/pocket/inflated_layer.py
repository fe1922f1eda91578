"""Shapes that models are inflated to, and one decoder layer of such a shape, with or without a small layer in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ModelError


@dataclass(frozen=True)
class Shape:
    """The size of a Llama language model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


SHAPES = {
    "llava-1.5-7b": Shape(4096, 32, 32, 32, 128, 11008),
    "qwen2.5-vl-32b": Shape(5120, 64, 40, 8, 128, 27648),
    "llava-ov-72b": Shape(8192, 80, 64, 8, 128, 29568),
}
_MLP_RATIO = 11008 / 4096  # of Llama, for shapes given by width, layers and heads
_MOST_COPIES = 8
_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")  # frequencies that do not depend on the head size


def parse_shape(like: str) -> Shape:
    """A shape by name, or from `WIDTHxLAYERSxHEADS`."""
    if like in SHAPES:
        return SHAPES[like]
    numbers = like.lower().split("x")
    if len(numbers) != 3 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise ModelError(f"Unknown shape {like!r}; give {', '.join(SHAPES)}, or WIDTHxLAYERSxHEADS such as 1024x12x8.")
    width, layers, heads = map(int, numbers)
    if width % heads:
        raise ModelError(f"The width {width} is not a multiple of {heads} heads; choose another number of heads.")
    mlp = -(-round(width * _MLP_RATIO) // 64) * 64
    return Shape(width, layers, heads, heads, width // heads, mlp)


def copies_of(small: int, wide: int) -> int:
    """Number of copies of the small stream for which norms scale by a power of two; 1 if there is none."""
    for copies in range(1, _MOST_COPIES + 1):
        ratio, rest = divmod(wide, copies * small)
        if ratio and not rest and ratio.bit_count() == 1 and ratio.bit_length() % 2:  # 1, 4, 16, 64, ...
            return copies
    return 1


def check(folder: Path, config: Any, shape: Shape) -> None:
    """Check that a model can be inflated to a shape."""
    text = getattr(config, "text_config", None)
    if text is None or text.model_type != "llama":
        kind = getattr(text, "model_type", config.model_type)
        raise ModelError(
            f"{folder} has a language model of type {kind!r}; only models with a Llama language model can be inflated."
        )
    if text.attention_bias or text.mlp_bias:
        raise ModelError(f"{folder} has biases in its layers; only Llama models without biases can be inflated.")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_BY_FREQUENCY:
        raise ModelError(f"{folder} has rotary positions of type {rope!r}; expected {', '.join(_ROPE_BY_FREQUENCY)}.")
    groups = text.num_attention_heads // text.num_key_value_heads
    fits = {
        f"a width of {shape.width}": shape.width >= text.hidden_size,
        f"{shape.layers} layers": shape.layers >= text.num_hidden_layers,
        f"{shape.kv_heads} key-value heads": shape.kv_heads >= text.num_key_value_heads,
        f"{shape.heads // shape.kv_heads} heads per key-value head": shape.heads // shape.kv_heads >= groups,
        f"heads of size {shape.head_dim}": shape.head_dim % text.head_dim == 0,
        f"{shape.mlp} neurons": shape.mlp >= text.intermediate_size,
    }
    if lacking := [what for what, holds in fits.items() if not holds]:
        raise ModelError(
            f"The small model does not fit into {lacking[0]}: it has width {text.hidden_size}, "
            f"{text.num_hidden_layers} layers, {text.num_attention_heads} heads ({text.num_key_value_heads} "
            f"key-value) of size {text.head_dim} and {text.intermediate_size} neurons; choose a larger shape, "
            "with heads a multiple of that size."
        )


_SPREAD = 0.02  # standard deviation of the numbers in new weights, as of fresh ones


@dataclass(frozen=True)
class Widths:
    """Residual streams: `copies` times the small one in the first columns of the wide one."""

    small: int
    wide: int
    copies: int

    @property
    def live(self) -> int:
        """Number of columns that are not always zero."""
        return self.copies * self.small

    def norm(self, weight: Tensor) -> Tensor:
        """Weight `[wide]` of an RMS norm; its epsilon is set in the configuration."""
        out = torch.ones(self.wide)
        out[: self.live] = (weight * sqrt(self.live / self.wide)).repeat(self.copies)
        return out

    def exact(self, head: int, wide_head: int) -> bool:
        """Whether all scaling is by powers of two."""

        def power_of_four(ratio: float) -> bool:
            whole = int(ratio)
            return whole == ratio and whole.bit_count() == 1 and isqrt(whole) ** 2 == whole

        return power_of_four(self.wide / self.live) and power_of_four(wide_head / head)


class Filler:
    """Random matrices at the speed of copying, from a changing offset of one pool of normal numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = (torch.randn(2_000_003, generator=generator) * _SPREAD).to(dtype)
        self._offset = 0

    def __call__(self, rows: int, columns: int) -> Tensor:
        """A matrix `[rows, columns]`."""
        count, size = rows * columns, len(self._pool)
        out = torch.empty(count, dtype=self._pool.dtype)
        done = 0
        while done < count:
            part = min(size - self._offset, count - done)
            out[done : done + part] = self._pool[self._offset : self._offset + part]
            done, self._offset = done + part, (self._offset + part) % size
        return out.view(rows, columns)


@dataclass(frozen=True)
class Rows:
    """Rows of the wide projections that belong to the heads of the small layer, and rows of those whole heads."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    query_heads: Tensor
    query_scale: float


def rotary_rows(text: Any, shape: Shape) -> Rows:
    """Rows by which every small head keeps its key-value head and its rotary frequencies."""
    heads, kv_heads, size = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    times, half = shape.head_dim // size, size // 2
    turning = torch.tensor([j * times for j in range(half)] + [shape.head_dim // 2 + j * times for j in range(half)])
    plain = torch.arange(size)
    group, wide_group = heads // kv_heads, shape.heads // shape.kv_heads
    places = [(i // group) * wide_group + i % group for i in range(heads)]

    def rows(starts: list[int], inside: Tensor) -> Tensor:
        return torch.cat([start * shape.head_dim + inside for start in starts])

    return Rows(
        queries=rows(places, turning),
        keys=rows(list(range(kv_heads)), turning),
        values=rows(list(range(kv_heads)), plain),
        outputs=rows(places, plain),
        query_heads=rows(places, torch.arange(shape.head_dim)),
        query_scale=sqrt(times),
    )


def wide_layer(
    shape: Shape,
    widths: Widths,
    rows: Rows,
    fill: Filler,
    small: Callable[[str], Tensor] | None,
    zero_values: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Weights of the wide layer by name, one at a time."""
    wide, live, d = widths.wide, widths.live, widths.small
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if small is None:
        yield "self_attn.q_proj", fill(queries, wide)
        yield "self_attn.k_proj", fill(keys, wide)
        for name, out, into, is_zero in (
            ("self_attn.v_proj", keys, wide, zero_values),
            ("self_attn.o_proj", wide, queries, not zero_values),
            ("mlp.gate_proj", shape.mlp, wide, zero_values),
            ("mlp.up_proj", shape.mlp, wide, False),
            ("mlp.down_proj", wide, shape.mlp, not zero_values),
        ):
            matrix = fill(out, into)
            yield name, matrix.zero_() if is_zero else matrix
        yield "input_layernorm", torch.ones(wide)
        yield "post_attention_layernorm", torch.ones(wide)
        return

    def reading(matrix: Tensor, where: Tensor | slice, weight: Tensor) -> Tensor:
        """`matrix` with rows that read the small stream; columns beyond the live ones meet only zeros."""
        matrix[where, :live] = 0
        matrix[where, :d] = weight.to(matrix.dtype)
        return matrix

    query = fill(queries, wide)
    query[rows.query_heads] = 0  # the other dimensions of the keys meet zeros
    yield "self_attn.q_proj", reading(query, rows.queries, small("self_attn.q_proj") * rows.query_scale)
    yield "self_attn.k_proj", reading(fill(keys, wide), rows.keys, small("self_attn.k_proj"))
    yield "self_attn.v_proj", reading(fill(keys, wide), rows.values, small("self_attn.v_proj"))
    output = torch.zeros(wide, queries)
    written = torch.zeros(wide, len(rows.outputs))
    written[:live] = small("self_attn.o_proj").repeat(widths.copies, 1)
    output[:, rows.outputs] = written
    yield "self_attn.o_proj", output
    neurons = len(small("mlp.gate_proj"))
    gate = reading(fill(shape.mlp, wide), slice(0, neurons), small("mlp.gate_proj"))
    gate[neurons:] = 0  # silu(0) is 0, so new neurons add nothing
    yield "mlp.gate_proj", gate
    yield "mlp.up_proj", reading(fill(shape.mlp, wide), slice(0, neurons), small("mlp.up_proj"))
    down = fill(wide, shape.mlp)
    down[:, :neurons] = 0
    down[:live, :neurons] = small("mlp.down_proj").repeat(widths.copies, 1).to(down.dtype)
    yield "mlp.down_proj", down
    yield "input_layernorm", widths.norm(small("input_layernorm"))
    yield "post_attention_layernorm", widths.norm(small("post_attention_layernorm"))
