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
    from matplotlib.axes import Axes
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


WIDTH, HEIGHT = 4.8, 3.4
"""Size in inches, legible on a phone."""
SIZE = 9.0
"""Of names in a legend, in points."""
MARKERS = "osD^vPX<>hp"
LINES = ("-", "--", "-.", ":")
_HATCHES = ("|||", "+++", "---", "///", "", "xxx")
_BARS = "bars are 95 % intervals"


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing with its title and caption."""

    title: str
    drawing: Markup
    caption: str


def draw(group: Group, prefix: str) -> list[Plot]:
    """Draw all figures that a group has data for; ``prefix`` makes ids unique on the page."""
    looks = _looks(group)
    plots = [
        _against_quality(group, looks, f"{prefix}-pareto"),
        _against_tau(group, looks, f"{prefix}-tau"),
        _by_depth(group, looks, f"{prefix}-depth"),
        _breakdown(group, looks, f"{prefix}-time"),
    ]
    return [plot for plot in plots if plot is not None]


@dataclass(frozen=True, slots=True)
class _Look:
    """Style of one method in every figure."""

    name: str
    colour: str
    marker: str
    line: str
    filled: bool

    @property
    def face(self) -> str:
        return self.colour if self.filled else PAPER


def _looks(group: Group) -> dict[str, _Look]:
    looks: dict[str, _Look] = {}
    for method, result in group.results.items():
        if method == BASELINE:
            looks[method] = _Look(method, SERIES[-1], "*", "-", True)
            continue
        i = len(looks) - (BASELINE in looks)
        looks[method] = _Look(
            method if result.lossless else f"{method} (lossy)",
            SERIES[i % (len(SERIES) - 1)],
            MARKERS[i % len(MARKERS)],
            LINES[i % len(LINES)],
            result.lossless,
        )
    return looks


Point = tuple[_Look, Estimate, Estimate]


def _against_quality(group: Group, looks: dict[str, _Look], name: str) -> Plot | None:
    points = [(looks[m], r.speedup, r.retention) for m, r in group.results.items() if r.speedup and r.retention]
    if not points:
        return None
    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        pairs = {(x.value, y.value) for _, x, y in points}
        front = sorted(p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs))
        axes.plot(*zip(*front, strict=True), color=INK, lw=1, ls=":", zorder=1, drawstyle="steps-pre")
        axes.set(xlabel="speed-up, end to end", ylabel="score kept (plain decoding = 1)")
        _scatter(axes, points)
        legend(drawing, [look.name for look, _, _ in points])
        words = "; ".join(f"{look.name}: {x.value:.2f} times, {y.value:.3f}" for look, x, y in points)
        return Plot(
            "Speed against quality",
            inline(drawing, name, f"Speed-up and share of plain decoding's score, by method. {words}."),
            "Right is faster, up is better. The dotted line joins the methods that no other one beats in both (Pareto "
            f"front). Hollow marks are lossy methods; {_BARS}.",
        )


def _against_tau(group: Group, looks: dict[str, _Look], name: str) -> Plot | None:
    points = [
        (looks[m], r.block_efficiency, r.decode_speedup)
        for m, r in group.results.items()
        if r.block_efficiency and r.decode_speedup
    ]
    if not points:
        return None
    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        top = max(x.value for _, x, _ in points) * 1.05
        axes.plot([1, top], [1, top], color=INK, lw=1, ls=":", zorder=1)
        axes.set(xlabel="block efficiency (tokens per target pass)", ylabel="speed-up, decoding only")
        _scatter(axes, points)
        legend(drawing, [look.name for look, _, _ in points])
        words = "; ".join(f"{look.name}: {x.value:.2f} tokens per pass, {y.value:.2f} times" for look, x, y in points)
        return Plot(
            "Tau against speed",
            inline(drawing, name, f"Block efficiency and decoding speed-up by method. {words}."),
            "On the dotted line drafting costs nothing, and a wide pass no more than a narrow one; the distance "
            f"below it is the method's cost. Hollow marks are lossy methods; {_BARS}.",
        )


def _scatter(axes: Axes, points: Sequence[Point]) -> None:
    for look, x, y in points:
        axes.errorbar(
            x.value,
            y.value,
            xerr=_bar(x),
            yerr=_bar(y),
            color=look.colour,
            marker=look.marker,
            mfc=look.face,
            ms=11 if look.marker == "*" else 8,
            mew=1.6,
            elinewidth=1,
            zorder=3,
            ls="none",
            label=look.name,
        )
    axes.margins(0.12)


def _bar(estimate: Estimate) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(estimate.value - estimate.low, 0.0)], [max(estimate.high - estimate.value, 0.0)]]


def _by_depth(group: Group, looks: dict[str, _Look], name: str) -> Plot | None:
    known = {m: shares for m, r in group.results.items() if (shares := shares_by_depth(r.reached))}
    if not known:
        return None
    from matplotlib.ticker import MaxNLocator

    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        for method, shares in known.items():
            look = looks[method]
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                color=look.colour,
                ls=look.line,
                marker=look.marker,
                mfc=look.face,
                lw=1.6,
                ms=5.5,
                label=look.name,
            )
        axes.set(xlabel="depth in the draft tree", ylabel="share accepted", ylim=(-0.03, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(drawing, [looks[m].name for m in known], handlelength=3)
        words = "; ".join(
            f"{looks[method].name}: " + ", ".join(f"{share:.2f}" for share in shares)
            for method, shares in known.items()
        )
        return Plot(
            "Acceptance by depth",
            inline(drawing, name, f"Share accepted at depth 1, 2 and so on. {words}."),
            "Share of the passes that accepted this depth among those that accepted the one before; depths that "
            f"fewer than {ENOUGH} passes reached are left out.",
        )


def _breakdown(group: Group, looks: dict[str, _Look], name: str) -> Plot:
    methods = list(group.results)
    with figure(WIDTH, 1.4 + 0.3 * len(methods)) as drawing:
        axes = drawing.subplots()
        left = [0.0] * len(methods)
        spent = group.milliseconds
        for index, (stage, by_method) in enumerate(spent.items()):
            widths = [max(by_method[m], 0.0) for m in methods]
            axes.barh(
                range(len(methods)),
                widths,
                left=left,
                height=0.66,
                color=SERIES[index % len(SERIES)],
                hatch=_HATCHES[index % len(_HATCHES)],
                edgecolor=PAPER,
                lw=0.8,
                label=stage,
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(methods)), [looks[m].name for m in methods])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(xlabel="milliseconds per answer")
        legend(drawing, list(spent))
        words = "; ".join(
            f"{looks[m].name}: " + ", ".join(f"{s} {by[m]:.0f}" for s, by in spent.items()) for m in methods
        )
        return Plot(
            "Where the time goes",
            inline(drawing, name, f"Milliseconds per answer by stage. {words}."),
            "Mean over the answers. Verification includes the acceptance rule; rest is time outside of all stages.",
        )


def legend(drawing: Figure, names: Sequence[str], **options: Any) -> None:
    """Draw a legend below the axes, in as many columns as fit."""
    longest = 0.6 * SIZE * max(map(len, names)) + 5 * SIZE
    columns = max(1, min(3, int(WIDTH * 72 / longest)))
    drawing.legend(loc="outside lower center", ncols=columns, fontsize=SIZE, **options)
