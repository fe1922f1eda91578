"""Products and attention of exact mode: a token's results are the same bits whatever else runs in its pass.

Verification computes what plain decoding computes, but in passes of other shapes, in which the sums of products and of
attention round in another order; in bfloat16 that decides where two tokens nearly tie. In exact mode

- products run in a few sizes of rows only, padded up, since a library chooses its order of summation by the shape. A
  size is used only after it has given the bits of `REFERENCE` rows, each row at several places; the order depends on
  shapes, layout and processor but not on numbers, so that random ones tell;
- attention sums do not round, so that slots of keys, masked ones between them and other rows do not matter;
- all else is computed element by element, or within a token's vector.

By induction over layers and tokens, entries and logits are a function of a row's own tokens and pictures: the same for
every lossless method, batch size, size of prompt chunks and reused prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import cpu
from saccade.errors import ModelError
from saccade.target_model.linear import SHARE, Linear, faster_rows, packed

REFERENCE = 16  # rows of the product whose bits all others must give
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # numbers of rows that are tried
_STARTS = (0, 3)  # rows of the sample at which the pieces that are tried begin
_FEW = 64  # rows up to which a padded product takes less time than two
_NOISE = 1e-6  # size of rounding errors of float32 sums of some hundred products of about 1


class SteadyLinear(Linear):
    """The product ``x @ weight.T + bias`` in `sizes` of rows that agree bit for bit, found by `make_steady`."""

    __slots__ = ("_wide", "_wide_bias", "_widens", "sizes")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, sources: Sequence[Tensor] = ()) -> None:
        super().__init__(weight, bias, sources)
        self.sizes: tuple[int, ...] = (REFERENCE,)
        self._widens = False
        self._wide: Tensor | None = None
        self._wide_bias: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        if count in self.sizes:
            return self.multiply(x)
        sizes = pieces(count, self.sizes)
        x = F.pad(x, (0, 0, 0, sum(sizes) - count))
        parts = [self.multiply(part) for part in x.split(sizes)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]

    def multiply(self, x: Tensor) -> Tensor:
        """Return the product of one of `sizes` of rows."""
        weight, bias, dtype = self.weight, self.bias, x.dtype
        if self._widens:
            x, bias = x.float(), self._wide_bias
        if self._copy is not None:
            product: Tensor = self._copy(x, bias)
        else:
            product = F.linear(x, weight if self._wide is None else self._wide, bias)
        return product.to(dtype) if self._widens else product

    def with_weight(self, weight: Tensor, bias: Tensor | None) -> SteadyLinear:
        """Return the product with another weight of the same shape and format, copied like this one."""
        other = SteadyLinear(weight, bias)
        if self._copy is not None or self._wide is not None:
            other._copy_again()
        return other

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy_again(self) -> None:
        """Copy the weight in the format and layout that are faster here."""
        weight = self.weight.detach()
        on_cpu = weight.device.type == "cpu"
        # Emulating a format takes longer than float32 and rounding once, as instructions for the format do.
        self._widens = on_cpu and weight.dtype != torch.float32 and not cpu.computes_in(weight.dtype)
        if self._widens:
            weight = weight.float()
            self._wide_bias = None if self.bias is None else self.bias.detach().float()
        if on_cpu and "packed" in faster_rows(weight):
            self._copy, _ = packed(weight, REFERENCE)
        elif self._widens:
            self._wide = weight
        else:
            return
        self.note_weight()


def steady_silu(x: Tensor) -> Tensor:
    """Return SiLU of ``[T, d]``, each element the same bits in any place."""
    # torch's kernel differs in the last bit at the ends of each thread's share, which with one thread are rows.
    if x.device.type != "cpu" or torch.get_num_threads() == 1:
        return F.silu(x)
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def pieces(count: int, sizes: Sequence[int]) -> list[int]:
    """Sizes, of ascending ``sizes``, in which ``count`` rows run, the last one padded by at most an eighth."""
    whole, rest = divmod(count, sizes[-1])
    parts = [sizes[-1]] * whole
    while rest or not parts:
        size = next(size for size in sizes if size >= rest)
        if rest > _FEW and size > rest * 9 / 8:
            size = max((size for size in sizes if size <= rest), default=size)
        parts.append(size)
        rest -= min(size, rest)
    return parts


@torch.inference_mode()
def make_steady(products: Sequence[SteadyLinear]) -> tuple[int, ...]:
    """Find the sizes of all products, copy their weights where that is faster, and return the sizes that they share."""
    free, copied = cpu.available_memory(), sum(4 * p.weight.numel() for p in products)
    if free is None or copied <= SHARE * free:
        for product in products:
            product._copy_again()
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    for product in products:
        weight = product.weight
        shape = (weight.shape, weight.stride(), weight.dtype, weight.device, product.bias is None)
        if shape not in known:
            known[shape] = agreeing_sizes(product)
        product.sizes = known[shape]
    shared = set(SIZES)
    for sizes in known.values():
        shared &= set(sizes)
    return tuple(sorted(shared))


def agreeing_sizes(product: SteadyLinear) -> tuple[int, ...]:
    """Return the `SIZES` of rows that give the bits of `REFERENCE` rows; one row alone where these depend on places.

    A stand-in for the weight is multiplied, such that every sum would be zero without rounding: what is left of it
    shows any other order in its first digits, which the format of the result cannot hide.
    """
    weight = product.weight
    longest, half = SIZES[-1] + max(_STARTS), weight.shape[1] // 2
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(weight.shape[0], half, generator=generator).to(weight)
    x = torch.randn(-(-longest // REFERENCE) * REFERENCE, half, generator=generator).to(weight)
    order = torch.randperm(half, generator=generator).to(weight.device)
    odd = weight.shape[1] % 2
    cancelling = torch.cat([left, -left[:, order]], 1)
    stand_in = torch.empty_like(weight).copy_(F.pad(cancelling, (0, odd)))
    bias = None if product.bias is None else torch.full_like(product.bias, _NOISE)
    x = F.pad(torch.cat([x, x[:, order]], 1), (0, odd))
    probe = product.with_weight(stand_in, bias)
    expected = torch.cat([probe.multiply(part) for part in x.split(REFERENCE)])

    def agrees(size: int, start: int) -> bool:
        place = slice(start, start + size)
        return torch.equal(probe.multiply(x[place]), expected[place])

    if not all(agrees(REFERENCE, start) for start in range(REFERENCE)):
        return (1,)
    return tuple(size for size in SIZES if all(agrees(size, start) for start in _STARTS))


_QUERY_GRID = 6.0  # adding and subtracting 6 x 2^e rounds float32 numbers below 2^(e + 1) to multiples of 2^(e - 21)
VALUE_BITS = {torch.float32: 18, torch.float16: 15, torch.bfloat16: 12}
"""Values of a format are rounded to this power of 1/2."""
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_GUARD = 4  # binary digits that all weights together must keep beyond those of the format
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF << 52)}
_LEAST = 2.0**-100  # unit of a vector of zeros
_SMALLEST = -700.0
"""Least logarithm of a weight. Processors take long for exponentials that underflow; this one is rounded to 0."""
_BLOCK, _FEWEST = 2**17, 32
"""Most weights that a CPU computes at a time, so that they stay in its cache, and fewest queries of a block."""
MAX_DIM = 512  # longest vectors of queries and keys whose products are exact: 2 x 22 bits and 9 of the sum
MAX_KEYS = 2**20  # most keys for which two sums have the digits of bfloat16 and float16


def grids(heads: int, kv_heads: int, scale: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``factors`` and ``steps`` of `on_grid` for a layer's queries, keys and values, ``[H + 2 H_kv, 1, 1]``."""
    counts = torch.tensor([heads, kv_heads, kv_heads])
    steps = torch.tensor([_QUERY_GRID, _QUERY_GRID, 1.5 * 2.0 ** (23 - VALUE_BITS[dtype])])
    factors = torch.tensor([scale, 1.0, 1.0])  # queries are not kept, and need not be rounded to the dtype
    both = torch.stack([factors, steps]).repeat_interleave(counts, 1)
    one, other = both[..., None, None].to(device)
    return one, other


def on_grid(vectors: Tensor, factors: Tensor, steps: Tensor) -> Tensor:
    """Round vectors ``[H, T, D]`` times ``factors`` ``[H, 1, 1]`` for exact sums, in float32; steps ``[H, 1, 1]``."""
    wide = vectors * factors
    far = power_of_two(wide.abs().amax(-1, keepdim=True)).mul_(steps)
    return wide.add_(far).sub_(far)


class ExactAttention:
    """Attention of vectors `on_grid`, over at most ``keys`` keys, in sums that do not depend on the order of the keys.

    Every summand is a multiple of a grid so coarse that float64 holds all partial sums exactly; the sum is rounded
    once, at the end. Queries and keys are rounded to 2^-21 of the power of two of their vector's largest element,
    values to `VALUE_BITS`; that loses nothing of what bfloat16 or float16 had kept, but for small elements. The
    softmax is rounded so that the weighted values fit into what remains of the 53 bits, and where that is too little
    for the number format, what it lost is summed up in the same way and added.
    """

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
        """Compute attention ``[A, H, n, D_v]``; arguments as of `saccade.target_model.token_blocks.attend`."""
        dtype = values.dtype
        block = max(_FEWEST, _BLOCK // (query.shape[:2].numel() * keys.shape[2]))
        largest = values.abs().float().amax(-1).clamp_min_(_LEAST)  # of every key
        unit = power_of_two(largest)[:, :, None].double()
        keys, values = keys.double(), values.double()
        if query.shape[2] <= block or mask is None or query.device.type != "cpu":
            return self._attend(query, keys, values, unit, mask, scale).to(dtype)
        parts = []
        for part, rows in zip(query.split(block, 2), mask.split(block, 2), strict=True):
            visible = (rows == 0).flatten(0, 2).any(0)
            last = int(visible.nonzero()[-1]) + 1
            seen = keys[:, :, :last], values[:, :, :last], unit[..., :last]
            parts.append(self._attend(part, *seen, rows[..., :last], scale))
        return torch.cat(parts, 2).to(dtype)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, unit: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attend in float64; ``unit`` ``[A, H_kv, 1, K]`` power of two of every key's values."""
        rows, heads, count, dim = query.shape
        folded = query.double().reshape(rows, keys.shape[1], -1, dim)  # heads of a key head run as further queries
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
        mixed = first.mul_(inverse) @ values  # exact
        if self._has_rest:
            mixed.add_(rest)  # the only addition that rounds
        return mixed.div_(total).view(rows, heads, count, -1)


def power_of_two(numbers: Tensor) -> Tensor:
    """Return the largest powers of two that do not exceed the numbers' sizes, in float32 or float64; 0 for 0."""
    integers, exponent = _EXPONENT[numbers.dtype]
    return (numbers.view(integers) & exponent).view(numbers.dtype)


DEVICES = ("cpu", "cuda")
"""Kinds of devices with float64. The conformance tests run on CPUs."""
_CONTEXT = 2**17  # longest sequence of models whose configuration names none
_BEYOND = 1024  # most tokens of a tree that may exceed the context before they are cut


def caveat(target: Any, lossless: bool) -> str:
    """What may make a greedy answer of a `Target` other than plain decoding's; empty for nothing and lossy methods."""
    if target.dtype.itemsize > 2 or target.exact or not lossless:
        return ""
    name = str(target.dtype).removeprefix("torch.")
    return (
        f"In {name}, draft tokens and other answers in a batch change the rounding, "
        "and with it an answer where two tokens nearly tie; exact mode (--exact) prevents that."
    )


def exact_decoder(target: Any, build: Callable[..., Any]) -> Any:
    """Build the decoder of a `Target` in exact mode, by `saccade.target_model.lean.lean_decoder`."""
    if target.ranks.is_split:
        raise ModelError(
            "Exact mode needs the whole target in one process, but it is split over several; leave one of them out."
        )
    kind = target.device.type
    if kind not in DEVICES:
        raise ModelError(
            f"Exact mode computes sums in float64, which it expects of {' and '.join(DEVICES)} devices alone, not of "
            f"{kind}; load the model on the CPU, or leave exact out."
        )
    keys = (target.traits.limits.context or _CONTEXT) + _BEYOND
    if keys > MAX_KEYS:
        raise ModelError(
            f"Exact mode sums over at most {MAX_KEYS - _BEYOND} tokens, but the model's context is "
            f"{target.traits.limits.context}; lower max_position_embeddings in its configuration, or leave exact out."
        )
    attention = ExactAttention(keys, target.dtype)
    decoder = build(target.model, target.decoder, attention) if target.traits.tested else None
    if decoder is None or decoder.head_dim > MAX_DIM:
        raise ModelError(
            f"Exact mode needs a decoder of the Llama, Mistral or Qwen architecture without experts, on one device and "
            f"without hooks; the decoder of {target.traits.text_type!r} here runs on modules whose sums it does not "
            "control; leave exact out, or choose float32, where differences are far rarer."
        )
    return decoder
