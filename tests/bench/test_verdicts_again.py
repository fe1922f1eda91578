"""Every published verdict, recomputed from the kept records by another road: numpy alone, no code of the project."""

from __future__ import annotations

import csv
import json
import lzma
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
SUITES = [ROOT / "tools" / "results" / "suites", ROOT / "src" / "saccade" / "bench" / "suites"]
NAMED = {"quick-1024": "quick", "small-trees-1024": "small-trees"}
CLAIMED = [p.stem for p in sorted(RESULTS.glob("*.csv")) if "claim: " in p.read_text(encoding="utf-8")]


def quantities(record: dict[str, Any]) -> dict[str, float]:
    """Everything that claims compare, of one answer."""
    stats, seconds, scores = record["stats"], record["stats"]["seconds"], record["scores"]
    passes = sum(stats["accepted_histogram"])
    decoded = stats["new_tokens"] - stats["prefill_tokens"]
    return {
        "emitted": decoded if passes else 0,
        "passes": passes,
        "speed": stats["new_tokens"] / seconds["total"],
        "decoding speed": decoded / seconds["decode"] if decoded and seconds["decode"] else 0.0,
        "score": float(np.mean([float(x) for x in scores.values()])) if scores else np.nan,
        "target pass": seconds["verify"] / max(passes, 1),
        "draft pass": seconds["draft"] / max(stats["drafted_tokens"], 1),
        "prefill": seconds["vision"] + seconds["prefill"],
        "captioning": seconds["caption"],
        "draft prefill": seconds["draft_prefill"],
        "verification": seconds["verify"],
        "drafting": seconds["draft"],
    }


def interval(statistic: Any, count: int) -> tuple[float, float, float]:
    """Value and 95 % interval by 1,000 resamples of prompts, whose seed is none of the project's."""
    taken = np.random.default_rng(20_26).integers(count, size=(1000, count))
    found = [float(statistic(row)) for row in taken]
    return (float(statistic(np.arange(count))), *np.nanquantile(found, [0.025, 0.975]))


def table(records: list[dict[str, Any]], *names: str) -> dict[str, list[float]]:
    return {r["prompt_id"]: [quantities(r)[name] for name in names] for r in records}


def compared(by: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Any:
    if by == "score at equal tokens per pass":
        return compared_curves(ours, theirs)
    above, is_of_sums, below = by.partition(" over ")
    names = ([above], [below or above]) if by != "block efficiency" else (["emitted", "passes"],) * 2
    mine, other = table(ours, *names[0]), table(theirs, *names[1])
    pairs = np.array([[mine[p], other[p]] for p in mine if p in other])  # [prompts, 2, quantities]
    pairs = pairs[~np.isnan(pairs[:, :, 0]).any(1) if by == "score" else pairs[:, :, -1].all(1)]
    if by == "block efficiency":
        return interval(lambda row: np.divide(*np.divide(*pairs[row].sum(0).T)), len(pairs))
    if by == "score" or is_of_sums:
        return interval(lambda row: np.divide(*pairs[row, :, 0].sum(0)), len(pairs))
    return interval(lambda row: np.median(pairs[row, 0, 0] / pairs[row, 1, 0]), len(pairs))


def compared_curves(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Any:
    """Mean score of one curve over another's, at nine places of the tokens per pass that both reach, if any."""
    parts = [[[r for r in s if r["method"] == m] for m in {r["method"]: 0 for r in s}] for s in (ours, theirs)]
    curves = [[table(part, "emitted", "passes", "score") for part in side] for side in parts]
    usable = [{p for p, (_, passes, score) in t.items() if passes and score == score} for c in curves for t in c]
    ids = sorted(set.intersection(*usable))
    sums = [np.array([[t[p] for p in ids] for t in curve]) for curve in curves]

    def line(each: Any, row: Any) -> Any:
        emitted, passes, score = each[:, row].sum(1).T
        order = (emitted / passes).argsort()
        return (emitted / passes)[order], score[order]

    reached = [line(each, np.arange(len(ids)))[0] for each in sums]
    at = np.linspace(max(x[0] for x in reached), min(x[-1] for x in reached), 9)
    return at[0] < at[8] and interval(lambda r: np.divide(*(np.interp(at, *line(s, r)).mean() for s in sums)), len(ids))


def verdict(bar: float, low: float, high: float, prompts: int) -> str:
    if prompts < 40:
        return "undecided"
    if low > bar or high < bar:
        return "holds" if low > bar else "does not"
    return "level" if bar - low <= 0.03 * bar and high - bar <= 0.03 * bar else "undecided"


def of_label(label: str, records: list[dict[str, Any]], tasks: list[str]) -> list[dict[str, Any]]:
    records = [r for r in records if not tasks or r["task"] in tasks]
    if "|" not in label:
        return [r for r in records if r["method"] == label or (label[-1] == "*" and r["method"].startswith(label[:-1]))]
    weakest = []
    for task in sorted({r["task"] for r in records}):
        each = [[r for r in records if (r["method"], r["task"]) == (one, task)] for one in label.split("|")]
        sums = [[sum(quantities(r)[name] for r in part) for name in ("emitted", "passes")] for part in each]
        weakest += each[int(np.argmin([emitted / passes for emitted, passes in sums]))]
    return weakest


@pytest.mark.slow
@pytest.mark.parametrize("page", CLAIMED)
def test_every_verdict_is_recomputed_from_the_records(page: str) -> None:
    with lzma.open(RESULTS / "records" / f"{page}.jsonl.xz", "rt", encoding="utf-8") as file:
        _, *records = map(json.loads, file)
    assert {r["repeat"] for r in records} == {0}
    with (RESULTS / f"{page}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["section"].startswith("claim: ")]
    stem = NAMED.get(page, page.removesuffix("-64").removesuffix("-128"))
    suite = next(path for folder in SUITES if (path := folder / f"{stem}.toml").is_file())
    claims = tomllib.loads(suite.read_text(encoding="utf-8"))["claims"]
    for claim in claims:
        levels = [[level] if isinstance(level, str) else level for level in claim["order"]]
        by, bar, tasks = claim.get("by", "block efficiency"), claim.get("least", 1.0), claim.get("tasks", [])
        known = {row["method"]: row for row in rows if row["section"] == f"claim: {claim['says']}"}
        pairs = [(a, b) for above, below in combinations(levels, 2) for a in above for b in below]
        there = {label: of_label(label, records, tasks) for pair in pairs for label in pair}
        found = {f"{a} / {b}": compared(by, there[a], there[b]) for a, b in pairs if there[a] and there[b]}
        assert known.keys() == {pair for pair, numbers in found.items() if numbers}, claim["says"]
        for a, b in pairs:
            if not (row := known.get(f"{a} / {b}")):
                continue
            value, low, high = found[f"{a} / {b}"]
            printed = [float(row[name]) for name in ("value", "low", "high")]
            assert value == pytest.approx(printed[0], abs=6e-4), (page, a, b)
            assert printed[1:] == pytest.approx([low, high], abs=0.004 + 0.2 * (high - low)), (page, a, b)
            prompts = len({r["prompt_id"] for r in there[a]} & {r["prompt_id"] for r in there[b]})
            ends = [(printed[1] + x, printed[2] + y) for x in (-5e-4, 0, 5e-4) for y in (-5e-4, 0, 5e-4)]
            judged = row["quantity"].rpartition(": ")[2]
            assert judged in {verdict(bar, *end, prompts) for end in ends}, (page, a, b)
