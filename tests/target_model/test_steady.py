"""Products whose rows do not depend on each other, nor on their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from families import FAMILIES
from harness import running_on
from saccade.target_model import exact, lean, linear
from saccade.target_model.adapter import Target
from saccade.target_model.exact import SIZES, SteadyLinear, agreeing_sizes, make_steady, pieces, steady_silu

pytestmark = pytest.mark.formats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(width: int = 96, biased: bool = False, dtype: torch.dtype = torch.float32) -> SteadyLinear:
    torch.manual_seed(width)
    made = SteadyLinear(torch.randn(80, width).to(dtype), torch.randn(80).to(dtype) if biased else None)
    make_steady([made])
    return made


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 101])
def test_a_row_s_product_is_the_same_alone_and_anywhere_among_others(
    width: int, dtype: torch.dtype, biased: bool
) -> None:
    ours = product(width, biased, dtype)
    x = torch.randn(300, width).to(dtype)
    together = ours(x)
    for start, count in [(0, 0), (0, 1), (7, 1), (3, 2), (11, 3), (5, 7), (40, 23), (100, 200)]:
        assert torch.equal(ours(x[start : start + count]), together[start : start + count])
    order = torch.randperm(300)
    assert torch.equal(ours(x[order]), together[order])
    expected = torch.nn.functional.linear(x.float(), ours.weight.float(), None if not biased else ours.bias.float())
    torch.testing.assert_close(together.float(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_steady_too_and_copied_again_when_it_changes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linear.works("packed", dtype):
        pytest.skip(f"oneDNN packs no weights of {dtype} on this processor")
    monkeypatch.setattr(exact, "faster_rows", lambda weight: {"packed": range(2, 64)})
    ours = product(dtype=dtype)
    assert ours._copy is not None
    x = torch.randn(40, 96).to(dtype)
    together = ours(x)
    assert all(torch.equal(ours(x[i : i + 1]), together[i : i + 1]) for i in range(40))
    ours.weight.mul_(2)
    ours.refresh()
    assert torch.equal(ours(x), together * 2)


def in_turn(terms: Tensor) -> Tensor:
    """Sums over the last dimension, from its first element on."""
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total


class OtherOrder(SteadyLinear):
    """A library that sums from the other end for fewer rows than ``fewest``, or in the first rows."""

    __slots__ = ("fewest", "first")

    def __init__(self, weight: Tensor, fewest: int = 0, first: int = 0) -> None:
        super().__init__(weight)
        self.fewest, self.first = fewest, first

    def with_weight(self, weight: Tensor, bias: Tensor | None) -> SteadyLinear:
        return OtherOrder(weight, self.fewest, self.first)

    def multiply(self, x: Tensor) -> Tensor:
        rows = x.float()[:, None] * self.weight.float()
        forth, back = in_turn(rows), in_turn(rows.flip(-1))
        turned = torch.arange(len(x)) < (len(x) if len(x) < self.fewest else self.first)
        return torch.where(turned[:, None], back, forth).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_size_with_another_order_of_summation_is_not_used(dtype: torch.dtype) -> None:
    """Rows run one by one where the order depends on their place."""
    weight = torch.randn(24, 64).to(dtype)
    assert agreeing_sizes(OtherOrder(weight)) == SIZES
    assert agreeing_sizes(OtherOrder(weight, fewest=6)) == tuple(size for size in SIZES if size >= 6)
    ours = OtherOrder(weight, first=3)
    assert make_steady([ours]) == (1,)
    x = torch.randn(5, 64).to(dtype)
    assert torch.equal(ours(x)[4:], ours(x[4:]))


def test_unpadded_rows_would_be_noticed() -> None:
    """The mistake that padding avoids on this machine's library; where all sizes agree there is none to make."""
    ours = product()
    if 1 in ours.sizes:
        pytest.skip("this processor's products agree for one row, too")
    x = torch.randn(300, 96)
    together = ours(x)
    ours.sizes = tuple(range(1, 301))
    assert not all(torch.equal(ours(x[i : i + 1]), together[i : i + 1]) for i in range(300))


@pytest.mark.parametrize(
    ("count", "sizes", "expected"),
    [
        (0, (4, 8), [4]),
        (1, (4, 8), [4]),
        (5, (4, 8), [8]),
        (8, (4, 8), [8]),
        (17, (4, 8), [8, 8, 4]),
        (3, (1,), [1, 1, 1]),
        (118, SIZES, [128]),
        (150, SIZES, [128, 24]),
        (400, SIZES, [256, 128, 16]),
    ],
)
def test_rows_run_in_large_pieces_and_one_little_padded_rest(
    count: int, sizes: tuple[int, ...], expected: list[int]
) -> None:
    assert pieces(count, sizes) == expected


def test_the_sizes_that_agree_are_found_again_when_the_number_of_threads_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, tried = Target(FAMILIES["llama"].model(), exact=True), list[int]()
    monkeypatch.setattr(lean, "make_steady", lambda products: tried.append(len(products)) or (1,))
    assert target.is_lean
    assert not tried
    with running_on(torch.get_num_threads() + 1):
        assert target.is_lean
        assert target.is_lean
        assert len(tried) == 1
    assert target.is_lean
    assert len(tried) == 2


@pytest.mark.parametrize("threads", [1, 4])
def test_the_activation_of_a_row_does_not_depend_on_the_rows_beside_it(threads: int) -> None:
    """torch's own does with several threads, whose shares end within rows."""
    both = torch.randn(300, 2 * 700, generator=torch.Generator().manual_seed(0))
    with running_on(threads):
        whole = steady_silu(both[:, :700])
        torch.testing.assert_close(whole, torch.nn.functional.silu(both[:, :700]))
        for count in (1, 7, 67, 131, 201):
            assert torch.equal(steady_silu(both[:count, :700]), whole[:count])
