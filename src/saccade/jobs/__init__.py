"""Batch jobs: an answer to every item of a folder or a data set, resumable at any moment.

>>> import saccade
>>> from saccade.jobs import batch_file
>>> vlm = saccade.load("path/to/target", drafter="path/to/drafter")
>>> batch_file(vlm, "photos", "captions.jsonl", prompt="Describe the picture.", max_new_tokens=100)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.jobs.job import Job, Survey, preview
    from saccade.jobs.running import Attempt, Progress, Report, batch_file, run

__all__ = ["Attempt", "Job", "Progress", "Report", "Survey", "batch_file", "preview", "run"]

_HOME = {
    "Attempt": "running",
    "Job": "job",
    "Survey": "job",
    "preview": "job",
    "Progress": "running",
    "Report": "running",
    "batch_file": "running",
    "run": "running",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"saccade.jobs.{_HOME[name]}"), name)
    raise AttributeError(f"module 'saccade.jobs' has no attribute {name!r}")
