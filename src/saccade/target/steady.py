"""Products whose rows do not depend on how many rows are multiplied at once, nor on what the others hold.

A library of matrix products chooses its order of summation by the shape, so that a token's state comes out differently
in a forward of one token and in one of eight. Here rows run in a few sizes only, padded up, and a size is used only
after it has given the bits of `REFERENCE` rows, each row at several places. The order depends on shapes, layout and
processor but not on numbers, so that random ones tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import cpu
from saccade.target.linear import SHARE, Linear, packed_rows, reordered

REFERENCE = 16
"""Rows of the product whose bits all others must give."""
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
"""Numbers of rows that are tried."""
_STARTS = (0, 3)
"""Rows of the sample at which the pieces that are tried begin."""
_FEW = 64
"""Rows up to which a padded product takes less time than two."""
_NOISE = 1e-6
"""Size of rounding errors of float32 sums of some hundred products of about 1."""


class SteadyLinear(Linear):
    """The product ``x @ weight.T + bias`` in `sizes` of rows that agree bit for bit, found by `make_steady`."""

    __slots__ = ("_wide", "_wide_bias", "_widens", "sizes")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, sources: Sequence[Tensor] = ()) -> None:
        super().__init__(weight, bias, sources)
        self.sizes: tuple[int, ...] = (REFERENCE,)
        self._widens = False
        self._wide: Tensor | None = None
        self._wide_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
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
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        else:
            product = F.linear(x, weight if self._wide is None else self._wide, bias)
        return product.to(dtype) if self._widens else product

    def with_weight(self, weight: Tensor, bias: Tensor | None) -> SteadyLinear:
        """Return the product with another weight of the same shape and format, copied like this one."""
        other = SteadyLinear(weight, bias)
        if self.is_copied:
            other._copy_again()
        return other

    @property
    def is_copied(self) -> bool:
        """Whether a copy of the weight is multiplied."""
        return self._packed is not None or self._wide is not None

    @property
    def is_widened(self) -> bool:
        """Whether the processor has to emulate the weight's format, which takes longer than float32 and rounding once,
        as instructions for the format do."""
        weight = self.weight
        return weight.device.type == "cpu" and weight.dtype != torch.float32 and not cpu.computes_in(weight.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy_again(self) -> None:
        """Copy the weight in the format and layout that are faster here."""
        weight = self.weight.detach()
        self._widens = self.is_widened
        if self._widens:
            weight, self._wide_bias = weight.float(), None if self.bias is None else self.bias.detach().float()
        if weight.device.type == "cpu" and packed_rows(weight):
            self._packed = reordered(weight, REFERENCE)
        elif self._widens:
            self._wide = weight
        else:
            return
        self._note_weight()


def steady_silu(x: Tensor) -> Tensor:
    """Return SiLU of ``[T, d]``, each element the same bits in any place.

    torch's kernel takes another path at the ends of each thread's share, and differs there in the last bit.
    """
    if x.device.type != "cpu" or torch.get_num_threads() == 1:  # shares are rows then
        return F.silu(x)
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def pieces(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes in which ``count`` rows run, the last one padded; ``sizes`` ascending.

    Many rows that a single size would pad by more than an eighth run in several.
    """
    whole, rest = divmod(count, sizes[-1])
    found = [sizes[-1]] * whole
    while rest or not found:
        size = next(size for size in sizes if size >= rest)
        if rest > _FEW and size > rest * 9 / 8:
            size = max((size for size in sizes if size <= rest), default=size)
        found.append(size)
        rest -= min(size, rest)
    return found


@torch.inference_mode()
def make_steady(products: Sequence[SteadyLinear]) -> tuple[int, ...]:
    """Find the sizes of all products; return those that they share.

    Weights are copied in the format and layout that are faster, if all copies fit into memory.
    """
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
    return tuple(sorted(set.intersection(*(set(sizes) for sizes in known.values()))))


def agreeing_sizes(product: SteadyLinear) -> tuple[int, ...]:
    """Return the `SIZES` of rows that give the bits of `REFERENCE` rows; one row alone where these depend on places.

    A stand-in for the weight is multiplied, such that every sum would be zero without rounding: what is left of it
    shows any other order in its first digits, which the format of the result cannot hide.
    """
    weight, longest = product.weight, SIZES[-1] + max(_STARTS)
    generator = torch.Generator().manual_seed(0)
    half = weight.shape[1] // 2
    left = torch.randn(weight.shape[0], half, generator=generator).to(weight)
    x = torch.randn(-(-longest // REFERENCE) * REFERENCE, half, generator=generator).to(weight)
    order = torch.randperm(half, generator=generator).to(weight.device)
    odd = weight.shape[1] % 2
    stand_in = torch.empty_like(weight).copy_(F.pad(torch.cat([left, -left[:, order]], 1), (0, odd)))
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
