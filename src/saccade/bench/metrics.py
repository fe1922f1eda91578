"""Metrics of methods: pure functions of a run's records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from saccade.bench.records import Record
from saccade.bench.statistics import Estimate, ratio_of_sums
from saccade.bench.statistics import median as median_with_interval
from saccade.bench.suite import BASELINE

_NOT_STAGES = ("total", "decode", "inputs")
"""Entries of ``stats["seconds"]`` beside the stages of the total: sums, and the time of input preparation."""

_STRICT = ("target", "draft")
"""Marks of tokens that are the target's own choice; lossy rules add others."""


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
    decode_rate: Estimate | None  # tokens after prefill per second after prefill
    block_efficiency: Estimate | None  # tokens emitted per verification pass
    accepted_length: Estimate | None  # the same without the target's own token (LVSpec's, SAGE's tau)
    block_efficiency_per_sample: float | None
    accepted_length_per_sample: float | None
    acceptance_by_depth: list[float]  # entry d - 1
    verified_per_token: float | None  # positions that the target computed per token emitted; 1 for plain decoding
    shares: dict[str, float]  # of the total seconds, by stage
    input_seconds: float | None  # tokenizing and preparing images, median; not part of the total
    peak_bytes: int | None  # largest of the answers; None when not measured
    compared: int
    equal: int
    scores: dict[str, float]  # ground truth by fact, mean over answers
    score: float | None  # mean over facts and answers; None without ground truth
    retention: Estimate | None  # score over plain decoding's on the same prompts
    loosened: float = 0.0  # share of the tokens that a lossy rule accepted in place of the target's own


def by_method(records: Iterable[Record]) -> dict[str, MethodResult]:
    """Results of every method over all records: plain decoding, then in order of appearance."""
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.method].append(record)
    baseline = groups.get(BASELINE, [])
    first = [BASELINE] if baseline else []
    return {m: _result(m, groups[m], baseline) for m in dict.fromkeys([*first, *groups])}


def rate(record: Record) -> float | None:
    """Tokens per second end-to-end (prefill, pruning and the drafter's prefill included)."""
    seconds = record.stats["seconds"]["total"]
    return record.stats["new_tokens"] / seconds if seconds > 0 else None


def decoded(record: Record) -> int:
    """Tokens emitted after prefill, whose pass may also verify a first draft and emit several (one in old records)."""
    tokens: int = record.stats["new_tokens"] - record.stats.get("prefill_tokens", 1)
    return tokens


def decode_rate(record: Record) -> float | None:
    """Tokens after prefill per second after prefill; None for an answer that prefill gave alone."""
    seconds, tokens = record.stats["seconds"]["decode"], decoded(record)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def passes(record: Record) -> int:
    """Verification passes."""
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


def paired_ratios(
    ours: Sequence[Record], theirs: Sequence[Record], measure: Callable[[Record], float | None]
) -> list[float]:
    """Per prompt the median over repeats of ``measure`` on ours over theirs, same prompt and same repeat."""
    other = {(r.prompt_id, r.repeat): measure(r) for r in theirs}
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for record in ours:
        above, below = measure(record), other.get((record.prompt_id, record.repeat))
        if above is not None and below:
            ratios[record.prompt_id].append(above / below)
    return [median(group) for group in ratios.values()]


def _result(method: str, records: Sequence[Record], baseline: Sequence[Record]) -> MethodResult:
    compared = [r for r in records if r.equal is not None]
    histogram = _histogram(records)
    peaks = [r.peak_bytes for r in records if r.peak_bytes is not None]
    inputs = [r.stats["seconds"]["inputs"] for r in records if "inputs" in r.stats["seconds"]]
    efficiency = _mean(value for r in records if (value := block_efficiency(r)) is not None)
    return MethodResult(
        method=method,
        lossless=all(r.lossless for r in records),
        prompts=len({r.prompt_id for r in records}),
        answers=len(records),
        tokens=sum(r.stats["new_tokens"] for r in records),
        speedup=median_with_interval(paired_ratios(records, baseline, rate)),
        decode_speedup=median_with_interval(paired_ratios(records, baseline, decode_rate)),
        rate=median_with_interval(_per_prompt(records, rate)),
        decode_rate=median_with_interval(_per_prompt(records, decode_rate)),
        block_efficiency=_per_block(records, emitted, passes),
        accepted_length=_per_block(records, accepted, passes),
        block_efficiency_per_sample=efficiency,
        accepted_length_per_sample=None if efficiency is None else efficiency - 1,
        acceptance_by_depth=_acceptance_by_depth(histogram),
        verified_per_token=_verified_per_token(records),
        shares=_shares(records),
        input_seconds=median(inputs) if inputs else None,
        peak_bytes=max(peaks, default=None),
        compared=len(compared),
        equal=sum(bool(r.equal) for r in compared),
        scores=_scores(records),
        score=_mean(s for r in records if (s := mean_score(r)) is not None),
        retention=_retention(records, baseline),
        loosened=_mean(mark not in _STRICT for r in records for mark in r.marks) or 0.0,
    )


def _per_prompt(records: Sequence[Record], measure: Callable[[Record], float | None]) -> list[float]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        value = measure(record)
        if value is not None:
            found[record.prompt_id].append(value)
    return [median(group) for group in found.values()]


def _per_block(
    records: Sequence[Record], above: Callable[[Record], int], below: Callable[[Record], int]
) -> Estimate | None:
    """Sum over all blocks, prompts resampled with all their repeats."""
    over: defaultdict[str, int] = defaultdict(int)
    under: defaultdict[str, int] = defaultdict(int)
    for record in records:
        over[record.prompt_id] += above(record)
        under[record.prompt_id] += below(record)
    return ratio_of_sums(list(over.values()), list(under.values()))


def _histogram(records: Sequence[Record]) -> list[int]:
    counts: list[int] = []
    for record in records:
        for depth, count in enumerate(record.stats["accepted_histogram"]):
            counts.extend([0] * (depth + 1 - len(counts)))
            counts[depth] += count
    return counts


def _acceptance_by_depth(histogram: Sequence[int]) -> list[float]:
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [reached[d] / reached[d - 1] for d in range(1, len(reached)) if reached[d - 1]]


def _verified_per_token(records: Sequence[Record]) -> float | None:
    verified = sum(r.stats["drafted_tokens"] + r.stats["target_passes"] for r in records)
    given = sum(r.stats["new_tokens"] - 1 for r in records)
    return verified / given if given > 0 else None


def _shares(records: Sequence[Record]) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for stage, spent in record.stats["seconds"].items():
            seconds[stage] += spent
    total = seconds["total"]
    return {s: spent / total for s, spent in seconds.items() if s not in _NOT_STAGES and total > 0}


def mean_score(record: Record) -> float | None:
    """Mean over the facts of one answer; None without ground truth."""
    return fmean(record.scores.values()) if record.scores else None


def _scores(records: Sequence[Record]) -> dict[str, float]:
    facts: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for fact, value in record.scores.items():
            facts[fact].append(value)
    return {fact: fmean(values) for fact, values in facts.items()}


def _retention(records: Sequence[Record], baseline: Sequence[Record]) -> Estimate | None:
    """Score over plain decoding's, both averaged over the same prompts, each prompt over its repeats."""
    ours, theirs = score_by_prompt(records), score_by_prompt(baseline)
    both = [prompt for prompt in ours if prompt in theirs]
    return ratio_of_sums([ours[prompt] for prompt in both], [theirs[prompt] for prompt in both])


def score_by_prompt(records: Sequence[Record]) -> dict[str, float]:
    """Mean score of every prompt with ground truth, over its facts and repeats."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        if (score := mean_score(record)) is not None:
            found[record.prompt_id].append(score)
    return {prompt: fmean(scores) for prompt, scores in found.items()}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
