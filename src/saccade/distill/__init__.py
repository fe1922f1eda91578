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
    from saccade.distill.folder import read_answers
    from saccade.distill.run import distill

__all__ = ["distill", "read_answers"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"saccade.distill.{'run' if name == 'distill' else 'folder'}"), name)
    raise AttributeError(f"module 'saccade.distill' has no attribute {name!r}")
