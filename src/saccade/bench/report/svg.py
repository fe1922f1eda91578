"""Figures as inline SVG that takes its colours and its font from the page, so that it follows light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PAPER = "#010101", "#010102", "#010103"
"""Stand for text, grid lines and background; the page says what they look like."""
SERIES = tuple(f"#0101{index:02x}" for index in range(0x10, 0x18))
"""Stand for the colours of the series; the last one is the baseline's."""
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
    """An empty figure of that many inches, under the report's drawing rules.

    Raises:
        SaccadeError: matplotlib is missing.
    """
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
    """The figure as an ``<svg>`` element for the page.

    Args:
        drawing: to be rendered.
        name: unique on the page; every id inside starts with it.
        description: what a screen reader says instead.
    """
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\bfont: ([\d.]+px) [^;\"]+", r"font: \1 var(--sans)", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"#0101[0-9a-f]{2}\b", lambda found: _VARIABLES.get(found[0], found[0]), text)
    text = re.sub(
        r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text
    )
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None
    opening = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view[1]}" role="img"'
    text = re.sub(r"<svg[^>]*>", lambda _: f'{opening} aria-label="{escape(description)}">', text, count=1)
    return Markup(re.sub(r"\n\s*", "\n", text))
