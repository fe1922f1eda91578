"""Speculative decoding for vision-language models: faster, with the same answers.

>>> import saccade
>>> from saccade.pocket import draw
>>> vlm = saccade.load("pocket")  # the built-in pair; else saccade.load("your/target", drafter="your/drafter")
>>> vlm.generate("What does this chart show?", images=[draw(1, "chart").image], max_new_tokens=9).text
'Four bars. Orange comes first at six.'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.errors import InputError as InputError
from saccade.errors import MethodError as MethodError
from saccade.errors import ModelError as ModelError
from saccade.errors import SaccadeError as SaccadeError
from saccade.errors import SaccadeWarning as SaccadeWarning

if TYPE_CHECKING:
    from saccade.chat import Chat
    from saccade.output import Output, Stats
    from saccade.stream import Stream
    from saccade.vlm import VLM, load

__version__ = "0.1.0"
__all__ = ["VLM", "Chat", "Output", "Stats", "Stream", "load"]

_HOME = {"VLM": "vlm", "Chat": "chat", "Stream": "stream", "load": "vlm", "Output": "output", "Stats": "output"}
_MODULES = ("grammar", "hf", "pocket", "processors")


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them."""
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"saccade.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"saccade.{name}")
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__", "__doc__"]
