"""Presets by a GPU's memory: settings of training and distillation, and the rates that forecasts assume."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from saccade.errors import InputError
from saccade.formats import nearest
from saccade.typed import make

CONTEXT = 0.6e9
"""Bytes that a CUDA process takes besides its tensors; an assumption."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for one GPU."""

    name: str  # as in `names`
    gpu: str  # name of the GPU whose data sheet gives the rates
    memory: int  # in GiB
    flops: float  # floating-point operations per second in bfloat16
    bandwidth: float  # bytes per second of its memory
    used: float  # share of both rates that a run is assumed to reach
    distill: Mapping[str, Any]  # options of `saccade.distill.Options`
    train: Mapping[str, Any]  # settings of every recipe, and tables of further ones by kind

    @property
    def bytes(self) -> float:
        """Bytes of memory for tensors."""
        return self.memory * 2**30 - CONTEXT

    def training(self, kind: str) -> dict[str, Any]:
        """Return the settings of a recipe by its kind, named as for `saccade.train.recipe.Recipe.with_settings`."""
        common = {name: value for name, value in self.train.items() if not isinstance(value, Mapping)}
        return {**common, **self.train.get(kind, {})}

    def seconds(self, flops: float, read: float = 0.0) -> float:
        """Seconds of some work: of its arithmetic or of reading its bytes, whichever takes longer."""
        return max(flops / self.flops, read / self.bandwidth) / self.used

    def fits(self, needed: float) -> str:
        """Compare bytes with the memory, in words."""
        there = f"{needed / 1e9:.1f} of {self.bytes / 1e9:.1f} GB"
        return f"{there}, it fits" if needed <= self.bytes else f"{there}, IT DOES NOT FIT"

    def __str__(self) -> str:
        return (
            f"{self.name}: one {self.gpu}, {self.memory} GiB, {self.used:.0%} of {self.flops / 1e12:.0f} TFLOP/s and "
            f"{self.bandwidth / 1e9:.0f} GB/s; computed, nothing was run"
        )


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((files("saccade.sizing") / "presets.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Names of all presets."""
    return list(_table())


def preset(name: str) -> Preset:
    """Return a preset."""
    if name not in _table():
        raise InputError(f"There is no preset {name!r}; {nearest(name, names())}")
    return make(Preset, {"name": name, **_table()[name]}, "presets.toml", error=InputError)
