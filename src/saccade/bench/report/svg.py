"""Inline SVG in the page's colours and fonts, with labels placed clear of each other."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from saccade.bench.statistics import Estimate

INK, FAINT, PAPER = "#010101", "#010102", "#010103"
"""Placeholders for the page's colours of text, grid lines and background."""
SERIES = tuple(f"#0101{index:02x}" for index in range(0x10, 0x18))
"""Placeholders for the page's colours of the series; the last one is the baseline's."""
_VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--grid)",
    PAPER: "var(--panel)",
    **{c: f"var(--s{i})" for i, c in enumerate(SERIES)},
}
_RULES: dict[Any, Any] = {
    "text.parse_math": False,  # a method may well be called $1
    "svg.fonttype": "none",
    "svg.hashsalt": "saccade",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """Open an empty figure of a size in inches, under the report's drawing rules."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SaccadeError(
            "Reports need matplotlib, which is not installed: pip install 'saccade[report]'."
        ) from problem
    with matplotlib.rc_context(_RULES):
        yield Figure(figsize=(width, height), layout="constrained")


def inline(drawing: Figure, name: str, description: str) -> Markup:
    """Render the figure as an ``<svg>`` element of the page."""
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\bfont: ([\d.]+px) [^;\"]+", r"font: \1 var(--sans)", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"#0101[0-9a-f]{2}\b", lambda found: _VARIABLES.get(found[0], found[0]), text)
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None
    opening = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view[1]}" role="img"'
    text = re.sub(r"<svg[^>]*>", lambda _: f'{opening} aria-label="{escape(description)}">', text, count=1)
    return Markup(re.sub(r"\n\s*", "\n", text))


def standalone(drawing: Markup) -> str:
    """Turn a rendered figure into the text of a file, with the page's colours for light and dark screens."""
    css = (files("saccade.bench.report") / "assets" / "page.css").read_text("utf-8").partition("\n* {")[0]
    opening = '<svg xmlns="http://www.w3.org/2000/svg" '
    head, bracket, rest = str(drawing).removeprefix("<svg ").partition(">")
    return f"{opening}{head}{bracket}\n<style>{css}</style>{rest}\n"


Box = tuple[float, float, float, float]
SIZE = 9.0
"""Size of the names in points."""
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
    """Write ``names`` beside ``points`` (x and y with their bars), each in the place of least overlap.

    Widths are estimated (0.6 em per character), because the browser's font is unknown.
    """
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # fixes the layout and the places of the points
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
