"""The whole pocket world: the tasks of the package, and those that train and measure its models.

Importing this adds the further tasks to `saccade.pocket.WORLD`; `python -m tools.pocket.world COMMAND` runs any command
of `saccade` with all of them.
"""

from saccade.pocket import film
from saccade.pocket.sample import WORLD
from saccade.pocket.tasks import chart, line, receipt, scene
from tools.pocket.world import changes, pictures, reasoning, scenes, videos
from tools.pocket.world.reasoning import FIRST_TASKS

__all__ = ["FIRST_TASKS"]

# Mixtures are drawn by position, so the order decides which samples a training seed yields: new tasks go last.
_TASKS = {
    "chart": chart.TASK,
    "receipt": receipt.TASK,
    "scene": scene.TASK,
    "arithmetic": reasoning.ARITHMETIC,
    "document": pictures.DOCUMENT,
    "line": line.TASK,
    "caption": pictures.CAPTION,
    "count": scenes.COUNT,
    "detail": scenes.DETAIL,
    "existence": scenes.EXISTENCE,
    "followup": reasoning.FOLLOWUP,
    "knowledge": reasoning.KNOWLEDGE,
    "story": changes.STORY,
    "difference": changes.DIFFERENCE,
    "edit": changes.EDIT,
    "vet": reasoning.VET,
    "video": film.TASK,
    "video-question": videos.OPEN,
    "choice": videos.CHOICE,
    "album": pictures.ALBUM,
    "long-video": videos.LONG,
    "prose": scenes.PROSE,
    "report": pictures.REPORT,
}
WORLD.clear()
WORLD.update(_TASKS)
