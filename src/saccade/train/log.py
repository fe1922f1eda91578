"""Log of a run: JSON lines, a line of progress, TensorBoard where it is installed, and Weights & Biases by request."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from saccade.errors import TrainingError
from saccade.files import write_file, writing
from saccade.wording import duration


class Log:
    """The log of a run, continued from a step."""

    def __init__(
        self,
        folder: Path,
        step: int,
        steps: int,
        say: Callable[[str], None],
        again: str | None = None,  # number that the step writes once more
        wandb: str | None = None,  # project of Weights & Biases
        about: Mapping[str, Any] | None = None,  # the recipe
    ) -> None:
        self._path, self._steps, self._say = folder / "log.jsonl", steps, say
        self._first, self._begun = step, time.monotonic()
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _is_before(line, step, again)]
        write_file(self._path, "".join(line + "\n" for line in kept), error=TrainingError)
        self._events: Any = None
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._wandb = None if wandb is None else _wandb_run(wandb, folder, about or {})

    def write(self, step: int, values: dict[str, Any]) -> None:
        with writing(self._path, TrainingError), self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        numbers = {}
        for name, value in values.items():
            places = {f"/{place}": v for place, v in enumerate(value)} if isinstance(value, list) else {"": value}
            for place, number in places.items():
                if isinstance(number, (int, float)):
                    numbers[name + place] = number
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def progress(self, step: int, words: str) -> None:
        """One line with the time left."""
        done = step - self._first
        left = (time.monotonic() - self._begun) / max(done, 1) * (self._steps - step)
        self._say(f"step {step} of {self._steps}, {words}, {duration(left)} left")

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_wandb() -> None:
    """Raise `TrainingError` where Weights & Biases is not installed."""
    if not find_spec("wandb"):
        raise TrainingError("--wandb needs the package wandb; install it with: pip install saccade[wandb]")


def _wandb_run(project: str, folder: Path, about: Mapping[str, Any]) -> Any:
    """One run of a project, continued by its id in ``wandb-id``."""
    import wandb  # type: ignore[import-not-found, unused-ignore]

    mark = folder / "wandb-id"
    if not mark.exists():
        write_file(mark, secrets.token_hex(4), error=TrainingError)
    name = mark.read_text().strip()
    try:
        return wandb.init(
            project=project, id=name, name=folder.name, dir=str(folder), config=dict(about), resume="allow"
        )
    except Exception as problem:  # of many kinds: no login, no network, a name that is not allowed
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise TrainingError(
            f"Weights & Biases does not take the run ({first}); log in with `wandb login`, set WANDB_MODE=offline, or "
            "leave --wandb out."
        ) from problem


def _is_before(line: str, step: int, again: str | None) -> bool:
    try:
        values = json.loads(line)
        number = float(values["step"])
    except (ValueError, KeyError, TypeError):
        return False  # cut short by a kill
    return number < step or (number == step and again not in values)
