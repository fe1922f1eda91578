"""Logits and scores of the emitted tokens, for ``output_logits`` and ``output_scores``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.tree import DraftTree
from saccade.engine import Engine
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Prefill
from saccade.target.context import Context
from saccade.verify.rule import Judge, Rule, Verdict


class Recorder:
    """Stands between an engine's target and its rule, and keeps the rows of logits that tokens came from.

    Args:
        engine: the engine to listen to; it stays as it is.
        do_sample: which rule is in force.
        batch: rows.

    Attributes:
        engine: does the same as the given one and is recorded.
        session: to run it in.
    """

    def __init__(self, engine: Engine, do_sample: bool, batch: int) -> None:
        self._rule = _Rule(engine.rule(do_sample))
        self._context = self._rule.context = _Context(engine.target, batch, 0)
        self.engine = Engine(engine.target, engine.drafter, self._rule)
        self.session = self.engine.open_on(self._context)
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]

    def take(self, tokens: Sequence[Sequence[int]]) -> None:
        """Keep what belongs to the tokens that a step emitted."""
        for row, new in enumerate(tokens):
            self._scores[row].append(self._rule.scores[row, : len(new)])
            self._logits[row].append(self._rule.logits[row, : len(new)])

    def scores(self, width: int) -> tuple[Tensor, ...]:
        """Processed logits ``[B, V]`` of ``width`` tokens, zeros behind a row's end."""
        return _columns(self._scores, width)

    def logits(self, width: int) -> tuple[Tensor, ...]:
        """Raw logits, likewise."""
        return _columns(self._logits, width)


class _Context(Context):
    """Remembers its latest logits ``[B, N, V]``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._latest: list[Tensor] = []

    def load(self, row: int, prompt: Prompt, *more: Any, **options: Any) -> Prefill:
        result = super().load(row, prompt, *more, **options)
        self._latest.append(result.logits[None, None])
        return result

    def forward(self, tokens: Tensor, allow: Tensor, depth: Tensor) -> Tensor:
        self._latest = [super().forward(tokens, allow, depth)]
        return self._latest[0]

    @property
    def logits(self) -> Tensor:
        return torch.cat(self._latest)


class _Rule:
    """A rule that keeps scores and logits ``[B, D + 1, V]`` along the path that it accepted."""

    context: _Context
    scores: Tensor
    logits: Tensor
    _judge: Judge

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.lossless = rule.lossless
        self.samples = rule.samples
        self.uniforms = rule.uniforms

    def open(self, context: Context) -> _Rule:
        self._judge = self._rule.open(context)
        return self

    def read(self, row: int, prompt: Prompt) -> None:
        self._judge.read(row, prompt)

    def judge(self, tree: DraftTree, scores: Tensor, uniforms: Tensor | None) -> Verdict:
        verdict = self._judge.judge(tree, scores, uniforms)
        at = verdict.path[..., None].expand(-1, -1, scores.shape[-1])
        self.scores = scores.gather(1, at).float()
        self.logits = self.context.logits.gather(1, at).float()
        return verdict


def _columns(rows: Sequence[Sequence[Tensor]], width: int) -> tuple[Tensor, ...]:
    padded = pad_sequence([torch.cat(list(row)) for row in rows], batch_first=True)
    return tuple(padded[:, :width].unbind(1))
