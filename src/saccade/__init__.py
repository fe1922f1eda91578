"""Speculative decoding for vision-language models: faster, with the same answers.

>>> import saccade
>>> vlm = saccade.load("path/to/target", drafter="path/to/drafter")
>>> print(vlm.generate("What is in this picture?", images=["photo.jpg"]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.errors import InputError, MethodError, ModelError, SaccadeError, SaccadeWarning

if TYPE_CHECKING:
    from saccade.chat import Chat
    from saccade.output import Output, Stats
    from saccade.stream import Stream
    from saccade.vlm import VLM, load

__version__ = "0.1.0"
__all__ = [
    "VLM",
    "Chat",
    "InputError",
    "MethodError",
    "ModelError",
    "Output",
    "SaccadeError",
    "SaccadeWarning",
    "Stats",
    "Stream",
    "load",
]

_HOME = {
    "VLM": "vlm",
    "Chat": "chat",
    "Stream": "stream",
    "load": "vlm",
    "Output": "output",
    "Stats": "output",
}
_MODULES = ("grammar", "processors")


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them."""
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"saccade.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"saccade.{name}")
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")
