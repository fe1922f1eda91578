"""Logits and scores of the emitted tokens, for ``output_logits`` and ``output_scores``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.tree import DraftTree
from saccade.engine import Engine
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PromptRead
from saccade.target.pieces import Reading
from saccade.verify.rule import Judge, Rule, Verdict


class Recorder:
    """Stands between an engine's target and its rule, and keeps the rows of logits that tokens came from.

    Args:
        engine: the engine to listen to; it stays as it is.
        do_sample: which rule is in force.
        rows: how many.

    Attributes:
        engine: does the same as the given one and is recorded, in a batch of these rows alone.
    """

    def __init__(self, engine: Engine, do_sample: bool, rows: int) -> None:
        self._rule = _Rule(engine.rule(do_sample))
        self.engine = Engine(engine.target, engine.drafter, self._rule)
        self._scores: list[list[Tensor]] = [[] for _ in range(rows)]
        self._logits: list[list[Tensor]] = [[] for _ in range(rows)]

    def take(self, tokens: Sequence[Sequence[int]]) -> None:
        """Keep what belongs to the tokens that a step emitted; row i is in slot i."""
        for row, new in enumerate(tokens):
            if new:
                scores, logits = self._rule.latest[row]
                self._scores[row].append(scores[: len(new)])
                self._logits[row].append(logits[: len(new)])

    def scores(self, width: int) -> tuple[Tensor, ...]:
        """Processed logits ``[B, V]`` of ``width`` tokens, zeros behind a row's end."""
        return _columns(self._scores, width)

    def logits(self, width: int) -> tuple[Tensor, ...]:
        """Raw logits, likewise."""
        return _columns(self._logits, width)


class _Rule:
    """A rule that keeps scores and logits ``[D + 1, V]`` along the path that it accepted, per row."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.lossless = rule.lossless
        self.samples = rule.samples
        self.uniforms = rule.uniforms
        self.latest: dict[int, tuple[Tensor, Tensor]] = {}
        self._judge: Judge

    def open(self, context: Context) -> _Rule:
        self._judge = self._rule.open(context)
        return self

    def read(self, row: int, prompt: Prompt, read: PromptRead) -> None:
        self._judge.read(row, prompt, read)

    def judge(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, uniforms: Tensor | None, reading: Reading
    ) -> Verdict:
        verdict = self._judge.judge(rows, tree, scores, uniforms, reading)
        at = verdict.path[..., None].expand(-1, -1, scores.shape[-1])
        along = (t.gather(1, at).float().unbind() for t in (scores, reading.logits))
        for row, kept, raw in zip(rows, *along, strict=True):
            self.latest[row] = kept, raw
        return verdict


def _columns(rows: Sequence[Sequence[Tensor]], width: int) -> tuple[Tensor, ...]:
    padded = pad_sequence([torch.cat(list(row)) for row in rows], batch_first=True)
    return tuple(padded[:, :width].unbind(1))
