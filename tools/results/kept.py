"""Records kept beside the pages: what pages are computed from, without questions and answers, compressed."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from saccade.bench.records import Header, Record, RecordedRun
from saccade.files import write_file

FOLDER, SUFFIX = "records", ".jsonl.xz"
_FIELDS = ("prompt_id", "task", "method", "repeat", "lossless", "scores", "equal", "peak_bytes")
_STATS = ("accepted_histogram", "new_tokens", "prefill_tokens", "drafted_tokens", "target_passes", "seconds")
_LEFT_OUT: dict[str, Any] = {
    "question": "",
    "media": [],
    "text": "",
    "tokens": [],
    "marks": [],
    "pieces": [],
    "finish_reason": "",
}
_FIRST = {"weights": 2, "confidence": 1}  # signals of traced trees that figures show, and how many numbers of each


def path_of(folder: Path, name: str) -> Path:
    """File of a page's records in a folder of records."""
    return folder / f"{name}{SUFFIX}"


def keep(path: Path, run: RecordedRun, places: Mapping[str, Any]) -> None:
    """Write what pages need of a run; equal runs give equal bytes. ``places`` are facts for `Header.places`."""
    lines = [asdict(replace(run.header, places=dict(places))), *map(_reduced, run.records)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_file(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def _reduced(record: Record) -> dict[str, Any]:
    trees = [
        {"start": tree["start"], "signals": {k: v[: _FIRST[k]] for k, v in tree["signals"].items() if k in _FIRST}}
        for tree in record.trees
        if tree.get("signals")
    ]
    fields = {name: getattr(record, name) for name in _FIELDS}
    return {**fields, "stats": {name: record.stats[name] for name in _STATS}, "trees": trees}


def header(path: Path) -> Header:
    """Read the first line alone."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return Header(**json.loads(file.readline()))


def read(path: Path) -> RecordedRun:
    """Read a run as kept; texts and tokens are empty."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        first, *lines = map(json.loads, file)
    return RecordedRun(path.parent, Header(**first), [Record(**_LEFT_OUT, **line) for line in lines], [])
