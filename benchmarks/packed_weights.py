"""Time of one product by the number of rows: the weight as it is, and packed for few rows (`saccade.target.linear`).

Both take turns; the shortest of many is shown, in microseconds. The last line compares bfloat16 with float32.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch

from saccade import cpu
from saccade.target.linear import ROWS, Linear

SHAPES = ((768, 256), (8192, 256), (1024, 1024), (4096, 1024), (1024, 4096))


def microseconds(*products: partial[torch.Tensor], repeats: int) -> list[float]:
    """Shortest time of each product."""
    found = [float("inf")] * len(products)
    for _ in range(repeats):
        for index, product in enumerate(products):
            start = time.perf_counter()
            product()
            found[index] = min(found[index], time.perf_counter() - start)
    return [seconds * 1e6 for seconds in found]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="products of each kind (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{'weight':>12}  rows: as it is / packed")
    with torch.inference_mode():
        for out, width in SHAPES:
            plain = Linear(torch.randn(out, width))
            packed = Linear(plain.weight)
            packed.pack(range(1, 1 << 20))
            cells = []
            for rows in ROWS:
                x = torch.randn(rows, width)
                ours = microseconds(partial(plain, x), partial(packed, x), repeats=options.repeats)
                cells.append(f"{rows}: {ours[0]:.0f} / {ours[1]:.0f}")
            print(f"{out:>6}x{width:<5}  " + "   ".join(cells))
    speed = cpu._speed_over_float32(torch.bfloat16)
    print(f"bfloat16, 2048x1024, 8 rows: {speed:.2f} times as fast as float32")


if __name__ == "__main__":
    main()
