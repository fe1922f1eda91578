"""Tasks of the pocket world that come with the package, in their order; `tools.pocket.world` has further ones."""

from saccade.pocket import film
from saccade.pocket.sample import WORLD
from saccade.pocket.tasks import chart, line, receipt, scene

WORLD |= {"chart": chart.TASK, "receipt": receipt.TASK, "scene": scene.TASK, "line": line.TASK, "video": film.TASK}
