"""The share of every task in the stages that do not draw by the tasks' own shares."""

from saccade.pocket.sample import UNSEEN_BY_DRAFTS, WORLD, draw

COMPARING = {
    "difference": 0.3,
    "edit": 0.25,
    "video": 0.3,
    "video-question": 0.12,
    "choice": 0.12,
    "count": 0.2,
    "existence": 0.2,
    "line": 0.1,
    "story": 0.1,
    "vet": 0.08,
    "scene": 0.08,
    "receipt": 0.1,
    "arithmetic": 0.1,
    "knowledge": 0.06,
    "followup": 0.05,
}
"""The mixture of the stage before the last: what is told by looking at two places at once, and words alone."""
REFINING = {
    "chart": 0.25,
    "receipt": 0.6,
    "scene": 0.3,
    "document": 0.3,
    "line": 0.06,
    "caption": 0.06,
    "count": 1.6,
    "existence": 0.25,
    "vet": 0.1,
    "detail": 0.12,
    "followup": 0.08,
    "difference": 0.2,
    "edit": 0.2,
    "story": 0.14,
    "video": 0.9,
    "video-question": 0.2,
    "choice": 0.12,
    "arithmetic": 0.08,
    "knowledge": 0.08,
    "prose": 1.3,
    "report": 1.6,
    "long-video": 1.1,
    "album": 0.5,
}
"""The mixture of the last stage: more of what a few hours teach last, to compare and to count, and all that is long."""
DRAFTING = {
    **{name: task.share for name, task in WORLD.items() if task.share and name not in UNSEEN_BY_DRAFTS},
    "prose": 0.3,
    "report": 0.35,
    "long-video": 0.12,
}
"""What drafts learn from: all but what they are to be surprised by."""


def _of_one_picture(task: str) -> bool:
    sample = draw(0, task)
    return sample.video is None and len(sample.images) == 1


SINGLE_PICTURES = {task: share for task, share in DRAFTING.items() if _of_one_picture(task)}
"""What a draft learns from that never sees a video or several pictures."""
