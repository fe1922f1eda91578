"""Attention in sums that do not round, and therefore do not depend on the order of the keys.

A node's ancestors lie in other slots while its tree is verified than after they were committed, and plain decoding
never sees its siblings. Here every summand is a multiple of a grid so coarse that float64 holds all partial sums
exactly: whatever the order, the blocks of a kernel, masked keys between or rows beside, the sum is the same to the last
bit. It is rounded once, at the end.

Queries and keys are rounded to 2^-21 of the power of two of their vector's largest element, values to `VALUE_BITS`;
that loses nothing of what bfloat16 or float16 had kept, but for small elements. The softmax is rounded so that the
weighted values fit into what remains of the 53 bits, and where that is too little for the number format, what it lost
is summed up in the same way and added.
"""

from __future__ import annotations

import torch
from torch import Tensor

_QUERY_GRID = 6.0
"""Adding and subtracting 6 x 2^e rounds float32 numbers below 2^(e + 1) to multiples of 2^(e - 21)."""
VALUE_BITS = {torch.float32: 18, torch.float16: 15, torch.bfloat16: 12}
"""Values of a format are rounded to this power of 1/2."""
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_GUARD = 4
"""Binary digits that all weights together must keep beyond those of the format."""
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF << 52)}
_LEAST = 2.0**-100
"""Unit of a vector of zeros."""
_SMALLEST = -700.0
"""Least logarithm of a weight. Processors take long for exponentials that underflow; this one is rounded to 0."""
_BLOCK, _FEWEST = 2**17, 32
"""Most weights that a CPU computes at a time, so that they stay in its cache, and fewest queries of a block."""
MAX_DIM = 512
"""Longest vectors of queries and keys whose products are exact: 2 x 22 bits and 9 of the sum."""
MAX_KEYS = 2**20
"""Most keys for which two sums have the digits of bfloat16 and float16."""


def grids(heads: int, kv_heads: int, scale: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the second and third argument of `on_grid` for a layer's queries, keys and values, ``[H + 2 H_kv, 1]``."""
    counts = torch.tensor([heads, kv_heads, kv_heads])
    steps = torch.tensor([_QUERY_GRID, _QUERY_GRID, 1.5 * 2.0 ** (23 - VALUE_BITS[dtype])])
    factors = torch.tensor([scale, 1.0, 1.0])  # queries are not kept, and need not be rounded to the dtype
    found = (each.repeat_interleave(counts)[:, None].to(device) for each in (factors, steps))
    return next(found), next(found)


def on_grid(vectors: Tensor, factors: Tensor, steps: Tensor) -> Tensor:
    """Round vectors ``[T, H, D]`` times ``factors`` for exact sums, in float32.

    Shapes: factors, steps ``[H, 1]``.
    """
    wide = vectors * factors
    far = power_of_two(wide.abs().amax(-1, keepdim=True)).mul_(steps)
    return wide.add_(far).sub_(far)


class ExactAttention:
    """Attention of vectors `on_grid`, over at most ``keys`` keys."""

    def __init__(self, keys: int, dtype: torch.dtype) -> None:
        if keys > MAX_KEYS:
            raise ValueError(f"Sums over {keys} keys are not exact; at most {MAX_KEYS} can be summed.")
        bits = (keys - 1).bit_length()
        # Weights below 2 in units of 2^-w, values below 2 in units of 2^-v: 2^(w + 1 + v + 1 + bits) <= 2^53.
        weight_bits = 51 - VALUE_BITS[dtype] - bits
        self._weight_grid = 1.5 * 2.0 ** (52 - weight_bits)
        self._rest_grid = 1.5 * 2.0 ** (52 - 2 * weight_bits)
        self._has_rest = weight_bits + 1 - bits < _DIGITS[dtype] + _GUARD  # all keys may lose half a unit each
        self._total_grid = 1.5 * 2.0**bits

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, grouped: bool = False
    ) -> Tensor:
        """Compute attention ``[A, H, n, D_v]``; arguments as of `saccade.target.layout.attend`."""
        count, tokens = query.shape[2], keys.shape[2]
        wide_keys, wide = keys.double(), values.double()
        unit = power_of_two(values.abs().float().amax(-1).clamp_min_(_LEAST))[:, :, None].double()  # of every key
        block = max(_FEWEST, _BLOCK // (query.shape[:2].numel() * tokens))
        if count <= block or mask is None or query.device.type != "cpu":
            mixed = self._attend(query, wide_keys, wide, unit, mask, scale)
        else:
            parts = []
            for part, own in zip(query.split(block, 2), mask.split(block, 2), strict=True):
                last = int((own == 0).flatten(0, 2).any(0).nonzero()[-1]) + 1
                seen = wide_keys[:, :, :last], wide[:, :, :last], unit[..., :last], own[..., :last]
                parts.append(self._attend(part, *seen, scale))
            mixed = torch.cat(parts, 2)
        return mixed.to(values.dtype)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, unit: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attend in float64; ``unit`` ``[A, H_kv, 1, K]`` power of two of every key's values."""
        rows, heads, count, dim = query.shape
        own = keys.shape[1]
        folded = query.double().reshape(rows, own, -1, dim)  # query heads of a key head run as further queries
        weights = folded @ keys.mT  # exact
        if scale != 1:
            weights.mul_(scale)
        if mask is not None:
            weights.view(rows, heads, count, -1).add_(mask.double())
        weights.sub_(weights.amax(-1, keepdim=True))
        if mask is not None:
            weights.clamp_min_(_SMALLEST)
        weights.exp_()
        total = (weights + self._total_grid).sub_(self._total_grid).sum(-1, keepdim=True)  # exact
        weights.mul_(unit)
        top = power_of_two(weights.amax(-1, keepdim=True))
        inverse = unit.reciprocal()
        far = top * self._weight_grid
        first = (weights + far).sub_(far)
        if self._has_rest:
            far = top * self._rest_grid
            rest = weights.sub_(first).add_(far).sub_(far).mul_(inverse) @ values  # exact
            mixed = (first.mul_(inverse) @ values).add_(rest)  # exact, but for this addition
        else:
            mixed = first.mul_(inverse) @ values  # exact
        return mixed.div_(total).view(rows, heads, count, -1)


def power_of_two(numbers: Tensor) -> Tensor:
    """Return the largest powers of two that do not exceed the numbers' sizes, in float32 or float64; 0 for 0."""
    integers, exponent = _EXPONENT[numbers.dtype]
    return (numbers.view(integers) & exponent).view(numbers.dtype)
