"""The pocket world: generated pictures with exact ground truth, and small VLMs trained to talk about them.

Importing this needs Pillow and NumPy only.
"""

from saccade.pocket import chart, receipt, scene  # noqa: F401  (they register their tasks)
from saccade.pocket.folders import draft_path, target_path
from saccade.pocket.sample import TASKS, Sample, Task, draw, score

__all__ = ["TASKS", "Sample", "Task", "draft_path", "draw", "score", "target_path"]
