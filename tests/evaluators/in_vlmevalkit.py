"""Run VLMEvalKit's own run.py with Saccade's launcher, in an environment without the packages of its other models.

VLMEvalKit imports all its models and data sets at once, and with them torchvision, decord, cv2 and others, which
neither its loop nor Saccade's model uses. Modules that are not installed get a stand-in here, for imports by VLMEvalKit
alone.

Usage: python in_vlmevalkit.py RUN.PY [ARGUMENTS OF RUN.PY]
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

NAMES = ("torchvision", "decord", "cv2", "accelerate", "qwen_vl_utils")


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Anything):
    """A class of every name, and all of its attributes."""


class StandIn(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for imports by VLMEvalKit; it comes after all other finders."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NAMES or _importer() not in ("vlmeval", *NAMES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _importer() -> str:
    """Package whose code asks for the import."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "importlib":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]


if __name__ == "__main__":
    from transformers import AutoImageProcessor, AutoModel, AutoProcessor  # noqa: F401  # before torchvision seems there

    from saccade.evaluators import vlmevalkit

    sys.meta_path.append(Finder())
    vlmevalkit.main(sys.argv[1:])
