"""Figures of a report as inline SVG in the page's colours and fonts.

Every distinction by colour is also one by shape, line style or name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from saccade.bench.metrics import Estimate
from saccade.bench.report.tables import ENOUGH, Group, shares_by_depth
from saccade.bench.suites import BASELINE
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    "legend.frameon": False,
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """Open an empty figure of a size in inches, under the report's drawing rules."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SaccadeError("Reports need matplotlib, which is missing: pip install 'saccade[report]'.") from problem
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
    text = re.sub(r"#0101[0-9a-f]{2}\b", lambda match: _VARIABLES.get(match[0], match[0]), text)
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
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


WIDTH, HEIGHT = 4.8, 3.4  # size in inches, legible on a phone
SIZE = 9.0  # of names in a legend, in points
MARKERS = "osD^vPX<>hp"
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing with its title and caption."""

    title: str
    drawing: Markup
    caption: str


def draw(group: Group, prefix: str) -> list[Plot]:
    """Draw all figures that a group has data for; ``prefix`` makes ids unique on the page."""
    looks = _looks(group)
    kinds = {"pareto": _against_quality, "speeds": _speedups, "depth": _by_depth}
    plots = (drawn(group, looks, f"{prefix}-{kind}") for kind, drawn in kinds.items())
    return [plot for plot in plots if plot is not None]


def _looks(group: Group) -> dict[str, dict[str, Any]]:
    """Style of every method in all figures, as arguments of matplotlib."""
    looks: dict[str, dict[str, Any]] = {
        BASELINE: {"label": BASELINE, "color": SERIES[-1], "marker": "*", "mfc": SERIES[-1], "ls": "-"}
    }
    others = [result for method, result in group.results.items() if method != BASELINE]
    for i, result in enumerate(others):
        colour = SERIES[i % (len(SERIES) - 1)]
        looks[result.method] = {
            "label": result.method if result.lossless else f"{result.method} (lossy)",
            "color": colour,
            "marker": MARKERS[i % len(MARKERS)],
            "mfc": colour if result.lossless else PAPER,
            "ls": LINES[i % len(LINES)],
        }
    return looks


def _against_quality(group: Group, looks: dict[str, dict[str, Any]], name: str) -> Plot | None:
    points = [(looks[m], r.speedup, r.retention) for m, r in group.results.items() if r.speedup and r.retention]
    if not points or all(r.lossless for r in group.results.values()):
        return None
    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        pairs = {(x.value, y.value) for _, x, y in points}
        front = sorted(p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs))
        axes.plot(*zip(*front, strict=True), color=INK, lw=1, ls=":", zorder=1, drawstyle="steps-pre")
        axes.set(xlabel="speed-up, end to end", ylabel="score kept (plain decoding = 1)")
        for look, x, y in points:
            style = {**look, "ls": "none", "ms": 11 if look["marker"] == "*" else 8, "mew": 1.6}
            axes.errorbar(x.value, y.value, xerr=_bar(x), yerr=_bar(y), elinewidth=1, zorder=3, **style)
        axes.margins(0.12)
        legend(drawing, [look["label"] for look, _, _ in points])
        words = "; ".join(f"{look['label']}: {x.value:.2f} times, {y.value:.3f}" for look, x, y in points)
        return Plot(
            "Speed against quality",
            inline(drawing, name, f"Speed-up and share of plain decoding's score, by method. {words}."),
            "Right is faster, up is better. The dotted line joins the methods that no other one beats in both (Pareto "
            "front). Hollow marks are lossy methods; bars are 95 % intervals.",
        )


def _bar(estimate: Estimate) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(estimate.value - estimate.low, 0.0)], [max(estimate.high - estimate.value, 0.0)]]


def _speedups(group: Group, looks: dict[str, dict[str, Any]], name: str) -> Plot | None:
    timed = [(m, r.speedup) for m, r in group.results.items() if m != BASELINE and r.lossless and r.speedup]
    if not timed:
        return None
    with figure(WIDTH, 1 + 0.3 * len(timed)) as drawing:
        axes = drawing.subplots()
        timed.sort(key=lambda pair: pair[1].value)  # the first one is drawn at the bottom
        for m, x in timed:
            axes.barh(m, x.value, 0.6, xerr=_bar(x), color=looks[m]["color"], ecolor=INK, capsize=3)
        axes.axvline(1, color=INK, lw=1, ls=":")
        axes.set(xlabel="speed-up, end to end (plain decoding = 1)")
        axes.grid(visible=False, axis="y")
        return Plot(
            "Speed-up of lossless methods",
            inline(drawing, name, "Speed-up by lossless method. " + "; ".join(f"{m}: {x}" for m, x in timed[::-1])),
            "Medians over prompts with 95 % intervals; saccade compare says, prompt by prompt, which are level.",
        )


def _by_depth(group: Group, looks: dict[str, dict[str, Any]], name: str) -> Plot | None:
    known = {m: shares for m, r in group.results.items() if (shares := shares_by_depth(r.reached))}
    if not known:
        return None
    from matplotlib.ticker import MaxNLocator

    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        for method, shares in known.items():
            axes.plot(range(1, len(shares) + 1), shares, lw=1.6, ms=5.5, **looks[method])
        axes.set(xlabel="depth in the draft tree", ylabel="share accepted", ylim=(-0.03, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(drawing, [looks[m]["label"] for m in known], handlelength=3)
        words = "; ".join(
            f"{looks[method]['label']}: " + ", ".join(f"{share:.2f}" for share in shares)
            for method, shares in known.items()
        )
        return Plot(
            "Acceptance by depth",
            inline(drawing, name, f"Share accepted at depth 1, 2 and so on. {words}."),
            "Share of the passes that accepted this depth among those that accepted the one before; depths that "
            f"fewer than {ENOUGH} passes reached are left out.",
        )


def legend(drawing: Figure, names: Sequence[str], **options: Any) -> None:
    """Draw a legend below the axes, in as many columns as fit; a long one makes the figure higher."""
    longest = 0.6 * SIZE * max(map(len, names)) + 5 * SIZE
    columns = max(1, min(3, int(WIDTH * 72 / longest)))
    drawing.set_figheight(max(HEIGHT, 2.4 + 0.19 * -(-len(names) // columns)))  # axes need their part next to long ones
    drawing.legend(loc="outside lower center", ncols=columns, fontsize=SIZE, **options)
