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


def by_prompt(records: list[dict[str, Any]], name: str) -> dict[str, float]:
    return {r["prompt_id"]: quantities(r)[name] for r in records}


def interval(statistic: Any, count: int) -> tuple[float, float, float]:
    """Value and 95 % interval by 1,000 resamples of prompts, whose seed is none of the project's."""
    taken = np.random.default_rng(20_26).integers(count, size=(1000, count))
    found = [statistic(row) for row in taken]
    return (statistic(np.arange(count)), *np.nanquantile(found, [0.025, 0.975]))


def compared(by: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float, float] | None:
    def paired(above: str, below: str) -> np.ndarray:
        mine, other = by_prompt(ours, above), by_prompt(theirs, below)
        return np.array([(mine[p], other[p]) for p in mine if p in other])

    if by == "block efficiency":
        emitted, passes = paired("emitted", "emitted"), paired("passes", "passes")
        emitted, passes = emitted[passes.all(1)], passes[passes.all(1)]

        def ratio(row: Any) -> float:
            tokens = emitted[row].sum(0) / passes[row].sum(0)
            return float(tokens[0] / tokens[1])

        return interval(ratio, len(emitted))
    if by == "score":
        scores = paired("score", "score")
        scores = scores[~np.isnan(scores).any(1)]
        return interval(lambda row: float(np.divide(*scores[row].sum(0))), len(scores))
    above, _, below = by.partition(" over ")
    times = paired(above, below or above)
    times = times[times.all(1)]
    return interval(lambda row: float(np.median(times[row, 0] / times[row, 1])), len(times))


def verdict(bar: float, low: float, high: float, prompts: int) -> str:
    if prompts < 40:
        return "undecided"
    if low > bar or high < bar:
        return "holds" if low > bar else "does not"
    return "level" if bar - low <= 0.03 * bar and high - bar <= 0.03 * bar else "undecided"


def of_label(label: str, records: list[dict[str, Any]], tasks: list[str]) -> list[dict[str, Any]]:
    records = [r for r in records if not tasks or r["task"] in tasks]
    if "|" not in label:
        return [r for r in records if r["method"] == label]
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
        if by == "score at equal tokens per pass":
            continue  # curves: what is compared is no ratio of sums, and has a test of its own
        there = {label: of_label(label, records, tasks) for pair in pairs for label in pair}
        assert known.keys() == {f"{a} / {b}" for a, b in pairs if there[a] and there[b]}, claim["says"]
        for a, b in pairs:
            if not (there[a] and there[b]):
                continue
            row, (value, low, high) = known[f"{a} / {b}"], compared(by, there[a], there[b])
            printed = [float(row[name]) for name in ("value", "low", "high")]
            assert value == pytest.approx(printed[0], abs=6e-4), (page, a, b)
            assert printed[1:] == pytest.approx([low, high], abs=0.004 + 0.2 * (high - low)), (page, a, b)
            prompts = len({r["prompt_id"] for r in there[a]} & {r["prompt_id"] for r in there[b]})
            ends = [(printed[1] + x, printed[2] + y) for x in (-5e-4, 0, 5e-4) for y in (-5e-4, 0, 5e-4)]
            judged = row["quantity"].rpartition(": ")[2]
            assert judged in {verdict(bar, *end, prompts) for end in ends}, (page, a, b)
