"""Cost of a forward by the number of tokens that it verifies, through the stock modules and the lean decoder.

The prompt is a question about a picture; the new tokens are a chain behind it. Both ways run in turns on one cache;
medians of many.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch

from benchmarks.clock import Clock
from benchmarks.pocket_pair import load
from saccade.inputs.processor import InputProcessor
from saccade.pocket import draft_path, draw, target_path
from saccade.target.adapter import Target
from saccade.target.context import Context

COUNTS = (1, 6, 16, 26, 61)


def milliseconds(target: Target, context: Context, count: int, repeats: int, clock: Clock) -> tuple[float, float]:
    """Medians of a forward of ``count`` tokens: stock, lean."""
    device = target.device
    tokens = torch.full((1, count), 7, device=device)
    allow = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
    depth = torch.arange(count, device=device)[None]

    def once() -> float:
        context.cache.drop([0])
        start = clock()
        context.forward([0], tokens, allow, depth)
        return clock() - start

    stock, lean = [], []
    for _ in range(repeats + 2):
        with target.stock():
            stock.append(once())
        lean.append(once())
    return median(stock[2:]) * 1e3, median(lean[2:]) * 1e3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--repeats", type=int, default=40, help="forwards of each kind (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = Clock("wall", torch.device(options.device))
    prompt = InputProcessor.load(str(target_path())).prompt(draw(300_000, "scene").messages())
    print(f"{len(prompt.ids)} tokens before them; stock / lean, milliseconds\n")
    print("| tokens | " + " | ".join(map(str, COUNTS)) + " |")
    print("|---" * (len(COUNTS) + 1) + "|")
    measured = {}
    models = (
        ("target, bfloat16", target_path(), "bfloat16"),
        ("target, float32", target_path(), "float32"),
        ("draft, float32", draft_path(), "float32"),
    )
    for name, folder, dtype in models:
        target = Target(load(folder, dtype, options.device))
        with torch.inference_mode():
            context = Context(target, 1)
            context.cache.reserve(0, len(prompt.ids) + max(COUNTS))
            context.load(0, prompt)
            rows = [milliseconds(target, context, count, options.repeats, clock) for count in COUNTS]
        measured[name] = dict(zip(map(str, COUNTS), rows, strict=True))
        print(f"| {name} | " + " | ".join(f"{stock:.2f} / {lean:.2f}" for stock, lean in rows) + " |")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
