"""Tasks of the pocket world that come with the package, registered here in their order.

The repository's tools hold the further ones, which train and measure the models (`tools.pocket.world`).
"""

from saccade.pocket.sample import register
from saccade.pocket.tasks import chart, line, receipt, scene, short_video

for _name, _task in {
    "chart": chart.TASK,
    "receipt": receipt.TASK,
    "scene": scene.TASK,
    "line": line.TASK,
    "video": short_video.TASK,
}.items():
    register(_name, _task)
