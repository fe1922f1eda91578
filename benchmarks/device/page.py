"""The page of a run, from any of its records: what was found, and the speed-ups that follow by computation."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.device import ROOT
from benchmarks.device.records import SHARES, Record
from benchmarks.pocket_pair import table
from saccade import theory

COPY, PRODUCTS = 4300.0, 790.0  # GB/s and TFLOP/s of an H200, where the run measured none
METHODS = {
    "EAGLE-3, chain": ("EAGLE-3-chain", "eagle3", "chain 7"),
    "HiViS, chain": ("HiViS-chain", "hivis", "chain 7"),
    "draft VLM, chain": ("draft-VLM-chain", "Qwen2.5-VL-3B", "chain 7"),
    "EAGLE-3, tree": ("EAGLE-3", "eagle3", "large tree"),
    "HiViS, tree": ("HiViS", "hivis", "large tree"),
}
"""Method: its row of docs/results/heads.csv, its drafter, and the drafts whose time counts."""
GUESSES, NODES = 5, 30
"""Draft tokens of the chains of that table; nodes of a measured pass near its trees of 26 with the root."""


def page(records: Sequence[Record]) -> str:
    return "\n".join(_lines(records)) + "\n"


def _lines(records: Sequence[Record]) -> Iterator[str]:
    found, warned, errors = ([r for r in records if r["kind"] == kind] for kind in ("finding", "warning", "error"))
    wrong = [r for r in found if r.get("WRONG")]
    yield "# What the kit measured\n"
    yield "Written by `python -m benchmarks.device`; models other than the built-in pair have random weights.\n"
    if [r for r in found if r.get("small")]:
        yield "**Tiny models stand for all that are named**, so that no time here says anything about these.\n"
    seconds = sum(r.get("seconds", 0.0) for r in records if r["kind"] == "end")
    counts = f"{len(wrong)} WRONG, {len(warned)} warnings, {len(errors)} errors"
    yield f"{len(found)} findings in {seconds:.0f} s, {counts}.\n"
    for kind, some in (("WRONG", wrong), ("warning", warned)):
        yield from (f"- **{kind}** {record['part']}, {record['piece']}: {record['line']}" for record in some)
    for record in errors:
        frames = " < ".join(reversed(record["frames"][-3:]))
        yield f"- **error** {record['part']}, {record['piece']}: {record['error']}: {record['line']} ({frames})"
    for part in SHARES:
        mine = [r for r in records if r["part"] == part and r["kind"] in ("finding", "left out")]
        if not mine:
            continue
        yield f"\n## {part.capitalize()}\n"
        if part == "cost":
            yield from _passes(found)
            yield from _expected(found)
            mine = [r for r in mine if "nodes" not in r]
        pieces = dict.fromkeys(r["piece"] for r in mine)
        for piece in pieces:
            yield f"- {piece}: {'; '.join(r['line'] for r in mine if r['piece'] == piece)}"


def _passes(found: Sequence[Record]) -> Iterator[str]:
    """Every pass, with a graph and without, beside its limit."""
    copies = next((r["gigabytes_per_second"] for r in found if "gigabytes_per_second" in r), COPY)
    rates = {r["dtype"]: r["teraflops"] for r in found if "teraflops" in r}
    products = rates.get("bfloat16", PRODUCTS)
    shapes = dict[tuple[Any, ...], dict[bool, Record]]()
    for r in found:
        if "ms" in r and "nodes" in r:
            shapes.setdefault((r["model"], r["context"], r["rows"], r["nodes"]), {})[r["graphs"]] = r
    if not shapes:
        return
    rows = []
    for shape, ways in shapes.items():
        first = next(iter(ways.values()))
        needs = first["limits"]
        by = {"bytes": needs["bytes"] / copies / 1e6, "operations": needs["operations"] / products / 1e9}
        limit = max(by, key=lambda name: by[name])
        times = [_number(ways.get(way, {}).get("ms")) for way in (True, False)]
        host = _number(ways.get(False, {}).get("host_ms"))
        launches = [str(ways.get(way, {}).get("launches", "-")) for way in (True, False)]
        rows.append([*map(str, shape), *times, host, f"{by[limit]:.3g} ({limit})", " / ".join(launches)])
    head = ["model", "context", "rows", "nodes", "ms, graph", "ms", "host, ms", "limit, ms", "launches, graph / not"]
    yield f"Limits by {copies:.4g} GB/s and {products:.4g} TFLOP/s in bfloat16.\n"
    yield from table(head, rows)
    yield ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def acceptances() -> dict[str, float]:
    """Tokens per pass of every row of docs/results/heads.csv, over all tasks."""
    with (ROOT / "docs" / "results" / "heads.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"section": "comparison", "task": "all tasks", "quantity": "block efficiency"}
    return {r["method"]: float(r["value"]) for r in rows if wanted.items() <= r.items()}


def _expected(found: Sequence[Record]) -> Iterator[str]:
    """Speed-ups over plain decoding that these costs give with the acceptances of the built-in pair."""
    target, drafts = dict[tuple[int, int], float](), dict[tuple[str, str, int], float]()
    near = min((r["context"] for r in found if "nodes" in r), default=0)
    for r in found:
        if "ms" not in r or r.get("context") != near:
            continue
        if "nodes" in r and r["model"] == "Qwen2.5-VL-7B":
            key = (r["rows"], r["nodes"])
            target[key] = min(r["ms"], target.get(key, r["ms"]))
        elif "drafter" in r:
            drafts[r["drafter"], r["case"], r["rows"]] = r["ms"]
    plain = min((r["ms"] for r in found if r.get("method") == "plain"), default=target.get((1, 1), 0.0))
    rest = max(plain - target.get((1, 1), 0.0), 0.0)
    rows, accepted = [], acceptances()
    for method, (name, drafter, case) in METHODS.items():
        tokens, nodes = accepted[name], NODES
        if "chain" in case:
            acceptance = theory.acceptance_of_length(tokens - 1, GUESSES)
            tokens, nodes = theory.accepted_length(acceptance, 7) + 1, 8
        for batch in sorted({rows for rows, _ in target}):
            draft, verify, one = drafts.get((drafter, case, batch)), target.get((batch, nodes)), target.get((batch, 1))
            if draft is None or verify is None or one is None:
                continue
            step = one + rest
            rate = theory.speedup(tokens, 1, draft / step, verify_cost=(verify + rest) / step)
            costs = [_number(cost) for cost in (verify, draft, step)]
            rows.append([method, str(batch), f"{tokens:.2f}", *costs, f"{rate:.2f}"])
    if not rows:
        return
    yield f"**Computed, not measured**: speed-ups of Qwen2.5-VL-7B behind {near} tokens, from the costs here and the"
    yield "acceptances of the built-in pair (docs/results/heads.md); a chain has 7 guesses.\n"
    head = ["method", "rows", "tokens a pass", "pass, ms", "draft, ms", "plain step, ms", "expected speed-up"]
    yield from table(head, rows)
    yield ""
