"""What the measured premises of five papers let one expect of their methods, each with its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.nn.functional import cosine_similarity

from saccade import theory
from saccade.bench.cost import Costs
from saccade.bench.metrics import Array, Estimate, bootstrap, ratio_of_sums
from saccade.options import LVSpecOptions
from tools.results.paper_tables import FEWEST_STEPS, correlation
from tools.results.probe import GAMMA, Answer, Moments, steps

LOOSE = LVSpecOptions().loose_share
PAPERS = {
    "HiViS": (
        "a head that sees the visual tokens without norms on its inputs",
        "visual inputs are far larger than those of text (drawn in Figure 2, without numbers)",
        "win where their RMS differs at least twofold; norms in the head's inputs make up for most of it",
    ),
    "SAGE": (
        "a static tree",
        "the drafter's entropy lasts from step to step (Figure 2: every correlation positive, p < .05)",
        "win where the root's correlation is above 0, level where only the last accepted node's is: alpha_of=accepted",
    ),
    "LVSpec": (
        "a lossless chain, with 97 % of the score kept",
        "of an answer's tokens at most 20 % depend on what is seen, and 60 % do not (Figure 2)",
        "win where at most 10 % of the forgiven mismatches touch content, lose above 20 %",
    ),
    "TABED": (
        "the best single view",
        "no view of the prompt is the best everywhere (Table 1: text ahead of pictures in some data sets)",
        "win where the best view of each prompt is 3 % ahead for certain, lose below 2 %: nothing is to be gained",
    ),
    "DREAM": (
        "a chain of the draft model",
        "a head's step costs little beside a draft model's (TABED, Table 13: T_q/T_p .063 for 68M beside 7B)",
        "win where the chain of a DREAM head is as fast with 10 % fewer tokens per pass, lose where it needs more",
    ),
}
"""Method -> what it is compared with, its premise and the paper's number, and the rule of the expectation."""


def auc(values: Array, truth: Array) -> float:
    """Probability that a true place has a larger value than another, ties counted half; nan without both."""
    others, true = np.sort(values[~truth]), values[truth]
    if not len(others) or not len(true):
        return float("nan")
    below = np.searchsorted(others, true) + np.searchsorted(others, true, side="right")
    return float(below.mean() / 2 / len(others))


def over_answers(statistic: Callable[..., float], *parts: Sequence[Array]) -> Estimate:
    """A statistic of arrays joined over answers, which are resampled as wholes."""

    def of(taken: Array) -> Array:
        return np.array([statistic(*(np.concatenate([part[i] for i in row]) for part in parts)) for row in taken])

    return bootstrap(of, len(parts[0]))


def hivis(moments: dict[str, tuple[Moments, Moments]]) -> tuple[dict[str, Any], str]:
    """The modality gap, of what the drafter reads and of the target's last states."""
    found, ratio = dict[str, Any](), 1.0
    for place, (visual, text) in reversed(moments.items()):
        ratio = visual.rms / max(text.rms, 1e-12)
        found[f"RMS of {place}, visual and text"] = [visual.rms, text.rms]
        found[f"cosine of the means of {place}"] = float(cosine_similarity(visual.mean, text.mean, dim=0))
        distance = (visual.mean - text.mean).square().mean().sqrt()
        found[f"distance of the means of {place}, in RMS of text"] = float(distance) / max(text.rms, 1e-12)
    return found, "win" if max(ratio, 1 / max(ratio, 1e-12)) >= 2 else "level"


def sage(answers: Sequence[Answer]) -> tuple[dict[str, Any], str]:
    """Whether the drafter's confidence lasts from step to step."""
    roots, ends, lengths = list[Array](), list[Array](), list[Array]()
    for answer in answers:
        starts, accepted = map(np.array, steps(next(iter(answer.hits.values()))))
        inside = starts + accepted < len(answer.relevance)
        if answer.confidence is not None and inside.sum() >= FEWEST_STEPS:
            roots.append(answer.confidence[starts[inside]])
            ends.append(answer.confidence[(starts + accepted)[inside]])
            lengths.append(accepted[inside].astype(float))
    if not roots:
        return {}, f"not measured: no answer has {FEWEST_STEPS} steps; allow longer ones with --max-new-tokens"
    root, end = correlation(roots, 1), correlation(ends, 1)
    found = {
        "entropy behind the root and one step later, correlation": root,
        "entropy behind the last accepted node, likewise": end,
        "of a series without memory": -float(np.mean([1 / len(each) for each in roots])),
        "entropy behind the last accepted node and the next accepted length": correlation(ends, 1, lengths),
        "answers": len(roots),
    }
    lasting = [each.low is not None and each.low > 0 for each in (root, end)]
    return found, "win" if lasting[0] else "level" if lasting[1] else "lose"


def lvspec(answers: Sequence[Answer]) -> tuple[dict[str, Any], str]:
    """Whether visual relevance tells harmless mismatches from others."""
    misses = [~next(iter(answer.hits.values())) for answer in answers]
    low = [answer.relevance <= np.quantile(answer.relevance, LOOSE) for answer in answers]
    found: dict[str, Any] = {
        "mismatches": int(sum(each.sum() for each in misses)),
        f"of them among the {LOOSE:.0%} least relevant tokens": over_answers(
            lambda missed, loose: float(loose[missed].mean()) if missed.any() else float("nan"), misses, low
        ),
    }
    share = float("nan")
    truths = {"token without the pictures (proxy)": {i: answer.grounded for i, answer in enumerate(answers)}}
    if known := {i: answer.content for i, answer in enumerate(answers) if answer.content is not None}:
        truths["lexicon"] = known
    for name, truth in truths.items():
        relevance = [answers[i].relevance[misses[i]] for i in truth]
        true = [each[misses[i]] for i, each in truth.items()]
        loose = [low[i][misses[i]] for i in truth]
        joined = np.concatenate(true)[np.concatenate(loose)]
        share = float(joined.mean()) if len(joined) else float("nan")
        found[f"AUC of relevance on mismatches, {name}"] = over_answers(auc, relevance, true)
        found[f"forgiven mismatches that touch content, {name}"] = share
    if not known:
        found["truth"] = "none at hand; a mismatch counts as content where the target needs the pictures for its token"
    if not share >= 0:
        return found, "not measured: the drafter errs too seldom; give more prompts with --count"
    return found, "win" if share <= 0.1 else "lose" if share > 0.2 else "level"


def _ratio(above: Any, below: Any) -> Estimate:
    """Ratio of sums over answers, all of which weigh something."""
    found = ratio_of_sums(above, below)
    assert found is not None
    return found


def tabed(answers: Sequence[Answer], lacking: dict[str, str]) -> tuple[dict[str, Any], str]:
    """How much the success of the views differs from prompt to prompt."""
    tokens = np.array([len(answer.relevance) for answer in answers], float)
    passes = {view: np.array([len(steps(a.hits[view])[0]) for a in answers], float) for view in answers[0].hits}
    found: dict[str, Any] = {f"tokens per pass, {view}": _ratio(tokens, each) for view, each in passes.items()}
    found |= {f"view {view}": reason for view, reason in lacking.items()}
    if len(passes) < 2:
        return found, "not measured: the draft model has one view"
    best = min(passes.values(), key=lambda each: float(each.sum()))
    fewest = np.min(list(passes.values()), axis=0)
    gain = _ratio(best, fewest)
    found["prompts on which another view is ahead of the best"] = float((fewest < best).mean())
    found["tokens per pass of the best view of each prompt over those of the best view"] = gain
    return found, "win" if (gain.low or 0) >= 1.03 else "lose" if gain.value < 1.02 else "level"


def dream(costs: Costs, answers: Sequence[Answer], stats: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """What drafting costs, and how good a head must be to pay beside the draft model."""
    one, verify = costs.target_seconds(1), costs.target_seconds(GAMMA + 1) / costs.target_seconds(1)
    found: dict[str, Any] = {f"T_p({GAMMA + 1}) / T_p(1)": verify}
    steps_of = {"fresh " + name: seconds / one for name, seconds in costs.heads.items()}
    steps_of |= {"draft model": costs.draft[1] / one} if costs.draft else {}
    found |= {f"T_q / T_p, {name}": ratio for name, ratio in steps_of.items()}
    if not answers or not costs.draft:
        return found, "not measured: there is no draft VLM; give one with --drafter"
    hits = [next(iter(answer.hits.values())) for answer in answers]
    length = _ratio([len(each) for each in hits], [len(steps(each)[0]) for each in hits])
    seconds = [(each["seconds"]["draft"], each["seconds"]["verify"]) for each in stats]
    found["tokens of the target that the drafter predicts"] = over_answers(np.mean, hits)
    found[f"tokens per pass of its chain of {GAMMA}"] = length
    shares = [draft / (draft + verification) for draft, verification in seconds if verification]
    found["drafting's share of a step, median"] = float(np.median(shares))
    speed = theory.speedup(length.value, GAMMA, steps_of["draft model"], verify_cost=verify)
    found["its expected speed over plain decoding"] = speed
    if "fresh dream" not in steps_of:
        return found, "not measured: a DREAM head cannot be made for this target"
    needed = speed * (GAMMA * steps_of["fresh dream"] + verify)
    found["tokens per pass with which DREAM's chain is as fast"] = needed
    return found, "win" if needed <= 0.9 * length.value else "level" if needed <= length.value else "lose"
