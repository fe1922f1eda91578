"""Records of a run, a JSON object a line, written at once so that a run is useful wherever it is stopped."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARES = {"sound": 1, "exact": 2, "cost": 3, "load": 2}
"""Parts in the order of their worth, and their shares of the time; what one leaves is the others'."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """The records of a folder."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "records.jsonl"

    def write(self, kind: str, part: str, piece: str = "", **values: Any) -> None:
        """Append one: ``part``, ``begin``, ``finding``, ``warning``, ``error``, ``left out`` or ``end``."""
        record = {"kind": kind, "part": part, "piece": piece, "at": round(time.time(), 2), **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")

    def read(self) -> list[Record]:
        """All so far; a line that was cut short is left out."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    @property
    def begun(self) -> set[tuple[str, str]]:
        """Parts and pieces that were begun."""
        return {(r["part"], r["piece"]) for r in self.read() if r["kind"] == "begin"}

    def close_open(self, code: int) -> None:
        """Record that a process ended inside of a piece."""
        ended = {(r["part"], r["piece"]) for r in self.read() if r["kind"] == "end"}
        for part, piece in self.begun - ended:
            line = f"the process ended with code {code}"
            self.write("error", part, piece, error="ProcessEnded", line=line, frames=[])
            self.write("end", part, piece)


def sentence(error: BaseException) -> str:
    """The first line of an error, without paths."""
    first, *_ = str(error).strip().splitlines() or [""]
    return " ".join("<path>" if word.strip("'\"(),:").startswith("/") else word for word in first.split())[:400]


def frames(error: BaseException, most: int = 6) -> list[str]:
    """The innermost frames of an error, each as file, line and function."""
    found = traceback.extract_tb(error.__traceback__)[-most:]
    return [f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno} {f.name}" for f in found]
