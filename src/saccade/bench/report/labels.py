"""Names beside points, placed so that they hide neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from saccade.bench.statistics import Estimate

Box = tuple[float, float, float, float]
SIZE = 9.0
"""Of the names, in points."""
_PLACES = [
    (dx * far, dy * far, anchor)
    for far in (1.0, 1.8, 2.8)
    for dx, dy, anchor in (
        (7, 8, "left"),
        (7, -8, "left"),
        (-7, 8, "right"),
        (-7, -8, "right"),
        (0, 11, "center"),
        (0, -11, "center"),
        (9, 0, "left"),
        (-9, 0, "right"),
    )
]
"""Offsets in points from the point to its name, the best first."""


def place(axes: Axes, points: Sequence[tuple[Estimate, Estimate]], names: Sequence[str]) -> None:
    """Write ``names`` beside ``points`` (x and y with their bars), each where it covers least.

    Widths are estimated (0.6 em per character): the browser's font is not the one that is known here.
    """
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # settles the layout, and with it where the points are
    scale = 72 / figure.dpi
    frame = axes.get_window_extent()
    edge = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)

    def spot(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across) * scale, float(up) * scale

    spots = [spot(x.value, y.value) for x, y in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    for x, y in points:
        across, up = spot(x.value, y.value)
        if x.low is not None and x.high is not None:
            taken.append((spot(x.low, y.value)[0], up - 1, spot(x.high, y.value)[0], up + 1))
        if y.low is not None and y.high is not None:
            taken.append((across - 1, spot(x.value, y.low)[1], across + 1, spot(x.value, y.high)[1]))
    for (across, up), (x, y), name in zip(spots, points, names, strict=True):
        boxes = [_box(across + dx, up + dy, name, anchor) for dx, dy, anchor in _PLACES]
        costs = [
            _outside(box, edge) * 3 + sum(_overlap(box, other) for other in taken) + 2 * rank
            for rank, box in enumerate(boxes)
        ]
        best = min(range(len(boxes)), key=costs.__getitem__)
        dx, dy, anchor = _PLACES[best]
        axes.annotate(
            name,
            (x.value, y.value),
            (dx, dy),
            textcoords="offset points",
            ha=anchor,
            va="center",
            fontsize=SIZE,
            annotation_clip=False,
        )
        taken.append(boxes[best])


def _box(x: float, y: float, name: str, anchor: str) -> Box:
    width, height = 0.6 * SIZE * len(name), 1.2 * SIZE
    left = {"left": x, "right": x - width, "center": x - width / 2}[anchor]
    return left, y - height / 2, left + width, y + height / 2


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box, frame: Box) -> float:
    area = (box[2] - box[0]) * (box[3] - box[1])
    return area - _overlap(box, frame)
