"""Figures of a report; every distinction by colour is also one by shape, line style or name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from saccade.bench.report import svg
from saccade.bench.report.content import Group, stage_name
from saccade.bench.statistics import Estimate
from saccade.bench.suite import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.8, 3.4
"""Size in inches, legible on a phone."""
ENOUGH = 10
"""Least number of passes for a share to be shown."""
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
        return self.colour if self.filled else svg.PAPER


def _looks(group: Group) -> dict[str, _Look]:
    looks: dict[str, _Look] = {}
    for method, result in group.results.items():
        if method == BASELINE:
            looks[method] = _Look(method, svg.SERIES[-1], "*", "-", True)
            continue
        i = len(looks) - (BASELINE in looks)
        looks[method] = _Look(
            method if result.lossless else f"{method} (lossy)",
            svg.SERIES[i % (len(svg.SERIES) - 1)],
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
    with svg.figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        front = _front([(x.value, y.value) for _, x, y in points])
        axes.plot(
            [x for x, _ in front],
            [y for _, y in front],
            color=svg.INK,
            lw=1,
            ls=":",
            zorder=1,
            drawstyle="steps-pre",
        )
        axes.set(xlabel="speed-up, end to end", ylabel="score kept (plain decoding = 1)")
        _scatter(axes, points)
        said = "; ".join(f"{look.name}: {x.value:.2f} times, {y.value:.3f}" for look, x, y in points)
        return Plot(
            "Speed against quality",
            svg.inline(drawing, name, f"Speed-up and share of plain decoding's score, by method. {said}."),
            "Right is faster, up is better. The dotted line joins the methods that no other one beats in both (Pareto "
            f"front). Hollow marks are lossy methods; {_BARS}.",
        )


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other point beats in both coordinates, by the first coordinate."""
    best = [p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)]
    return sorted(set(best))


def _against_tau(group: Group, looks: dict[str, _Look], name: str) -> Plot | None:
    points = [
        (looks[m], r.block_efficiency, r.decode_speedup)
        for m, r in group.results.items()
        if r.block_efficiency and r.decode_speedup
    ]
    if not points:
        return None
    with svg.figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        top = max(x.value for _, x, _ in points) * 1.05
        axes.plot([1, top], [1, top], color=svg.INK, lw=1, ls=":", zorder=1)
        axes.set(xlabel="block efficiency (tokens per target pass)", ylabel="speed-up, decoding only")
        _scatter(axes, points)
        said = "; ".join(f"{look.name}: {x.value:.2f} tokens per pass, {y.value:.2f} times" for look, x, y in points)
        return Plot(
            "Tau against speed",
            svg.inline(drawing, name, f"Block efficiency and decoding speed-up by method. {said}."),
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
        )
    axes.margins(0.12)
    svg.place(axes, [(x, y) for _, x, y in points], [look.name for look, _, _ in points])


def _bar(estimate: Estimate) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return [[max(estimate.value - estimate.low, 0.0)], [max(estimate.high - estimate.value, 0.0)]]


def _by_depth(group: Group, looks: dict[str, _Look], name: str) -> Plot | None:
    known = {method: shares_by_depth(reached) for method, reached in group.reached.items()}
    known = {method: shares for method, shares in known.items() if shares}
    if not known:
        return None
    from matplotlib.ticker import MaxNLocator

    with svg.figure(WIDTH, HEIGHT) as drawing:
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
        said = "; ".join(
            f"{looks[method].name}: " + ", ".join(f"{share:.2f}" for share in shares)
            for method, shares in known.items()
        )
        return Plot(
            "Acceptance by depth",
            svg.inline(drawing, name, f"Share accepted at depth 1, 2 and so on. {said}."),
            "Share of the passes that accepted this depth among those that accepted the one before; depths that "
            f"fewer than {ENOUGH} passes reached are left out.",
        )


def shares_by_depth(reached: Sequence[int]) -> list[float]:
    """Share of the passes that accepted depth d among those at d - 1, from the counts by depth."""
    pairs = zip(reached[1:], reached[:-1], strict=True)
    return [further / before for further, before in pairs if before >= ENOUGH]


def _breakdown(group: Group, looks: dict[str, _Look], name: str) -> Plot:
    methods = list(group.results)
    with svg.figure(WIDTH, 1.4 + 0.3 * len(methods)) as drawing:
        axes = drawing.subplots()
        left = [0.0] * len(methods)
        spent = {stage: milliseconds(group, stage) for stage in group.stages}
        for index, (stage, by_method) in enumerate(spent.items()):
            widths = [max(by_method[m], 0.0) for m in methods]
            axes.barh(
                range(len(methods)),
                widths,
                left=left,
                height=0.66,
                color=svg.SERIES[index % len(svg.SERIES)],
                hatch=_HATCHES[index % len(_HATCHES)],
                edgecolor=svg.PAPER,
                lw=0.8,
                label=stage_name(stage),
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(methods)), [looks[m].name for m in methods])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(xlabel="milliseconds per answer")
        legend(drawing, [stage_name(stage) for stage in spent])
        said = "; ".join(
            f"{looks[m].name}: " + ", ".join(f"{stage_name(s)} {by[m]:.0f}" for s, by in spent.items()) for m in methods
        )
        return Plot(
            "Where the time goes",
            svg.inline(drawing, name, f"Milliseconds per answer by stage. {said}."),
            "Mean over the answers. Verification includes the acceptance rule; rest is time outside of all stages.",
        )


def legend(drawing: Figure, names: Sequence[str], **options: Any) -> None:
    """Draw a legend below the axes, in as many columns as fit."""
    longest = 0.6 * svg.SIZE * max(map(len, names)) + 5 * svg.SIZE
    columns = max(1, min(3, int(WIDTH * 72 / longest)))
    drawing.legend(loc="outside lower center", ncols=columns, fontsize=svg.SIZE, **options)


def milliseconds(group: Group, stage: str) -> dict[str, float]:
    """Mean milliseconds of a stage per answer, by method."""
    return {m: group.seconds[m] * r.shares.get(stage, 0.0) * 1000 for m, r in group.results.items()}
