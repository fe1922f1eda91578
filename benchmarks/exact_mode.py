"""Exact mode on the pocket pair: tokens that differ from plain decoding's, with it and without, and what it costs.

Every group of eight prompts is answered by plain decoding, one row at a time, and by other methods and batch sizes on
the same models; an answer counts up to its first difference, which is counted once. Answers run on beyond their ends,
to a fixed length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import count
from time import process_time
from typing import Any

from benchmarks import pocket_pair
from benchmarks.pocket_pair import load
from saccade.vlm import VLM

GROUP = 8
"""Prompts of a group, and rows of a batch."""
COMPARED: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain, 8 rows": ("plain", {}, 8),
    "chain of 7, 1 row": ("chain", {"gamma": 7}, 1),
    "chain of 7, 8 rows": ("chain", {"gamma": 7}, 8),
    "dynamic tree, 8 rows": ("dynamic-tree", {}, 8),
    "prompt lookup, 8 rows": ("prompt-lookup", {}, 8),
}
"""Method, its options and rows at a time by label."""
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "chain of 7": ("chain", {"gamma": 7}),
    "dynamic tree": ("dynamic-tree", {}),
}


def answers(vlm: VLM, numbers: Sequence[int], rows: int, length: int, run_on: bool) -> list[list[int]]:
    """Tokens of the answers about fresh pictures, some rows at a time."""
    tokens: list[list[int]] = []
    more: dict[str, Any] = {"min_new_tokens": length} if run_on else {}
    for at in range(0, len(numbers), rows):
        drawn = pocket_pair.samples(numbers[at : at + rows])
        outputs = vlm.generate([sample.messages() for sample in drawn], max_new_tokens=length, **more)
        tokens += [output.tokens for output in outputs]
    return tokens


def compare(vlm: VLM, least: int, length: int) -> dict[str, list[int]]:
    """Tokens compared and differences by label, group after group until at least so many tokens are compared."""
    counts = {label: [0, 0] for label in COMPARED}
    for group in count():
        done = sum(compared for compared, _ in counts.values())
        print(f"{done} tokens compared", file=sys.stderr, flush=True)
        if done >= least:
            break
        numbers = range(group * GROUP, (group + 1) * GROUP)
        expected = answers(vlm.using("plain"), numbers, 1, length, run_on=True)
        for label, (method, options, rows) in COMPARED.items():
            ours = answers(vlm.using(method, **options), numbers, rows, length, run_on=True)
            for mine, plain in zip(ours, expected, strict=True):
                first = next((i for i, pair in enumerate(zip(mine, plain, strict=True), 1) if pair[0] != pair[1]), None)
                counts[label][0] += first or len(plain)
                counts[label][1] += first is not None
    return counts


def print_costs(vlms: dict[str, VLM], options: argparse.Namespace) -> None:
    """Print processor time per token of whole calls, one row at a time, both modes in turn on every prompt."""
    seconds = dict.fromkeys(((label, mode) for label in TIMED for mode in vlms), 0.0)
    tokens = dict.fromkeys(seconds, 0)
    for number in range(-1, options.timed_prompts):  # the first warms up
        for label, (method, settings) in TIMED.items():
            for mode, vlm in vlms.items():
                chosen = vlm.using(method, **settings)
                started = process_time()
                (answer,) = answers(chosen, [max(number, 0)], 1, options.new_tokens, run_on=False)
                if number >= 0:
                    seconds[label, mode] += process_time() - started
                    tokens[label, mode] += len(answer)
    rows = []
    for label in TIMED:
        usual, exact = (1000 * seconds[label, mode] / max(tokens[label, mode], 1) for mode in ("usual", "exact"))
        rows.append([label, f"{usual:.2f}", f"{exact:.2f}", f"{exact / usual:.2f}"])
    print("\n".join(pocket_pair.table(["method", "usual, ms/token", "exact, ms/token", "exact / usual"], rows)))


def main() -> None:
    parser = pocket_pair.parser(__doc__)
    parser.set_defaults(target_dtype="bfloat16", threads=1)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare in exact mode (default: 100000)")
    parser.add_argument("--usual-tokens", type=int, default=5_000, help="tokens to compare without (default: 5000)")
    parser.add_argument("--new-tokens", type=int, default=160, help="length of the answers (default: 160)")
    parser.add_argument("--timed-prompts", type=int, default=16, help="prompts of the cost table; 0 for none")
    options = pocket_pair.options_of(parser)
    target = load(options.target, options.target_dtype, options.device)
    draft = load(options.draft, options.draft_dtype, options.device)
    vlms = {mode: VLM(target, drafter=draft, exact=mode == "exact") for mode in ("usual", "exact")}
    if options.timed_prompts:
        print_costs(vlms, options)
    exact = compare(vlms["exact"], options.tokens, options.new_tokens)
    usual = compare(vlms["usual"], options.usual_tokens, options.new_tokens)
    for counts in (exact, usual):
        counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    rows = [[label, *(f"{number:,}" for number in (*exact[label], *usual[label]))] for label in exact]
    head = ["compared with plain decoding, one row at a time", "exact: tokens", "differ", "usual: tokens", "differ"]
    print("\n".join(pocket_pair.table(head, rows)))


if __name__ == "__main__":
    main()
