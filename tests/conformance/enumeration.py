"""Sampling against exact enumeration: small vocabularies, all sequences, one chi-squared test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.target_model.blocks import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Rule

Process = Callable[[Tensor, Tensor], Tensor]
"""Logits processors: ``(ids [n, S], logits [n, V])`` to scores."""


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-squared test; sequences expected fewer than five times are counted together.

    0 when something was seen that cannot happen.
    """
    if counts[probabilities == 0].sum() > 0:
        return 0.0
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    used = expected > 0
    statistic = ((seen - expected)[used] ** 2 / expected[used]).sum()
    freedom = torch.tensor(float(used.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def histogram(sequences: Tensor, vocab: int) -> Tensor:
    """``[V ** L]`` counts of ``[n, L]`` sequences."""
    weights = vocab ** torch.arange(sequences.shape[1] - 1, -1, -1)
    return torch.bincount((sequences * weights).sum(-1), minlength=vocab ** sequences.shape[1])


@torch.no_grad()
def exact(model: Any, prompt: list[int], length: int, process: Process) -> Tensor:
    """``[V ** L]`` probability of every continuation of ``prompt`` under a causal model, by full forwards."""
    vocab = model.config.vocab_size
    ids, total = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        probabilities = process(ids, model(input_ids=ids).logits[:, -1]).double().softmax(-1)
        total = (total[:, None] * probabilities).flatten()
        ids = torch.cat([ids.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(ids))[:, None]], 1)
    return total


# --------------------------------------------------------------------------- without any model


class Table:
    """A random language model of order ``depth``: every context has its own distribution.

    Args:
        sharpness: standard deviation of the logits.
        keep: how many tokens of each context have any probability.
    """

    def __init__(self, vocab: int, depth: int, seed: int, sharpness: float = 1.5, keep: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self._logits = []
        for d in range(depth + 1):
            logits = sharpness * torch.randn(vocab**d, vocab, generator=generator)
            if keep is not None:
                logits[logits < logits.topk(keep, -1).values[:, -1:]] = float("-inf")
            self._logits.append(logits)

    def logits(self, contexts: Tensor) -> Tensor:
        """``[..., V]`` after contexts ``[..., d]``."""
        depth = contexts.shape[-1]
        weights = self.vocab ** torch.arange(depth - 1, -1, -1)
        return self._logits[depth][(contexts * weights).sum(-1)]

    def exact(self, length: int) -> Tensor:
        """``[V ** length]`` probability of every sequence."""
        total = torch.ones(1, dtype=torch.float64)
        for d in range(length):
            total = (total[:, None] * self._logits[d].double().softmax(-1)).flatten()
        return total


class ManyUniforms:
    """Stands in for `Uniforms` where there are too many rows for a generator each."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def take(self, count: int) -> Tensor:
        return torch.rand(self._rows, count)


@dataclass(frozen=True)
class Trial:
    """One verification pass for many rows, without any model."""

    target: Table  # gives p
    draft: Table  # gives q
    policy: Any
    proposer: Any
    rule: Rule
    uniforms: ManyUniforms  # of proposer and rule

    def sequences(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """``[rows, length]`` tokens, and how many of each row were accepted drafts.

        What the pass leaves open is drawn from the target itself.
        """
        tree = self._grow(rows)
        levels, width = self.rule.uniforms(tree.max_depth, tree.max_children)
        numbers = self.uniforms.take(levels * width).view(rows, levels, width)
        scores = self._scores(tree)
        verdict = self.rule.judge(range(rows), tree, scores, numbers, ForwardOutput(scores))
        accepted = tree.tokens.gather(1, verdict.path)[:, 1:]
        blank = torch.zeros(rows, length + 1, dtype=torch.long)
        blank[:, : accepted.shape[1]] = accepted
        blank.scatter_(1, verdict.count[:, None], verdict.token[:, None])
        for place in range(length):
            drawn = self.target.logits(blank[:, :place]).softmax(-1).multinomial(1)[:, 0]
            blank[:, place] = torch.where(place > verdict.count, drawn, blank[:, place])
        return blank[:, :length], verdict.count

    def _grow(self, rows: int) -> DraftTree:
        growth = self.policy.begin(range(rows), torch.zeros(rows, dtype=torch.long), self.proposer)
        empty = torch.zeros(rows, 1, 0, dtype=torch.long)
        frontier = growth.expand(self.draft.logits(empty))
        ran = torch.zeros(rows, 0, dtype=torch.long)
        while frontier is not None:
            ran = torch.cat([ran, frontier.tokens], 1)
            paths = _paths(ran, frontier.attention_mask, frontier.depth)
            frontier = growth.expand(self.draft.logits(paths))
        return growth.tree()

    def _scores(self, tree: DraftTree) -> Tensor:
        rows, size = tree.tokens.shape
        scores = torch.zeros(rows, size, self.target.vocab)
        for depth in range(tree.max_depth + 1):
            here = tree.depth.expand(rows, -1) == depth
            if here.any():
                paths = _paths(tree.tokens, tree.ancestors, depth + 1)[..., 1:]  # without the root
                scores = torch.where(here[..., None], self.target.logits(paths), scores)
        return scores


def p_of(setup: Trial, rows: int, length: int, seed: int = 0) -> float:
    """How likely the target draws the sequences of a trial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sequences, accepted = setup.sequences(rows, length)
    assert accepted.float().mean() > 0
    return p_value(histogram(sequences, setup.target.vocab), setup.target.exact(length))


def _paths(tokens: Tensor, allow: Tensor | None, depth: int) -> Tensor:
    """``[B, W, depth]`` tokens of the entries that each of W sees, in order; None for a chain's last one."""
    if allow is None:
        return tokens[:, None]
    allow = allow.expand(tokens.shape[0], -1, -1)
    places = allow.int().argsort(dim=-1, descending=True, stable=True)[..., :depth]
    return tokens[:, None].expand(-1, allow.shape[1], -1).gather(2, places)
