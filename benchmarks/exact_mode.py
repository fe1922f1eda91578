"""Exact mode on the pocket pair: tokens that differ from plain decoding's, with it and without, and what it costs.

Every group of eight prompts is answered by plain decoding, one row at a time, and by other methods and batch sizes on
the same models; an answer counts up to its first difference, which is counted once. Answers run on beyond their ends,
to a fixed length. Groups are recorded as they are done, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks import pocket_pair
from benchmarks.pocket_pair import load
from saccade.pocket import draft_path, target_path
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


def count_group(vlm: VLM, group: int, length: int) -> dict[str, list[int]]:
    """Tokens compared and differences of every label of `COMPARED`."""
    numbers = range(group * GROUP, (group + 1) * GROUP)
    expected = answers(vlm.using("plain"), numbers, 1, length, run_on=True)
    counts = {}
    for label, (method, options, rows) in COMPARED.items():
        compared = differing = 0
        for ours, plain in zip(
            answers(vlm.using(method, **options), numbers, rows, length, True), expected, strict=True
        ):
            first = next((i for i, pair in enumerate(zip(ours, plain, strict=True), 1) if pair[0] != pair[1]), None)
            compared, differing = compared + (first or len(plain)), differing + (first is not None)
        counts[label] = [compared, differing]
    return counts


def count(vlms: dict[str, VLM], options: argparse.Namespace) -> None:
    """Compare groups that are not recorded yet, until enough tokens are, and print the counts."""
    record: Path = options.out
    record.parent.mkdir(parents=True, exist_ok=True)
    for mode, wanted in (("exact", options.tokens), ("usual", options.usual_tokens)):
        while total(record, mode)[0] < wanted:
            done = [line["group"] for line in lines(record) if line["mode"] == mode]
            group = max(done, default=-1) + 1
            counts = count_group(vlms[mode], group, options.new_tokens)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mode": mode, "group": group, "counts": counts}) + "\n")
            print(f"{mode}: {total(record, mode)[0]} tokens compared", file=sys.stderr, flush=True)


def total(record: Path, mode: str, label: str | None = None) -> tuple[int, int]:
    """Tokens compared and differences of a mode, in all or of one label."""
    counts = [line["counts"] for line in lines(record) if line["mode"] == mode]
    chosen = [pair for group in counts for name, pair in group.items() if label in (None, name)]
    return sum(pair[0] for pair in chosen), sum(pair[1] for pair in chosen)


def lines(record: Path) -> list[dict[str, Any]]:
    """The recorded groups."""
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.exists() else []


def print_costs(vlms: dict[str, VLM], options: argparse.Namespace) -> None:
    """Print processor time per token of whole calls, one row at a time, both modes in turn on every prompt."""
    seconds = dict.fromkeys(((label, mode) for label in TIMED for mode in vlms), 0.0)
    tokens = dict(seconds)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact_mode", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare in exact mode (default: 100000)")
    parser.add_argument("--usual-tokens", type=int, default=5_000, help="tokens to compare without (default: 5000)")
    parser.add_argument("--new-tokens", type=int, default=160, help="length of the answers (default: 160)")
    parser.add_argument("--timed-prompts", type=int, default=16, help="prompts of the cost table; 0 for none")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/exact-mode.jsonl"), help="record of the counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, draft = load(target_path(), options.dtype, "cpu"), load(draft_path(), "float32", "cpu")
    vlms = {mode: VLM(target, drafter=draft, exact=mode == "exact") for mode in ("usual", "exact")}
    if options.timed_prompts:
        print_costs(vlms, options)
    count(vlms, options)
    rows = []
    for label in (*COMPARED, None):
        exact, usual = (total(options.out, mode, label) for mode in ("exact", "usual"))
        rows.append([label or "all", f"{exact[0]:,}", str(exact[1]), f"{usual[0]:,}", str(usual[1])])
    head = ["compared with plain decoding, one row at a time", "exact: tokens", "differ", "usual: tokens", "differ"]
    print("\n".join(pocket_pair.table(head, rows)))


if __name__ == "__main__":
    main()
