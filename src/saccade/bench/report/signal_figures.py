"""Figures of what shaped the drafts: weights of views over an answer, and the autocorrelation of confidence."""

from __future__ import annotations

from saccade.bench import signals
from saccade.bench.records import Run
from saccade.bench.report import svg
from saccade.bench.report.figures import HEIGHT, LINES, MARKERS, WIDTH, Plot, legend
from saccade.bench.signals import Persistence, Weights

SHOWN = 6
"""Most answers in the figure of weights."""


def drawn_signals(run: Run, prefix: str) -> list[Plot]:
    """Draw the figures that a run's traces have data for; ``prefix`` makes ids unique on the page."""
    plots = []
    if found := signals.weights(run):
        plots.append(_weights(found, f"{prefix}-weights"))
    if lasting := signals.persistence(run):
        plots.append(_persistence(lasting, f"{prefix}-persistence"))
    return plots


def _weights(found: list[Weights], name: str) -> Plot:
    """Weight of the first view by tokens emitted, one line per answer (TABED, Figures 3 and 4)."""
    changing = [one for one in found if len(set(one.first)) > 1] or found
    shown = changing[:SHOWN]
    with svg.figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        for number, one in enumerate(shown):
            axes.step(
                one.tokens,
                one.first,
                where="post",
                color=svg.SERIES[number % len(svg.SERIES)],
                ls=LINES[number % len(LINES)],
                lw=1.6,
                label=f"{one.method}, {one.prompt}",
            )
        axes.set(xlabel="tokens emitted", ylabel="weight of the first view", ylim=(-0.03, 1.03))
        legend(drawing, [f"{one.method}, {one.prompt}" for one in shown], handlelength=3)
        said = "; ".join(f"{one.method} on {one.prompt}: {one.first[0]:.2f} to {one.first[-1]:.2f}" for one in shown)
        return Plot(
            "Weights of the views",
            svg.inline(drawing, name, f"Weight of the first view while answers grow. {said}."),
            "One line per traced answer. A static mixture is a level line; a single view would be at one or at zero.",
        )


def _persistence(found: list[Persistence], name: str) -> Plot:
    """Correlation of the confidence with itself some steps later (SAGE, Figure 2)."""
    with svg.figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        axes.axhline(0, color=svg.INK, lw=1, ls=":")
        for number, one in enumerate(found):
            values = [lag.value for lag in one.lags]
            below = [max(lag.value - lag.low, 0.0) if lag.low is not None else 0.0 for lag in one.lags]
            above = [max(lag.high - lag.value, 0.0) if lag.high is not None else 0.0 for lag in one.lags]
            axes.errorbar(
                signals.LAGS,
                values,
                yerr=[below, above],
                color=svg.SERIES[number % (len(svg.SERIES) - 1)],
                marker=MARKERS[number % len(MARKERS)],
                ls=LINES[number % len(LINES)],
                lw=1.6,
                elinewidth=1,
                label=one.method,
            )
        axes.set(xlabel="steps apart", ylabel="correlation of alpha", xticks=signals.LAGS)
        legend(drawing, [one.method for one in found], handlelength=3)
        said = "; ".join(f"{one.method}: " + ", ".join(f"{lag.value:.2f}" for lag in one.lags) for one in found)
        return Plot(
            "How long certainty lasts",
            svg.inline(drawing, name, f"Autocorrelation of the confidence at lags 1 to {signals.LAGS[-1]}. {said}."),
            "Above zero, a step's certainty says something about later ones, on which SAGE relies; bars are 95 % "
            "intervals over answers.",
        )
