"""One verification pass for forty thousand rows, held to exact enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from enumeration import ManyUniforms, Table, Trial, histogram, p_value
from random_trees import NaiveTree
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.draft.trees.policy import DrawProposer, TopProposer
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Processing, Sampling, Verdict

ROWS, VOCAB, LENGTH = 40_000, 4, 3
LIKELY, UNLIKELY = 1e-3, 1e-9
"""p-values of a chi-squared test over all sequences; seeds are fixed, so a right rule stays above the first forever,
and a planted mistake falls below the second."""


def random_tree(seed: int, count: int, valid: int, vocab: int = VOCAB) -> NaiveTree:
    """Depth at most two, siblings with different tokens."""
    generator = torch.Generator().manual_seed(seed)
    parents, tokens = [0], [0]
    while len(parents) < count:
        parent = int(torch.randint(min(len(parents), 3), (1,), generator=generator))
        token = int(torch.randint(vocab, (1,), generator=generator))
        taken = {tokens[n] for n in range(1, len(parents)) if parents[n] == parent}
        depth_of_parent = 0 if parent == 0 else 1 if parents[parent] == 0 else 2
        if token not in taken and depth_of_parent < 2:
            parents.append(parent)
            tokens.append(token)
    return NaiveTree(tuple(parents), tuple(tokens), tuple(i < valid for i in range(count)))


@dataclass(frozen=True)
class GivenTrees(Trial):
    """Verification of trees that are there already, whatever made them."""

    given: DraftTree | None = None

    def _grow(self, rows: int) -> DraftTree:
        assert self.given is not None
        return self.given


def p_of(trial: Trial) -> float:
    sequences, accepted = trial.sequences(ROWS, LENGTH)
    assert accepted.any()
    return p_value(histogram(sequences, trial.target.vocab), trial.target.exact(LENGTH))


def target(**options: Any) -> Table:
    return Table(VOCAB, LENGTH, seed=1, **options)


WARPERS: dict[str, list[Any]] = {
    "temperature": [hf.TemperatureLogitsWarper(0.6)],
    "top_p": [hf.TemperatureLogitsWarper(1.5), hf.TopPLogitsWarper(0.7)],
    "top_k": [hf.TopKLogitsWarper(2)],
}


class Warped:
    """The rule behind the logits processors, as the engine calls it."""

    lossless, samples = True, True

    def __init__(self, processing: Processing, rule: Any) -> None:
        self._processing, self._rule = processing, rule

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        numbers: tuple[int, int] = self._rule.uniforms(max_depth, max_children)
        return numbers

    def judge(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, uniforms: Any, output: ForwardOutput
    ) -> Verdict:
        processed = self._processing(tree, scores, [[0]] * len(scores))
        verdict: Verdict = self._rule.judge(rows, tree, processed, uniforms, output)
        return verdict


class WarpedTable(Table):
    def __init__(self, raw: Table, processing: Processing) -> None:
        self.vocab = raw.vocab
        self._logits = [processing.warp(logits) for logits in raw._logits]


def warped_p(name: str, policy: Any, drawn: bool, rule: Any = None) -> float:
    """Scores are raw logits; only the rule's own processing warps p, only the proposer's own warps q."""
    processing, uniforms = Processing([WARPERS[name]]), ManyUniforms(ROWS)
    proposer: Any = DrawProposer(processing.warp, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    expected = WarpedTable(target(), processing)

    class RawScores(Trial):
        def _scores(self, tree: DraftTree) -> Tensor:
            raw = Trial(target(), self.draft, policy, proposer, self.rule, uniforms)
            return raw._scores(tree)

    rule = Warped(processing, rule or Sampling())
    return p_of(RawScores(expected, Table(VOCAB, LENGTH, seed=2), policy, proposer, rule, uniforms))
