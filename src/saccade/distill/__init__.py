"""Training data for drafters: the target's own answers.

>>> import saccade
>>> from saccade.distill import distill, read_answers
>>> vlm = saccade.load("path/to/target", method="plain")
>>> distill(vlm, "prompts.jsonl", "answers", media_root="images", max_new_tokens=512)
>>> read_answers("answers")[0].answer_ids
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.distill.folder import Answered, Answers, read_answers
    from saccade.distill.options import Options
    from saccade.distill.run import Preview, Progress, Report, distill, preview

__all__ = [
    "Answered",
    "Answers",
    "Options",
    "Preview",
    "Progress",
    "Report",
    "distill",
    "preview",
    "read_answers",
]

_HOME = {
    "Options": "options",
    "Answered": "folder",
    "Answers": "folder",
    "read_answers": "folder",
    "Preview": "run",
    "Progress": "run",
    "Report": "run",
    "distill": "run",
    "preview": "run",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"saccade.distill.{_HOME[name]}"), name)
    raise AttributeError(f"module 'saccade.distill' has no attribute {name!r}")
