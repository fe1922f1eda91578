"""The whole pocket world: the tasks of the package, and those that train and measure its models.

Importing this adds the further tasks to `saccade.pocket.WORLD`; `python -m tools.pocket.world COMMAND` runs any command
of `saccade` with all of them.
"""

from saccade.pocket.sample import WORLD
from saccade.pocket.tasks import chart, line, receipt, scene, short_video
from tools.pocket.world import (
    album,
    arithmetic,
    caption,
    count,
    detail,
    document,
    existence,
    followup,
    knowledge,
    long_video,
    prose,
    reports,
    story,
    two_images,
    vet,
    video_question,
)

# Mixtures are drawn by position, so the order decides which samples a training seed yields: new tasks go last.
_TASKS = {
    "chart": chart.TASK,
    "receipt": receipt.TASK,
    "scene": scene.TASK,
    "arithmetic": arithmetic.TASK,
    "document": document.TASK,
    "line": line.TASK,
    "caption": caption.TASK,
    "count": count.TASK,
    "detail": detail.TASK,
    "existence": existence.TASK,
    "followup": followup.TASK,
    "knowledge": knowledge.TASK,
    "story": story.TASK,
    "difference": two_images.DIFFERENCE,
    "edit": two_images.EDIT,
    "vet": vet.TASK,
    "video": short_video.TASK,
    "video-question": video_question.OPEN,
    "choice": video_question.CHOICE,
    "album": album.TASK,
    "long-video": long_video.TASK,
    "prose": prose.TASK,
    "report": reports.TASK,
}
WORLD.clear()
WORLD.update(_TASKS)
