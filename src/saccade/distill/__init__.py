"""Training data for drafters: the target's own answers.

>>> import saccade
>>> from saccade.distill import distill, read_answers
>>> vlm = saccade.load("path/to/target", method="plain")
>>> distill(vlm, "prompts.jsonl", "answers", media_root="images", max_new_tokens=512)
>>> read_answers("answers")[0].answer_ids
"""

from saccade.distill.folder import read_answers
from saccade.distill.run import distill

__all__ = ["distill", "read_answers"]
