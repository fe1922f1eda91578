"""Premises of five papers, measured on a pair of models, and whether the methods can be expected to win there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from saccade import theory
from saccade.bench import cost
from saccade.bench.answering import answer_turns
from saccade.bench.cost import Costs
from saccade.bench.metrics import FEWEST_STEPS, Array, Estimate, bootstrap, correlation, ratio_of_sums
from saccade.bench.probe import GAMMA, LEXICON, LOOSE, PROXY, Answer, Probe, lexicon, steps
from saccade.bench.questions import Question
from saccade.draft.heads.head import Head
from saccade.draft.trees.sage import SageTree, rounded
from saccade.errors import InputError
from saccade.inputs.processor import MediaOptions
from saccade.pocket import WORLD
from saccade.vlm import VLM

FEWEST_ANSWERS = 12  # below it an interval over answers is too narrow to be believed
FEWEST_FORGIVEN = 50  # forgiven mismatches that suffice to tell a share of 10 % from one of 20 %
NO_DRAFTER = "not measured: there is no draft VLM (give one with --drafter)"
Found = tuple[dict[str, Any], str]
"""Numbers by name, None where nothing was measured, and the expectation: win, level, lose, too few or not measured, and
in parentheses what qualifies it."""


class Premise(NamedTuple):
    """What a paper rests on, and what follows from it."""

    over: str  # what the method is compared with
    premise: str  # with the paper's number
    rule: str  # of the expectation


PAPERS = {
    "HiViS": Premise(
        "a head that sees the visual tokens without norms on its inputs",
        "visual inputs are far larger than those of text, and attention to them falls after the first layers, and in "
        "the answer (drawn in Figures 2 and 3, without numbers)",
        "win where their RMS differs at least twofold, else level; norms in the head's inputs make up for most of it",
    ),
    "SAGE": Premise(
        "a static tree",
        "the drafter's entropy lasts from step to step (Figure 2: every correlation positive, p < .05)",
        "win where the root's correlation is above that of a series without memory, or where chains as deep as its "
        "trees emit 10 % more a pass than chains as deep as a static tree; lose where they emit less; each for certain",
    ),
    "LVSpec": Premise(
        "a lossless chain, with 97 % of the score kept",
        "of an answer's tokens at most 20 % depend on what is seen, and 60 % do not (Figure 2)",
        "win where at most 10 % of the forgiven mismatches touch content, lose above 20 %",
    ),
    "TABED": Premise(
        "the best single view",
        "no view of the prompt is the best everywhere (Table 1: text ahead of pictures in some data sets)",
        "win where the best view of each prompt is 3 % ahead for certain, lose below 2 %: nothing is to be gained",
    ),
    "DREAM": Premise(
        "a chain of the draft model",
        "a head's step costs little beside a draft model's (TABED, Table 13: T_q/T_p .063 for 68M beside 7B)",
        "win where the chain of a DREAM head is as fast with 10 % fewer tokens per pass, lose where it needs more",
    ),
}


def measure(
    vlm: VLM, asked: Sequence[Question], longest: int, heads: Mapping[str, Head], update: Callable[..., None]
) -> tuple[dict[str, Found], int]:
    """Numbers and expectation by method, and the number of answers; ``heads``: untrained ones, to time their steps."""
    probe, answers = Probe(vlm), list[Answer]()
    has_views, names = bool(probe.views), lexicon(vlm.processor.tokenizer.decode)
    answering = vlm.using("chain", gamma=GAMMA) if has_views else vlm.using("plain")
    options = {"max_new_tokens": longest, "do_sample": False}
    for number, question in enumerate(asked):
        update(number, len(asked), question.id)
        prompt = vlm.processor.prompt(question.turns[0].messages, options=MediaOptions(**question.reading))
        if prompt.media:
            tokens = answer_turns(answering, "", question, 0, options=options, seed=0)[0].record.tokens
            if len(tokens) > 2:
                answers.append(probe.read(prompt, tokens, names if question.task in WORLD else None))
                last = prompt
    if not answers:
        raise InputError("No prompt has a picture and an answer of three tokens; choose others with --prompts.")
    update(len(asked), len(asked), "timing steps")
    draft = vlm.draft_model if has_views else None
    costs = cost.measure(vlm.target, last, draft, vlm.processor.text_only(last), (GAMMA + 1,), heads)
    found: dict[str, Found] = {name: ({}, NO_DRAFTER) for name in PAPERS}
    found["HiViS"] = hivis(probe.sizes, probe.attention)
    if probe.unread:
        found["HiViS"][0]["attention to visual tokens"] = probe.unread
    found["DREAM"] = dream(costs, answers if has_views else [])
    if has_views:
        found |= {"SAGE": sage(answers), "LVSpec": lvspec(answers), "TABED": tabed(answers, probe.lacking)}
    return found, len(answers)


def too_few(count: int, fewest: int = FEWEST_ANSWERS, what: str = "answers") -> str:
    """The expectation where a count is below what a verdict needs; empty elsewhere."""
    more = "--count" if what == "answers" else "--count or --max-new-tokens"
    return f"too few: {count} of {fewest} {what} (raise {more})" if count < fewest else ""


def auc(values: Array, truth: Array) -> float:
    """Probability that a true place has a larger value than another, ties counted half; nan without both."""
    others, true = values[~truth], values[truth][:, None]
    return share(true > others) + share(true == others) / 2


def share(values: Array) -> float:
    """Mean; nan of nothing."""
    return float(values.mean()) if values.size else float("nan")


def over_answers(statistic: Callable[..., float], *parts: Sequence[Array]) -> Estimate | None:
    """A statistic of arrays joined over answers, which are resampled as wholes; None where it is not defined."""

    def of(taken: Array) -> Array:
        return np.array([statistic(*(np.concatenate([part[i] for i in row]) for part in parts)) for row in taken])

    return None if np.isnan(statistic(*map(np.concatenate, parts))) else bootstrap(of, len(parts[0]))


def hivis(sizes: Mapping[str, Sequence[Array]], attention: Mapping[str, Sequence[Array]]) -> Found:
    """How far visual vectors are from those of text (HiViS, Figure 2), and who attends to them (Figure 3).

    Args:
        sizes: root mean squares ``[n]`` of an answer's vectors, by what they are of.
        attention: the share of an answer's attention that visual tokens get in every layer, ``[L]``, by whose it is;
            empty where the attention of the target cannot be read.
    """
    means = {name: float(np.concatenate(each).mean()) for name, each in sizes.items()}
    smaller, larger = sorted((means["inputs, visual"], means["inputs, text"]))
    found: dict[str, Any] = {f"RMS of {name}": mean for name, mean in means.items()}
    for whose, shares in attention.items():
        first, *others = np.mean(shares, 0)
        name = f"attention of {whose} to visual tokens"
        found[f"{name}, first layer"] = float(first)
        if others:
            found[f"{name}, other layers"] = float(np.mean(others))
    few = too_few(len(sizes["inputs, text"]))
    return found, few or ("win" if larger >= 2 * smaller else "level")


def sage(answers: Sequence[Answer]) -> Found:
    """Whether the drafter's entropy lasts from step to step, and whether deeper trees pay without that."""
    hits = [answer.drafted for answer in answers]
    roots, ends = list[Array](), list[Array]()
    for answer in answers:
        starts, accepted = map(np.array, steps(answer.drafted))
        inside = starts + accepted < len(answer.drafted)
        if answer.confidence is None or inside.sum() < FEWEST_STEPS:
            continue
        at_root, at_end = answer.confidence[starts[inside]], answer.confidence[(starts + accepted)[inside]]
        if np.ptp(at_root) and np.ptp(at_end):  # a constant series has no correlation
            roots.append(at_root)
            ends.append(at_end)
    found: dict[str, Any] = {f"answers of {FEWEST_STEPS} steps": len(roots)}
    if few := too_few(len(roots), what=f"answers of {FEWEST_STEPS} steps"):
        return found, few
    root, end = correlation(roots, 1), correlation(ends, 1)
    memoryless = -float(np.mean([1 / len(each) for each in roots]))
    depth, static = depth_of_trees(hits, float(np.mean(np.concatenate(roots)))), SageTree().start.max_depth
    deeper = _ratio(*([len(steps(each, gamma)[0]) for each in hits] for gamma in (static, depth)))
    found |= {
        "entropy after the root and one step later, correlation": root,
        "entropy after the last accepted node, likewise": end,
        "of a series without memory": memoryless,
        "depth of its trees and of the static tree": f"{depth}, {static}",
        "tokens per pass, a chain of the one over a chain of the other": deeper,
    }
    lasts = [each.low is not None and each.low > memoryless for each in (root, end)]
    return found, _expected_of_sage(lasts[0], lasts[1], deeper)


def _expected_of_sage(root_lasts: bool, end_lasts: bool, deeper: Estimate) -> str:
    if root_lasts:
        return "win"
    lasting = "entropy does not last"
    if end_lasts:
        lasting = "entropy lasts after the last accepted node alone: try alpha_of=accepted"
    if (deeper.low or 0) >= 1.1:
        return f"win (by deeper trees; {lasting})"
    is_behind = deeper.high is not None and deeper.high < 1 and not end_lasts
    return f"{'lose' if is_behind else 'level'} ({lasting})"


def depth_of_trees(hits: Sequence[Array], confidence: float) -> int:
    """Depth of SAGE's trees at a mean confidence, once the history of accepted lengths has moved their limit."""
    policy = SageTree()
    accepted = np.mean(np.concatenate([steps(each, policy.d_max)[1] for each in hits]))
    deepest = policy.d_max
    if accepted > policy.high:
        deepest = policy.ceiling
    elif accepted < policy.low:
        deepest = policy.d_min
    return rounded(policy.depth_at(confidence, deepest))


def lvspec(answers: Sequence[Answer]) -> Found:
    """Whether visual relevance tells harmless mismatches from others."""
    among = [answer.forgiven[~answer.drafted] for answer in answers]
    found: dict[str, Any] = {
        "mismatches": sum(map(len, among)),
        f"of them among the {LOOSE:.0%} least relevant tokens": over_answers(share, among),
    }
    few = verdict = ""
    for truth in (PROXY, LEXICON):  # the last that is known decides
        known = [answer for answer in answers if truth in answer.depends]
        if not known:
            found["truth"] = "the proxy alone: a token counts where the target chooses another without the pictures"
            continue
        relevance = [answer.relevance[~answer.drafted] for answer in known]
        touches = [answer.touches[truth][~answer.drafted] for answer in known]
        loosely = [answer.touches[truth][answer.forgiven] for answer in known]
        content = over_answers(share, loosely)
        found |= {
            f"tokens that depend on what is seen, {truth}": over_answers(share, [a.depends[truth] for a in known]),
            f"AUC of relevance on mismatches, {truth}": over_answers(auc, relevance, touches),
            f"forgiven mismatches that touch content, {truth}": content,
        }
        few = too_few(len(answers)) or too_few(sum(map(len, loosely)), FEWEST_FORGIVEN, "forgiven mismatches")
        verdict = (
            "" if content is None else "win" if content.value <= 0.1 else "lose" if content.value > 0.2 else "level"
        )
    return found, few or verdict


def _ratio(above: Any, below: Any) -> Estimate:
    """Ratio of sums over answers, the lower of which is never zero."""
    found = ratio_of_sums(above, below)
    assert found is not None
    return found


def tabed(answers: Sequence[Answer], lacking: dict[str, str]) -> Found:
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
    verdict = "win" if (gain.low or 0) >= 1.03 else "lose" if gain.value < 1.02 else "level"
    return found, too_few(len(answers)) or verdict


def dream(costs: Costs, answers: Sequence[Answer]) -> Found:
    """What drafting costs, and how good a head must be to pay beside the draft model."""
    one, verify = costs.target_seconds(1), costs.target_seconds(GAMMA + 1) / costs.target_seconds(1)
    found: dict[str, Any] = {f"T_p({GAMMA + 1}) / T_p(1)": verify}
    steps_of = {"fresh " + name: seconds / one for name, seconds in costs.heads.items()}
    steps_of |= {"draft model": costs.draft[1] / one} if costs.draft else {}
    found |= {f"T_q / T_p, {name}": ratio for name, ratio in steps_of.items()}
    if not answers or not costs.draft:
        return found, NO_DRAFTER
    hits = [answer.drafted for answer in answers]
    length = _ratio([len(each) for each in hits], [len(steps(each)[0]) for each in hits])
    found["tokens of the target that the drafter predicts"] = over_answers(np.mean, hits)
    found[f"tokens per pass of its chain of {GAMMA}"] = length
    speed = theory.speedup(length.value, GAMMA, steps_of["draft model"], verify_cost=verify)
    found["its expected speed over plain decoding"] = speed
    if "fresh dream" not in steps_of:
        return found, "not measured: a DREAM head cannot be made for this target"
    needed = speed * (GAMMA * steps_of["fresh dream"] + verify)
    found["tokens per pass with which DREAM's chain is as fast"] = needed
    verdict = "win" if needed <= 0.9 * length.value else "level" if needed <= length.value else "lose"
    return found, too_few(len(answers)) or verdict
