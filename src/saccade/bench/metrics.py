"""Metrics of methods with bootstrap intervals over prompts: pure functions of a run's records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from saccade.bench.records import Record
from saccade.bench.suites import BASELINE

Array = np.ndarray[Any, np.dtype[Any]]

LEVEL = 0.95
FEWEST = next(n for n in range(2, 100) if 1 - 2 * 0.5**n >= LEVEL)
"""Prompts below which no interval between prompts covers a median with probability `LEVEL`: smallest to largest value
covers it with 1 - 2 / 2^n."""
FEWEST_STEPS = 8  # least number of steps in an answer for its autocorrelation to count
_NOT_STAGES = ("total", "decode", "inputs")
"""Entries of ``stats["seconds"]`` besides the stages of the total: sums, and the time of input preparation."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic over prompts and its bootstrap percentile interval."""

    value: float  # on the prompts of the run
    low: float | None = None
    high: float | None = None
    prompts: int = field(default=0, compare=False)  # that were resampled; 0 where nothing was

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(statistic: Callable[[Array], Array], count: int, level: float = LEVEL) -> Estimate:
    """Estimate by resampling prompts (Efron 1979, percentile interval); ``statistic`` takes indices ``[R, count]``."""
    value = float(statistic(np.arange(count)[None])[0])
    if count < 2:
        return Estimate(value)
    resamples = min(round(100 / (1 - level)), 5000)  # more where the interval reaches far into the tails
    drawn = np.random.default_rng(0).integers(0, count, (resamples, count))
    low, high = np.nanquantile(statistic(drawn), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), count)


def median_estimate(values: Sequence[float]) -> Estimate | None:
    """Median over prompts; None without any."""
    each = np.asarray(values, np.float64)
    return bootstrap(lambda taken: np.median(each[taken], axis=-1), len(each)) if len(each) else None


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Estimate | None:
    """Ratio of two sums, prompts resampled as wholes; None when the lower sum is zero."""
    over = np.asarray(above, np.float64)
    under = np.asarray(below, np.float64)
    if not under.sum():
        return None

    def statistic(taken: Array) -> Array:
        total = under[taken].sum(-1)  # 0 in resamples of prompts that all weigh nothing
        ratio: Array = np.divide(over[taken].sum(-1), total, out=np.full(len(taken), np.nan), where=total > 0)
        return ratio

    return bootstrap(statistic, len(under))


def correlation(series: Sequence[Array], lag: int) -> Estimate:
    """Pearson's coefficient of values and those ``lag`` steps later, pooled; -1/n in n values without memory."""
    centred = [values - values.mean() for values in series]
    sums = [[(e[:-lag] * e[lag:]).sum(), (e[:-lag] ** 2).sum(), (e[lag:] ** 2).sum()] for e in centred]
    table = np.array(sums)  # [answers, 3]

    def statistic(taken: Array) -> Array:
        product, early, late = table[taken].sum(1).T
        scale = np.sqrt(early * late)
        found: Array = np.divide(product, scale, out=np.full(len(taken), np.nan), where=scale > 0)
        return found

    return bootstrap(statistic, len(table))


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method over a set of prompts. Seconds are wall time; rates are tokens per second."""

    method: str  # label
    lossless: bool  # whether its output must equal plain decoding's
    prompts: int  # distinct ones
    answers: int  # records; prompts times repeats in a complete run
    tokens: int  # emitted in all answers
    speedup: Estimate | None  # end-to-end
    decode_speedup: Estimate | None  # the same over the tokens and the seconds after prefill
    rate: Estimate | None  # end-to-end throughput, median over prompts
    block_efficiency: Estimate | None  # tokens emitted per verification pass
    accepted_length: Estimate | None  # the same without the target's own token (LVSpec's, SAGE's tau)
    reached: list[int]  # entry d is the number of passes that accepted at least d draft tokens
    verified_per_token: float | None  # positions that the target computed per token emitted; 1 for plain decoding
    seconds: float  # mean total per answer
    shares: dict[str, float]  # of the total seconds, by stage
    peak_bytes: int | None  # largest of the answers; None when not measured
    compared: int
    equal: int
    scores: dict[str, float]  # ground truth by fact, mean over answers
    score: float | None  # mean over facts and answers; None without ground truth
    retention: Estimate | None  # score over plain decoding's on the same prompts


def records_by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records of every method, in order of appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    return groups


def by_method(records: Iterable[Record]) -> dict[str, MethodResult]:
    """Results of every method over all records: plain decoding, then in order of appearance."""
    groups = records_by_method(records)
    baseline = groups.get(BASELINE, [])
    order = sorted(groups, key=lambda method: method != BASELINE)
    return {method: _result(method, groups[method], baseline) for method in order}


def rate(record: Record) -> float | None:
    """Tokens per second end-to-end (prefill, pruning and the drafter's prefill included)."""
    seconds = record.stats["seconds"]["total"]
    return record.stats["new_tokens"] / seconds if seconds > 0 else None


def decoded(record: Record) -> int:
    """Tokens emitted after prefill, whose pass may also verify a first draft and emit several."""
    tokens: int = record.stats["new_tokens"] - record.stats["prefill_tokens"]
    return tokens


def decode_rate(record: Record) -> float | None:
    """Tokens after prefill per second after prefill; None for an answer that prefill gave alone."""
    seconds = record.stats["seconds"]["decode"]
    tokens = decoded(record)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def passes(record: Record) -> int:
    return sum(record.stats["accepted_histogram"])


def emitted(record: Record) -> int:
    """Tokens that verification passes emitted: all but those of prefill."""
    return decoded(record) if passes(record) else 0


def accepted(record: Record) -> int:
    """Emitted tokens beyond one per pass, plain decoding's rate."""
    return emitted(record) - passes(record)


def block_efficiency(record: Record) -> float | None:
    """Tokens emitted per verification pass in one answer; None without passes."""
    return emitted(record) / passes(record) if passes(record) else None


def mean_score(record: Record) -> float | None:
    """Mean over the facts of one answer; None without ground truth."""
    return fmean(record.scores.values()) if record.scores else None


def by_prompt(
    records: Sequence[Record],
    measure: Callable[[Record], float | None],
    together: Callable[[list[float]], float],
) -> dict[str, float]:
    """A measure of every prompt for which it is defined, taken together over repeats."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        if (value := measure(record)) is not None:
            values[record.prompt_id].append(value)
    return {prompt: together(group) for prompt, group in values.items()}


def paired_ratios(
    ours: Sequence[Record], theirs: Sequence[Record], measure: Callable[[Record], float | None]
) -> list[float]:
    """Per prompt the median over repeats of ``measure`` on ours over theirs, same prompt and same repeat."""
    other = {(r.prompt_id, r.repeat): measure(r) for r in theirs}

    def ratio(record: Record) -> float | None:
        above, below = measure(record), other.get((record.prompt_id, record.repeat))
        return above / below if above is not None and below else None

    return list(by_prompt(ours, ratio, median).values())


def retention(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
    """Score over theirs, both averaged over the same prompts, each prompt over its repeats."""
    mine = by_prompt(ours, mean_score, fmean)
    other = by_prompt(theirs, mean_score, fmean)
    both = [prompt for prompt in mine if prompt in other]
    return ratio_of_sums([mine[prompt] for prompt in both], [other[prompt] for prompt in both])


def _result(method: str, records: Sequence[Record], baseline: Sequence[Record]) -> MethodResult:
    histograms = [record.stats["accepted_histogram"] for record in records]
    counts = [sum(at_depth) for at_depth in zip_longest(*histograms, fillvalue=0)]
    reached = [sum(counts[depth:]) for depth in range(len(counts))]
    spent: defaultdict[str, float] = defaultdict(float)
    facts: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for stage, seconds in record.stats["seconds"].items():
            spent[stage] += seconds
        for fact, score in record.scores.items():
            facts[fact].append(score)
    sums = [by_prompt(records, count, sum) for count in (emitted, accepted, passes)]
    tokens, extra, blocks = (list(each.values()) for each in sums)
    verified = sum(r.stats["drafted_tokens"] + r.stats["target_passes"] for r in records)
    after_first = sum(r.stats["new_tokens"] - 1 for r in records)
    return MethodResult(
        method=method,
        lossless=all(r.lossless for r in records),
        prompts=len({r.prompt_id for r in records}),
        answers=len(records),
        tokens=sum(r.stats["new_tokens"] for r in records),
        speedup=median_estimate(paired_ratios(records, baseline, rate)),
        decode_speedup=median_estimate(paired_ratios(records, baseline, decode_rate)),
        rate=median_estimate(list(by_prompt(records, rate, median).values())),
        block_efficiency=ratio_of_sums(tokens, blocks),
        accepted_length=ratio_of_sums(extra, blocks),
        reached=reached,
        verified_per_token=verified / after_first if after_first > 0 else None,
        seconds=spent["total"] / len(records),
        shares={s: t / spent["total"] for s, t in spent.items() if s not in _NOT_STAGES and spent["total"] > 0},
        peak_bytes=max((r.peak_bytes for r in records if r.peak_bytes is not None), default=None),
        compared=sum(r.equal is not None for r in records),
        equal=sum(bool(r.equal) for r in records),
        scores={fact: fmean(values) for fact, values in facts.items()},
        score=mean(s for r in records if (s := mean_score(r)) is not None),
        retention=retention(records, baseline),
    )


def mean(values: Iterable[float]) -> float | None:
    """Mean; None of nothing."""
    every = list(values)
    return fmean(every) if every else None
