"""Tasks of the pocket world, one module each, registered here in their order."""

from saccade.pocket.sample import register
from saccade.pocket.tasks import (
    album,
    arithmetic,
    caption,
    chart,
    count,
    detail,
    document,
    existence,
    followup,
    knowledge,
    line,
    long_video,
    prose,
    receipt,
    reports,
    scene,
    short_video,
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
for _name, _task in _TASKS.items():
    register(_name, _task)
