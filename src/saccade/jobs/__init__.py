"""Batch jobs: an answer to every item of a folder or a data set, resumable at any moment.

>>> import saccade
>>> from saccade.jobs import batch_file
>>> vlm = saccade.load("path/to/target", drafter="path/to/drafter")
>>> batch_file(vlm, "photos", "captions.jsonl", prompt="Describe the picture.", max_new_tokens=100)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.jobs.running import batch_file

__all__ = ["batch_file"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from saccade.jobs import running

        return getattr(running, name)
    raise AttributeError(f"module 'saccade.jobs' has no attribute {name!r}")
