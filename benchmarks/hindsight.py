"""Block efficiency if the best of some methods had been chosen for every prompt, by a run of `saccade bench`.

It bounds what any rule that chooses among them by prompt can gain, and what an ensemble of views that is only as good
as its better view can: `python -m benchmarks.hindsight runs/tabed-1 --methods M T --against TABED-MT`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from saccade.bench import records
from saccade.errors import InputError
from tools.results.claims import sums_by_prompt

Sums = tuple[int, int]
"""Tokens emitted by passes, and passes."""


def efficiency(sums: Iterable[Sums]) -> float:
    """Tokens per pass."""
    emitted, passes = map(sum, zip(*sums, strict=True))
    return emitted / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that `saccade bench` or `python -m tools.results` wrote")
    parser.add_argument("--methods", nargs="+", required=True, help="labels to choose from")
    parser.add_argument("--against", nargs="+", default=[], help="labels that are only shown")
    options = parser.parse_args()
    shown = [*options.methods, *options.against]
    run = records.read(options.run)
    found = {label: sums_by_prompt([r for r in run.records if r.method == label]) for label in shown}
    prompts = set.intersection(*(set(sums) for sums in found.values()))
    both = [{label: found[label][prompt] for label in shown} for prompt in sorted(prompts)]
    if not both:
        raise InputError(f"{options.run} has no prompt that all of {', '.join(shown)} answered in more than one pass.")
    for label in shown:
        print(f"{label}: {efficiency(sums[label] for sums in both):.3f}")
    best = [max(options.methods, key=lambda label: sums[label][0] / sums[label][1]) for sums in both]
    chosen = efficiency(sums[label] for sums, label in zip(both, best, strict=True))
    times = ", ".join(f"{label} {number}" for label, number in Counter(best).most_common())
    print(f"the best of {', '.join(options.methods)} for every prompt: {chosen:.3f} (chosen of {len(both)}: {times})")


if __name__ == "__main__":
    main()
