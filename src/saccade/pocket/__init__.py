"""The pocket world: generated pictures and videos with exact ground truth, and small VLMs trained on them.

Importing this needs Pillow and NumPy only.
"""

# Tasks register when imported, and the order of the shipped pair's is part of what a seed means in training.
from saccade.pocket import chart, receipt, scene  # noqa: F401

# isort: split
from saccade.pocket import (  # noqa: F401
    arithmetic,
    caption,
    counting,
    detail,
    document,
    existence,
    followup,
    knowledge,
    line,
    story,
    two_images,
    vet,
    video,
    video_question,
)

# isort: split
from saccade.pocket import album, long_video, prose, report  # noqa: F401

# isort: split
from saccade.pocket.caption import CAPTION_PROMPT
from saccade.pocket.folders import draft_path, head_path, target_path
from saccade.pocket.sample import WORLD, Sample, Task, draw, score

__all__ = [
    "CAPTION_PROMPT",
    "WORLD",
    "Sample",
    "Task",
    "draft_path",
    "draw",
    "head_path",
    "score",
    "target_path",
]
