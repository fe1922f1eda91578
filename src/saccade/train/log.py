"""Log of a run: JSON lines, TensorBoard where it is installed, and a line of progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from saccade.errors import TrainingError
from saccade.files import write_file, writing
from saccade.formats import duration


class Log:
    """The log of a run, continued from a step.

    Args:
        folder: of ``log.jsonl`` and of TensorBoard's events.
        step: steps done; lines of later steps, which will run again, are removed.
        steps: of the whole run.
        say: takes the line of progress.
        again: a value that will be measured again after ``step`` steps; its lines there are removed, too.
    """

    def __init__(
        self, folder: Path, step: int, steps: int, say: Callable[[str], None], again: str | None = None
    ) -> None:
        self._path, self._steps, self._say = folder / "log.jsonl", steps, say
        self._first, self._begun = step, time.monotonic()
        kept = [
            line
            for line in _lines(self._path)
            if _step_of(line) <= step and not (_step_of(line) == step and again in json.loads(line))
        ]
        write_file(self._path, "".join(line + "\n" for line in kept), error=TrainingError)
        self._board: Any = None
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record numbers after a step.

        Raises:
            TrainingError: the disk is full.
        """
        with writing(self._path, TrainingError), self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                numbers = value if isinstance(value, list) else [value]
                for place, number in enumerate(numbers):
                    if isinstance(number, (int, float)):
                        self._board.add_scalar(name + (f"/{place}" if isinstance(value, list) else ""), number, step)

    def progress(self, step: int, words: str) -> None:
        """One line with the time left."""
        done = step - self._first
        left = (time.monotonic() - self._begun) / max(done, 1) * (self._steps - step)
        self._say(f"step {step} of {self._steps}, {words}, {duration(left)} left")

    def close(self) -> None:
        """Flush to disk."""
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut short by a kill
