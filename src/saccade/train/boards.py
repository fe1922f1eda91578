"""Boards that a run's numbers are also sent to: TensorBoard where it is installed, Weights & Biases by request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from saccade.errors import TrainingError
from saccade.files import write_file


class Board(Protocol):
    """A place for numbers by name and step."""

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record numbers after a step."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class TensorBoard:
    """TensorBoard's events in a folder."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run of a project of Weights & Biases, continued by its id in ``wandb-id``."""

    def __init__(self, project: str, folder: Path, about: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        mark = folder / "wandb-id"
        if not mark.exists():
            write_file(mark, secrets.token_hex(4), error=TrainingError)
        name = mark.read_text().strip()
        try:
            self._run: Any = wandb.init(
                project=project, id=name, name=folder.name, dir=str(folder), config=dict(about), resume="allow"
            )
        except Exception as problem:  # of many kinds: no login, no network, a name that is not allowed
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
            raise TrainingError(
                f"Weights & Biases does not take the run ({first}); log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave --wandb out."
            ) from problem

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def check_wandb() -> None:
    """Raise `TrainingError` where Weights & Biases is not installed."""
    if not find_spec("wandb"):
        raise TrainingError("--wandb needs the package wandb; install it with: pip install saccade[wandb]")


def boards(folder: Path, step: int, project: str | None, about: Mapping[str, Any]) -> list[Board]:
    """Return the boards of a run, continued after ``step`` steps."""
    found: list[Board] = []
    if find_spec("tensorboard"):
        found.append(TensorBoard(folder / "tensorboard", step))
    if project is not None:
        check_wandb()
        found.append(WeightsAndBiases(project, folder, about))
    return found
