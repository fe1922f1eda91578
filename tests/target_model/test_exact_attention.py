"""Attention whose sums do not round: the same bits in any order of the keys, and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.target_model import exact
from saccade.target_model.exact import MAX_KEYS, ExactAttention, grids, on_grid, power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 0.2


def vectors(dtype: torch.dtype, heads: int = 4, keys: int = 150, queries: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with elements and vectors of very different sizes."""
    torch.manual_seed(keys)
    query, key = torch.randn(1, heads, queries, 32) * 3, torch.randn(1, 2, keys, 32)
    value = torch.randn(1, 2, keys, 32) * torch.randn(1, 2, keys, 1).mul(3).exp().clamp(max=1e3)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def rounded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries in float32, keys and values in their dtype, as a layer rounds them."""
    factors, steps = grids(1, 1, 1.0, value.dtype, value.device)
    one, two, three = (on_grid(x, factors[i], steps[i]) for i, x in enumerate((query, key, value)))
    return one, two.to(value.dtype), three.to(value.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 33, 150, 1000])
def test_the_order_of_the_keys_and_masked_ones_between_change_no_bit(keys: int, dtype: torch.dtype) -> None:
    query, key, value = rounded(*vectors(dtype, keys=keys))
    attend = ExactAttention(2048, dtype)
    expected = attend(query, key, value, None, SCALE)
    places = torch.randperm(keys + 50)[:keys]
    apart = torch.randn(2, 1, 2, keys + 50, 32).to(dtype)
    apart[0][:, :, places], apart[1][:, :, places] = key, value
    mask = torch.full((1, 1, 7, keys + 50), torch.finfo(dtype).min, dtype=dtype)
    mask[..., places] = 0
    assert torch.equal(attend(query, *apart, mask, SCALE), expected)
    for i in range(7):
        assert torch.equal(attend(query[:, :, i : i + 1], key, value, None, SCALE), expected[:, :, i : i + 1])
    several = [torch.cat([x, torch.randn_like(x)]) for x in (query, key, value)]
    assert torch.equal(attend(*several, None, SCALE)[:1], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_attention(dtype: torch.dtype) -> None:
    query, key, value = vectors(dtype)
    wide = [x.double() for x in (query, key, value)]
    right = scaled_dot_product_attention(*wide, scale=SCALE, enable_gqa=True)
    ours = ExactAttention(2048, dtype)(*rounded(query, key, value), None, SCALE)
    worst = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(ours.double(), right, rtol=worst, atol=worst)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_weights_are_not_lost_beside_a_large_one(dtype: torch.dtype) -> None:
    """In a context so long that a weight below the grid would be rounded away, half of the attention."""
    keys = 20_000
    query, key, value = torch.ones(1, 1, 1, 8), torch.zeros(1, 1, keys, 8), torch.ones(1, 1, keys, 8)
    key[:, :, 0] = torch.tensor(keys, dtype=torch.float64).log() / 8
    value[:, :, 0] = 0.5
    vectors = rounded(*(x.to(dtype) for x in (query, key, value)))
    wide = [x.double() for x in vectors]
    right = scaled_dot_product_attention(*wide, scale=1.0)
    ours = ExactAttention(2**15, dtype)(*vectors, None, 1.0)
    torch.testing.assert_close(ours.double(), right, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("mistake", ["vectors", "weights"])
def test_sums_that_round_would_be_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = vectors(torch.float32, keys=1000)
    if mistake == "vectors":
        query, key = query * torch.rand(32).exp(), key / 3
        value = value / 3
    else:
        query, key, value = rounded(query, key, value)
        monkeypatch.setattr(exact, "power_of_two", lambda x: torch.full_like(x, 2.0**-40))
    attend = ExactAttention(2048, torch.float32)
    order = torch.randperm(1000)

    def result(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query.double(), key.double(), value.double(), None, SCALE)  # not rounded at the end

    assert not torch.equal(result(query, key, value), result(query, key[:, :, order], value[:, :, order]))


def test_rounding_loses_nothing_but_the_smallest_elements() -> None:
    x = torch.randn(100, 64).bfloat16()
    large = x.abs() > x.abs().amax(-1, keepdim=True) * 2**-12
    assert torch.equal(rounded(x, x, x)[0][large], x[large].float())
    fine = rounded(*[torch.randn(100, 64)] * 3)[0].double()
    grid = power_of_two(fine.abs().amax(-1, keepdim=True)) * 2.0**-21
    assert torch.equal(fine / grid, (fine / grid).round())
    assert not rounded(*[torch.zeros(2, 8)] * 3)[0].any()


def test_queries_are_scaled_before_they_are_rounded() -> None:
    both = torch.randn(4, 5, 32).bfloat16()
    ours = on_grid(both, *grids(2, 1, 0.3, torch.bfloat16, both.device))
    torch.testing.assert_close(ours[:2], both[:2].float() * 0.3, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[2].bfloat16(), both[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_queries_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt's queries run block by block, over the keys that a block sees."""
    query, key, value = rounded(*vectors(dtype, keys=90, queries=70))
    mask = torch.full((1, 1, 70, 90), torch.finfo(dtype).min, dtype=dtype).triu(21)
    attend = ExactAttention(2048, dtype)
    expected = attend(query, key, value, mask, SCALE)
    monkeypatch.setattr(exact, "_BLOCK", 1)
    blocks: list[int] = []
    inner = ExactAttention._attend
    monkeypatch.setattr(ExactAttention, "_attend", lambda *given: blocks.append(given[2].shape[2]) or inner(*given))
    assert torch.equal(attend(query, key, value, mask, SCALE), expected)
    assert blocks == [52, 84, 90]


def test_zero_values_and_one_key_are_no_exception() -> None:
    query, key, value = rounded(*vectors(torch.bfloat16, keys=5))
    attend = ExactAttention(64, torch.bfloat16)
    assert not attend(query, key, value * 0, None, SCALE).any()
    alone = attend(query, key[:, :, :1], value[:, :, :1], None, SCALE)
    assert torch.equal(alone, value[:, :, :1].repeat_interleave(2, 1).expand_as(alone))


def test_more_keys_than_can_be_summed_are_refused() -> None:
    with pytest.raises(ValueError, match="not exact"):
        ExactAttention(MAX_KEYS + 1, torch.float32)
