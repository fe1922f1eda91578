"""Batch jobs: an answer to every item of a folder or a data set, resumable at any moment.

>>> import saccade
>>> from saccade.jobs import batch_file
>>> vlm = saccade.load("path/to/target", drafter="path/to/drafter")
>>> batch_file(vlm, "photos", "captions.jsonl", prompt="Describe the picture.", max_new_tokens=100)
"""

from saccade.jobs.running import batch_file

__all__ = ["batch_file"]
