"""The page of a run, from any of its records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.device.records import SHARES, Record


def page(records: Sequence[Record]) -> str:
    return "\n".join(_lines(records)) + "\n"


def _lines(records: Sequence[Record]) -> Iterator[str]:
    yield "# What a device did"
    for part in SHARES:
        mine = [r for r in records if r["part"] == part and r["kind"] in ("finding", "error", "left out")]
        if mine:
            yield f"\n## {part}\n"
            yield from (
                f"- {r['piece']}: {'**' + r['kind'] + '** ' if r['kind'] != 'finding' else ''}{r['line']}" for r in mine
            )
