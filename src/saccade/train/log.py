"""Log of a run: JSON lines, boards, and a line of progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saccade.errors import TrainingError
from saccade.files import write_file, writing
from saccade.train.boards import Board
from saccade.wording import duration


class Log:
    """The log of a run, continued from a step."""

    def __init__(
        self,
        folder: Path,
        step: int,
        steps: int,
        say: Callable[[str], None],
        again: str | None = None,
        boards: Sequence[Board] = (),
    ) -> None:
        self._path, self._steps, self._say = folder / "log.jsonl", steps, say
        self._first, self._begun = step, time.monotonic()
        kept = [
            line
            for line in _lines(self._path)
            if _step_of(line) <= step and not (_step_of(line) == step and again in json.loads(line))
        ]
        write_file(self._path, "".join(line + "\n" for line in kept), error=TrainingError)
        self._boards = boards

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record numbers after a step."""
        with writing(self._path, TrainingError), self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        numbers = {}
        for name, value in values.items():
            for place, number in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(number, (int, float)):
                    numbers[name + (f"/{place}" if isinstance(value, list) else "")] = number
        for board in self._boards:
            board.add(step, numbers)

    def progress(self, step: int, words: str) -> None:
        """One line with the time left."""
        done = step - self._first
        left = (time.monotonic() - self._begun) / max(done, 1) * (self._steps - step)
        self._say(f"step {step} of {self._steps}, {words}, {duration(left)} left")

    def close(self) -> None:
        """Flush to disk."""
        for board in self._boards:
            board.close()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut short by a kill
