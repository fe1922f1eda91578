"""Claims of papers about orders of methods (``claims`` of a suite), judged on a run by paired intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, permutations, product
from statistics import fmean
from typing import Any, Literal

import numpy as np

from saccade.bench import metrics
from saccade.bench.metrics import Array, Estimate, bootstrap, median_estimate, ratio_of_sums
from saccade.bench.records import Record, RecordedRun
from saccade.bench.suites import Suite
from saccade.errors import SaccadeError
from saccade.options import make
from saccade.wording import count as counted

Judgement = Literal["holds", "level", "undecided", "does not", "not measured"]
WORST_FIRST: tuple[Judgement, ...] = ("does not", "undecided", "level", "holds")
FEWEST = 40  # prompts below which no comparison is decided
MANY = 1000  # prompts above which deciding a comparison is not worth their time
LEVEL = 0.03  # of the ratio asked for: an interval within it on both sides is level, too small a difference to matter
CURVES = "score at equal tokens per pass"
"""The measure that compares curves: a label with ``*`` at its end stands for all that begin so."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper reports about the order of methods."""

    says: str  # in a few words, unique in its suite
    paper: str  # its numbers in the order of the claim, `-` without any
    order: Sequence[Any]  # levels of labels, best first; `a|b`: in every task the one of them that is less efficient
    by: str = "block efficiency"  # a name of `MEASURES`
    least: float = 1.0  # ratio that every comparison must exceed
    tasks: Sequence[Any] = ()  # that it is about; all without any

    @classmethod
    def of(cls, item: Mapping[str, Any], where: str) -> Claim:
        claim = make(cls, item, where)
        return replace(claim, order=[[level] if isinstance(level, str) else [*level] for level in claim.order])


def with_claims(suite: Suite) -> Suite:
    """Return a suite whose claims are checked and complete."""
    claims = [Claim.of(item, f"{suite.name}, claims") for item in suite.claims]
    if len({claim.says for claim in claims}) < len(claims):
        raise SaccadeError(f"{suite.name}: two claims say the same; give each words of its own.")
    return suite.with_(claims=tuple(map(asdict, claims)))


def of_curve(label: str, known: Iterable[str]) -> list[str]:
    """Return the labels that one of a claim stands for."""
    return [name for name in known if (name.startswith(label[:-1]) if label.endswith("*") else name == label)]


@dataclass(frozen=True, slots=True)
class OrderComparison:
    """Two methods on the same prompts."""

    above: str
    below: str
    ratio: Estimate  # of `above` over `below` with its paired 95 % interval
    least: float  # value that the ratio must exceed

    @property
    def judgement(self) -> Judgement:
        """Whether the whole interval lies above or below the ratio asked for, or holds it and is narrow."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None or self.ratio.prompts < FEWEST:
            return "undecided"
        if low > self.least:
            return "holds"
        if high < self.least:
            return "does not"
        return "level" if max(self.least - low, high - self.least) <= LEVEL * self.least else "undecided"

    @property
    def needed(self) -> float:
        """Prompts that decide it, if its interval narrows around this ratio with the root of their number."""
        value, bar = self.ratio.value, self.least
        if self.ratio.low is None or self.ratio.high is None:
            return math.inf
        below, above = value - self.ratio.low, self.ratio.high - value
        sides = [below / (value - bar)] if value > bar else [above / (bar - value)] if value < bar else []
        if abs(value - bar) < LEVEL * bar:
            sides.append(max(below / (value - (1 - LEVEL) * bar), above / ((1 + LEVEL) * bar - value)))
        return max(FEWEST, self.ratio.prompts * min(sides, default=math.inf) ** 2)

    def __str__(self) -> str:
        interval = f" [{self.ratio.low:.3f}, {self.ratio.high:.3f}]" if self.ratio.low is not None else ""
        few = f", {counted(self.ratio.prompts or 1, 'prompt')}" if self.ratio.prompts < FEWEST else ""
        return f"{self.ratio.value:.3f}{interval} ({self.above} / {self.below}{few})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, compared pair by pair."""

    claim: Claim
    comparisons: tuple[OrderComparison, ...]  # of every label with all of lower levels
    absent: tuple[str, ...]  # labels of the claim that the run lacks

    @property
    def worst(self) -> OrderComparison | None:
        """The comparison of the worst judgement, of several the one of the least ratio; None without any."""
        return min(
            self.comparisons, key=lambda c: (WORST_FIRST.index(c.judgement), c.ratio.value / c.least), default=None
        )

    @property
    def judgement(self) -> Judgement:
        return self.worst.judgement if self.worst else "not measured"

    @property
    def needed(self) -> float:
        """Prompts that decide every comparison."""
        return max((c.needed for c in self.comparisons if c.judgement == "undecided"), default=0)

    def __str__(self) -> str:
        """Worst comparison."""
        lacks = f", without {', '.join(self.absent)}" if self.absent else ""
        return f"{self.worst or '-'}{lacks}"

    @property
    def among(self) -> str:
        """Of how many comparisons it is the worst."""
        return f", worst of {len(self.comparisons)}" if len(self.comparisons) > 1 else ""


def verdicts(run: RecordedRun) -> list[Verdict]:
    """Judge every claim of the run's suite; none for runs of suites without claims."""
    records = metrics.records_by_method(run.records)
    found = []
    for claim in (Claim.of(item, "claims") for item in run.header.config.get("claims", ())):
        labels = [label for level in claim.order for label in level]
        of_label = {label: _records_of(label, records, claim.tasks) for label in labels}
        present = [[label for label in level if of_label[label]] for level in claim.order]
        comparisons = [
            OrderComparison(better, other, ratio, claim.least)
            for above, below in combinations(present, 2)
            for better, other in product(above, below)
            if (ratio := MEASURES[claim.by](of_label[better], of_label[other])) is not None
        ]
        found.append(Verdict(claim, tuple(comparisons), tuple(label for label in labels if not of_label[label])))
    return found


def _records_of(label: str, known: Mapping[str, Sequence[Record]], tasks: Sequence[str]) -> list[Record]:
    """Records that a claim's label stands for, in some tasks or, without any, in all."""
    parts = [[r for r in known.get(name, ()) if not tasks or r.task in tasks] for name in label.split("|")]
    if len(parts) == 1:
        found = (r for name in of_curve(label, known) for r in known[name])
        return [r for r in found if not tasks or r.task in tasks]
    if not all(parts):
        return []
    of_task = [{task: [r for r in part if r.task == task] for task in {r.task for r in part}} for part in parts]
    shared = sorted(set.intersection(*map(set, of_task)))
    return [r for task in shared for r in min((group[task] for group in of_task), key=_efficiency)]


def _efficiency(records: Sequence[Record]) -> float:
    return sum(map(metrics.emitted, records)) / max(sum(map(metrics.passes, records)), 1)


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


def _of_times(over: Callable[[Record], float], under: Callable[[Record], float]) -> Measure:
    """One time of the first method over another of the second one, each summed over the prompts where both took any."""

    def measure(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
        below = {(r.prompt_id, r.repeat): under(r) for r in theirs}
        pairs = [(over(r), below.get((r.prompt_id, r.repeat), 0.0)) for r in ours]
        both = [pair for pair in pairs if all(pair)]
        return ratio_of_sums(*zip(*both, strict=True)) if both else None

    return measure


def _seconds(*stages: str) -> Callable[[Record], float]:
    return lambda record: sum(record.stats["seconds"][stage] for stage in stages)


_TIMES: dict[str, Callable[[Record], float]] = {
    "target pass": lambda record: record.stats["seconds"]["verify"] / max(metrics.passes(record), 1),
    "draft pass": lambda record: record.stats["seconds"]["draft"] / max(record.stats["drafted_tokens"], 1),
    "prefill": _seconds("vision", "prefill"),
    "captioning": _seconds("caption"),
    "draft prefill": _seconds("draft_prefill"),
    "verification": _seconds("verify"),
    "drafting": _seconds("draft"),
}
"""Seconds of an answer, or of one of its passes: of a draft pass those of a chain's."""


_GRID = 9  # places at which two curves are compared


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
    **{f"{a} over {b}": _of_times(_TIMES[a], _TIMES[b]) for a, b in permutations(_TIMES, 2)},
}
"""Ratio of a quantity of one method over another's on the same prompts: tokens per pass; median throughput after
prefill; median throughput end to end; mean score against ground truth; the same of two curves of methods, over the
tokens per pass that both reach; ratio of a time of one method to a time of the other, summed over prompts."""
