"""Checkpoints of a run, and the identity of its target."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from saccade.errors import TrainingError
from saccade.files import recover, write_file, write_folder
from saccade.target_model.adapter import Target
from saccade.target_model.sharding import whole
from saccade.wording import differences

_VALUES = 64
_KEPT = 2  # newest checkpoints that stay


def identity(target: Target) -> dict[str, Any]:
    """Return class, size, dtype and a digest over some values of every weight.

    The processes of a sharded target must all ask for it together; it is that of the whole target.
    """
    digest = hashlib.sha256()
    for name, weight in target.model.named_parameters():
        digest.update(name.encode())
        if weight.device.type != "meta":  # offloaded weights are elsewhere
            flat = whole(weight.detach()).flatten()
            some = flat[:: max(flat.numel() // _VALUES, 1)][:_VALUES]
            digest.update(some.float().cpu().numpy().tobytes())
    return {
        "class": type(target.model).__name__,
        "layers": len(target.layers),
        "hidden_size": target.text_config.hidden_size,
        "vocabulary": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": digest.hexdigest()[:16],
    }


_STATE, _ABOUT, _LATER = "state.pt", "checkpoint.json", "later.json"


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder of checkpoints holds any, damaged or not."""
    return bool(_found(folder))


def _found(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def newest(folder: Path, most: int) -> Path | None:
    """Return the newest complete checkpoint of at most so many steps in a folder; None if there is none."""
    return next((place for place in reversed(_until(_found(folder), most)) if _read(place)[0] is not None), None)


def _until(places: list[Path], most: int) -> list[Path]:
    return [place for place in places if int(place.name.removeprefix("step-")) <= most]


def trained(place: str | Path | None) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return facts and weights of the drafter in a checkpoint; None for another folder."""
    if place is None or not (Path(place) / _ABOUT).is_file():
        return None
    about, content = _read(Path(place))
    if about is None:
        raise TrainingError(f"The checkpoint {place} is damaged; begin with an earlier one, or with best/ or head/.")
    weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)["head"]
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise TrainingError(
                f"The weight {name} of the checkpoint {place} is not finite; begin with an earlier one, or with best/."
            )
    return {key: value for key, value in about["run"]["head"].items() if key != "from"}, weights


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._about = json.loads(json.dumps(about))

    def save(self, step: int, state: Mapping[str, Any], sound: int) -> None:
        """Write the state after ``step`` steps, random states included, and delete old checkpoints.

        The last one of at most ``sound`` steps stays.
        """
        buffer = io.BytesIO()
        torch.save({**state, "random": _random_states()}, buffer)
        content = buffer.getvalue()
        about = {"step": step, "sha256": hashlib.sha256(content).hexdigest(), "run": self._about}

        def write(part: Path) -> None:
            (part / _STATE).write_bytes(content)
            (part / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")

        write_folder(self._folder / f"step-{step:08d}", write, error=TrainingError)
        found = _found(self._folder)
        kept = {*found[-_KEPT:], *_until(found, sound)[-1:]}
        for old in (place for place in found if place not in kept):
            shutil.rmtree(old)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Replace entries of the state after ``step`` steps, if they exist, by later JSON values."""
        place = self._folder / f"step-{step:08d}"
        if place.is_dir():
            write_file(place / _LATER, json.dumps(values) + "\n", error=TrainingError)

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Load the newest complete checkpoint and restore the random states."""
        for left in self._folder.glob(".step-*"):
            recover(left.with_name(left.name[1:].rpartition(".")[0]))
        found = _found(self._folder)
        for place in reversed(found):
            about, content = _read(place)
            if about is None:
                continue
            for key, ours, theirs in differences(self._about, about["run"]):
                raise TrainingError(
                    f"The checkpoint {place} is of another run: its {key} is {theirs!r}, here it is {ours!r}; give "
                    "what it was started with, or another --out folder."
                )
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            _set_random_states(state.pop("random"))
            with suppress(OSError, ValueError):
                state |= json.loads((place / _LATER).read_text())
            return about["step"], state
        if found:
            raise TrainingError(
                f"All checkpoints in {self._folder} are damaged; delete them, or start again in another folder."
            )
        return None


def _read(place: Path) -> tuple[dict[str, Any] | None, bytes]:
    try:
        about = json.loads((place / _ABOUT).read_text())
        content = (place / _STATE).read_bytes()
        whole = hashlib.sha256(content).hexdigest() == about["sha256"]
    except (OSError, ValueError, KeyError):
        return None, b""
    return (about, content) if whole else (None, b"")


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random states of a checkpoint after the block."""
    states = _random_states()
    yield
    _set_random_states(states)


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
