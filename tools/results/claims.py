"""Orders of methods that papers report (``claims`` of a suite), judged on a run by paired intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean
from typing import Any, Literal

import numpy as np

from saccade.bench import metrics
from saccade.bench.metrics import Array, Estimate, bootstrap, median_estimate
from saccade.bench.records import Record, RecordedRun
from saccade.bench.suites import BASELINE, Suite

Judgement = Literal["holds", "reversed", "undecided"]
CURVES = "score at equal tokens per pass"
"""The measure that compares curves: a label with ``*`` at its end stands for all that begin so."""


def with_claims(suite: Suite) -> Suite:
    """Return a suite whose claims are complete: levels of labels, the measure, the ratio to exceed, and the tasks."""
    claims = []
    for item in suite.claims:
        order = tuple((level,) if isinstance(level, str) else tuple(level) for level in item["order"])
        tasks = tuple(item.get("tasks", ()))
        claims.append({"by": "block efficiency", "least": 1.0, **item, "order": order, "tasks": tasks})
    return suite.with_(claims=tuple(claims))


def _of_curve(label: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if (name.startswith(label[:-1]) if label.endswith("*") else name == label)]


@dataclass(frozen=True, slots=True)
class OrderComparison:
    """Two methods on the same prompts."""

    above: str
    below: str
    by: str  # a name of `MEASURES`
    ratio: Estimate  # of `above` over `below` with its paired 95 % interval
    least: float  # value that the ratio must exceed
    tasks: tuple[int, int]  # number of tasks on which the ratio exceeds it, and of all tasks
    judgement: Judgement  # `holds` when the whole interval exceeds `least`, `reversed` when it lies below

    def __str__(self) -> str:
        is_percent = self.least == 1 and self.below != BASELINE

        def form(ratio: float) -> str:
            return f"{100 * (ratio - 1):+.1f} %" if is_percent else f"{ratio:.3f}"

        interval = " (one prompt)"
        if self.ratio.low is not None and self.ratio.high is not None:
            interval = f" [{form(self.ratio.low)}, {form(self.ratio.high)}]"
        above, count = self.tasks
        remark = "" if self.judgement == "holds" else f" ({self.judgement})"
        return f"{self.above} over {self.below} {form(self.ratio.value)}{interval}, {above} of {count} tasks{remark}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A paper's order, compared pair by pair."""

    claim: Mapping[str, Any]  # as in the run's configuration
    comparisons: tuple[OrderComparison, ...]  # of neighbouring levels
    absent: tuple[str, ...]  # labels of the claim that the run lacks

    @property
    def outcome(self) -> str:
        """One word or two: ``holds``, ``is reversed``, ``is undecided``, ``holds in 2 of 3 comparisons``."""
        found = [c.judgement for c in self.comparisons]
        if not found:
            return "was not measured"
        if len(set(found)) == 1:
            return found[0] if found[0] == "holds" else f"is {found[0]}"
        if "holds" in found:
            return f"holds in {found.count('holds')} of {len(found)} comparisons"
        return "does not hold"

    @property
    def place(self) -> str:
        """The tasks of a claim that is not about all of them, as ``" in prose, report"``."""
        tasks = self.claim.get("tasks") or ()
        return f" in {', '.join(tasks)}" if tasks else ""

    def sentence(self, paper: str) -> str:
        """State whether the order holds, by how much, and on how many tasks."""
        order = " > ".join(", ".join(level) for level in self.claim["order"])
        least = "" if self.claim["least"] == 1 else f" by a factor of at least {self.claim['least']:g}"
        lacks = f"; without {', '.join(self.absent)}" if self.absent else ""
        listed = "; ".join(map(str, self.comparisons))
        shown, by = f": {listed}" if listed else "", self.claim["by"]
        return f"The order of {paper}, in {by}{least}, {order}, {self.outcome} on this pair{self.place}{shown}{lacks}."


def verdicts(run: RecordedRun) -> list[Verdict]:
    """Judge every claim of the run's suite; none for runs of suites without claims."""
    records = metrics.records_by_method(run.records)
    found = []
    for claim in run.header.config.get("claims", ()):
        labels = [label for level in claim["order"] for label in level]
        tasks = claim.get("tasks") or ()
        of_label = {
            label: [r for name in _of_curve(label, records) for r in records[name] if not tasks or r.task in tasks]
            for label in labels
        }
        present = [[label for label in level if of_label[label]] for level in claim["order"]]
        comparisons = [
            compare(of_label[better], of_label[other], better, other, claim["by"], claim["least"])
            for above, below in pairwise(level for level in present if level)
            for better, other in product(above, below)
        ]
        absent = tuple(label for label in labels if not of_label[label])
        found.append(Verdict(claim, tuple(one for one in comparisons if one is not None), absent))
    return found


def sentences(run: RecordedRun) -> Iterator[str]:
    """Yield one sentence per claim."""
    paper = run.header.config.get("mirrors") or "the suite"
    return (verdict.sentence(paper) for verdict in verdicts(run))


def compare(
    ours: Sequence[Record], theirs: Sequence[Record], above: str, below: str, by: str, least: float = 1.0
) -> OrderComparison | None:
    """Compare two methods on the prompts that both answered; None when a measure is defined on none of them."""
    ratio = MEASURES[by](ours, theirs)
    if ratio is None:
        return None
    tasks = [
        value
        for task in dict.fromkeys(r.task for r in ours)
        if (value := MEASURES[by]([r for r in ours if r.task == task], [r for r in theirs if r.task == task]))
    ]
    judgement: Judgement = "undecided"
    if ratio.low is not None and ratio.high is not None:
        judgement = "holds" if ratio.low > least else "reversed" if ratio.high < least else "undecided"
    exceeding = sum(value.value > least for value in tasks)
    return OrderComparison(above, below, by, ratio, least, (exceeding, len(tasks)), judgement)


Measure = Callable[[Sequence[Record], Sequence[Record]], Estimate | None]


def _block_efficiency(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
    """Ratio of tokens per pass, each summed over all blocks, prompts resampled for both at once."""
    mine, other = sums_by_prompt(ours), sums_by_prompt(theirs)
    both = [prompt for prompt in mine if prompt in other]
    if not both:
        return None
    counts = np.array([[*mine[prompt], *other[prompt]] for prompt in both], np.float64)  # [P, 4]

    def statistic(taken: Array) -> Array:
        emitted, passes, others, their_passes = counts[taken].sum(1).T
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Array = (emitted / passes) / (others / their_passes)
        return ratio

    found = bootstrap(statistic, len(both))
    return found if np.isfinite(found.value) else None


def sums_by_prompt(records: Sequence[Record]) -> dict[str, tuple[int, int]]:
    """By prompt, tokens emitted by passes and passes, over all repeats."""
    sums: dict[str, tuple[int, int]] = {}
    for record in records:
        emitted, passes = sums.get(record.prompt_id, (0, 0))
        sums[record.prompt_id] = emitted + metrics.emitted(record), passes + metrics.passes(record)
    return {prompt: pair for prompt, pair in sums.items() if pair[1]}


def _of_rates(rate: Callable[[Record], float | None]) -> Measure:
    return lambda ours, theirs: median_estimate(metrics.paired_ratios(ours, theirs, rate))


_GRID = 9
"""Places at which two curves are compared."""


def _score_at_equal_tokens(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
    """Ratio of the mean scores of two curves over the tokens per pass that both reach, linear between their points."""
    curves = [_points(ours), _points(theirs)]
    answered = [set(point) for curve in curves for point in curve]
    prompts = sorted(set.intersection(*answered)) if answered else []
    if not prompts:
        return None
    counts = [np.array([[point[p] for p in prompts] for point in c], np.float64) for c in curves]  # [M, P, 3]

    def points(count: Array, taken: Array) -> tuple[Array, Array]:
        """Tokens per pass and score of every method, ``[M]`` each, in ascending order of the first."""
        emitted, passes, score = count[:, taken].sum(1).T
        order = np.argsort(emitted / passes)
        return (emitted / passes)[order], score[order]

    whole = np.arange(len(prompts))
    reached = [points(count, whole)[0] for count in counts]
    low, high = max(r[0] for r in reached), min(r[-1] for r in reached)
    if low >= high:
        return None
    at = np.linspace(low, high, _GRID)

    def statistic(taken: Array) -> Array:
        found = [[np.interp(at, *points(count, row)).mean() for count in counts] for row in taken]
        over, under = np.array(found).T
        ratio: Array = np.divide(over, under, out=np.full(len(taken), np.nan), where=under > 0)
        return ratio

    found = bootstrap(statistic, len(prompts))
    return found if np.isfinite(found.value) else None


def _points(records: Sequence[Record]) -> list[dict[str, tuple[int, int, float]]]:
    """Per method, by prompt: tokens emitted by passes, passes, and score."""
    points = []
    for group in metrics.records_by_method(records).values():
        sums, scores = sums_by_prompt(group), metrics.by_prompt(group, metrics.mean_score, fmean)
        points.append({prompt: (*sums[prompt], scores[prompt]) for prompt in sums if prompt in scores})
    return points


MEASURES: dict[str, Measure] = {
    "block efficiency": _block_efficiency,
    "decoding speed": _of_rates(metrics.decode_rate),
    "speed": _of_rates(metrics.rate),
    "score": metrics.retention,
    CURVES: _score_at_equal_tokens,
}
"""Ratio of a quantity of one method over another's on the same prompts: tokens per pass; median throughput after
prefill; median throughput end to end; mean score against ground truth; the same of two curves of methods, over the
tokens per pass that both reach."""
