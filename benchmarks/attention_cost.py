"""Cost of attention on a CPU by number format and form: the figures behind the choices of the code.

First one new token over a cache (what a step of plain decoding does), then several, then a training batch forward and
backward. Minima of many, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.pocket.models import _fused, _products

SHAPES = ((8, 8, 32, 300), (32, 32, 128, 2000), (28, 4, 128, 2000))  # heads, key heads, head size, positions
QUERIES = (1, 6, 26)
ROWS = (120, 192, 456)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of ``repeats`` calls, after one that warms up."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def over_a_cache(heads: int, held: int, size: int, positions: int, count: int, repeats: int) -> tuple[float, float]:
    """``count`` queries in bfloat16, and turned to float32 and back."""
    keys, values = torch.randn(2, 1, held, positions, size).bfloat16()
    query, mask = (
        torch.randn(1, heads, count, size).bfloat16(),
        torch.zeros(1, 1, count, positions).bfloat16(),
    )

    def attend(*parts: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*parts, enable_gqa=heads != held).bfloat16()

    return (
        milliseconds(lambda: attend(query, keys, values, mask), repeats),
        milliseconds(lambda: attend(query.float(), keys.float(), values.float(), mask.float()), repeats),
    )


def in_training(positions: int, repeats: int) -> tuple[float, float]:
    """Forward and backward of 16 rows with 8 heads of 32: products in bfloat16, the fused kernel in float32."""
    parts = [torch.randn(16, 8, positions, 32, requires_grad=True) for _ in range(3)]

    def learn(form: Callable[..., Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            form(*parts, 32**-0.5).float().sum().backward()

    return milliseconds(lambda: learn(_products), repeats), milliseconds(lambda: learn(_fused), repeats)


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--repeats", type=int, default=20, help="calls of each form (default: %(default)s)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print("| heads, key heads, head size, positions | queries | bfloat16, ms | float32, ms |\n|---|---|---|---|")
    with torch.inference_mode():
        for shape in SHAPES:
            for count in QUERIES:
                half, full = over_a_cache(*shape, count, options.repeats)
                print(f"| {', '.join(map(str, shape))} | {count} | {half:.3f} | {full:.3f} |")
    print("\n| positions | products in bfloat16, ms | fused in float32, ms |\n|---|---|---|")
    for positions in ROWS:
        products, fused = in_training(positions, options.repeats)
        print(f"| {positions} | {products:.1f} | {fused:.1f} |")


if __name__ == "__main__":
    main()
