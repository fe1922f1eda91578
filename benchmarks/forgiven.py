"""What accepting one draft token costs that the target would not have chosen, and which signals tell it beforehand.

At every mismatch of a strict chain of 10 the draft's token takes the target's place, the target continues by itself,
and both answers are scored: `python -m benchmarks.forgiven TASK PROMPTS`.
"""

import sys
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

import saccade
from saccade.bench.premises import auc
from saccade.bench.questions import FIRST_PICTURE
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.pocket import draw, score
from saccade.verify.loose import LVSpec, LVSpecJudge
from tools.results.lexicon import is_scored

LONGEST = 128  # tokens of an answer


@dataclass(frozen=True)
class Watched(LVSpec):
    """The strict rule, which notes each step's root, accepted tokens, own token, the draft's other one and signals."""

    share: float = 0.0
    shift: bool = False
    steps: list[Any] = field(default_factory=list)

    def open(self, context: Any) -> LVSpecJudge:
        return Watching(self, context)


class Watching(LVSpecJudge):
    def judge(self, rows: Any, tree: Any, scores: Any, uniforms: Any, output: Any) -> Any:
        verdict = super().judge(rows, tree, scores, uniforms, output)
        parent, token, signals = int(verdict.count[0]), None, dict[str, float]()
        if parent + 1 < tree.size and bool(tree.valid[0, parent + 1]):
            logs, token = scores[0, parent].float().log_softmax(-1), int(tree.tokens[0, parent + 1])
            signals = {
                "odds of the target's own token": float(logs.max() - logs[token]),
                "relevance (LVSpec)": float(self.relevance(rows, tree, output)[0, parent + 1]),
                "certainty (FLy)": float((logs * logs.exp()).sum()),
                "lexicon (oracle)": float(is_scored()[token]),
            }
        self._rule.steps.append((int(tree.tokens[0, 0]), parent, int(verdict.token[0]), token, signals))
        return verdict


def main(task: str, count: int) -> None:
    vlm = saccade.load("pocket", dtype="float32", threads=1)
    strict = Engine(vlm.target, ModelDrafter(vlm.draft_model, Chain(10)))
    found: list[dict[str, float]] = []
    for number in range(count):
        sample, rule = draw(FIRST_PICTURE + number, task), Watched()
        prompt = vlm.processor.prompt(sample.messages())
        (answer,) = Engine(vlm.target, strict.drafter, rule).generate([Request(prompt)], max_new_tokens=LONGEST)
        session, place = strict.open(1), int(rule.steps[0][0] != prompt.ids[-1])  # 1 where prefill drafts nothing
        for _, accepted, own, token, signals in rule.steps:
            place += accepted
            if token is not None and place < len(answer.tokens) - 1:
                assert answer.tokens[place] == own
                prefix = [*answer.tokens[:place], token]
                request = Request(Prompt((*prompt.ids, *prefix), prompt.media))
                (other,) = strict.generate([request], session, max_new_tokens=LONGEST - len(prefix))
                texts = [vlm.processor.decode(tokens) for tokens in (answer.tokens, [*prefix, *other.tokens])]
                kept, left = (fmean(score(task, text, sample.facts).values()) for text in texts)
                found.append({**signals, "cost": kept - left})
            place += 1
    values = {name: np.array([one[name] for one in found]) for name in found[0]}
    cost, words = values["cost"], values["lexicon (oracle)"] > 0
    print(
        f"{len(found)} mismatches, mean cost {cost[words].mean():.3f} of scored words, {cost[~words].mean():.3f} else"
    )
    odds = np.exp(-values["odds of the target's own token"])
    for low, high in ((0.6, 1.01), (0.5, 0.6), (0.3, 0.5), (0.1, 0.3), (0.0, 0.1)):
        taken = (odds >= low) & (odds < high)
        print(f"  {low:.1f} times as probable or more: {taken.sum()}, mean cost {cost[taken].mean():.3f}")
    print("signal | AUC of scored words | AUC of a cost above 0 | mean cost of the lowest 80 %")
    shuffled = np.random.default_rng(0).permutation(len(cost))
    for name, signal in {**values, "random": shuffled.astype(float)}.items():
        order = shuffled[np.argsort(signal[shuffled], kind="stable")]  # ties at random
        lowest = cost[order[: int(0.8 * len(cost))]].mean()
        print(f"{name} | {auc(signal, words):.2f} | {auc(signal, cost > 0):.2f} | {lowest:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
