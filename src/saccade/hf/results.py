"""Tokens, scores, logits and the KV cache in the form in which `generate` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.engine import Engine
from saccade.inputs.prompt import Prompt
from saccade.target.cache import RowCache
from saccade.target.context import Context
from saccade.target.forward import ForwardOutput
from saccade.target.prefill import PrefillResult
from saccade.tree import DraftTree
from saccade.verify.rule import Judge, Rows, Rule, Verdict


def fill(theirs: Any, ours: RowCache, mask: Tensor, width: int) -> None:
    """Copy the committed entries of all rows into an empty cache of transformers, in the columns of a padded batch.

    Entries of padding and of columns behind a row's end are zeros; `generate` has padding tokens' entries there, which
    every mask hides.
    Shapes: mask ``[B, S]``.
    """
    rows = [ours.export(row) for row in range(len(mask))]
    for layer in range(len(rows[0])):
        keys, values = (
            torch.cat([_placed(row[layer][which], kept, width - 1) for row, kept in zip(rows, mask, strict=True)])
            for which in (0, 1)
        )
        theirs.update(keys, values, layer)


def _placed(held: Tensor, kept: Tensor, width: int) -> Tensor:
    """One row's entries ``[1, H, n, D]`` at their columns, ``[1, H, width, D]``; ``kept`` ``[S]`` as in the mask."""
    prompt = kept.nonzero().flatten().to(held.device)
    placed = held.new_zeros(1, held.shape[1], width, held.shape[3])
    placed[:, :, prompt] = held[:, :, : len(prompt)]
    answer = held[:, :, len(prompt) :][:, :, : width - len(kept)]
    placed[:, :, len(kept) : len(kept) + answer.shape[2]] = answer
    return placed


class Sheet:
    """New tokens of all rows; a column is complete when every unfinished row has reached it.

    Shapes: streamer ``[B]``.
    """

    def __init__(self, rows: int, streamer: Any, pad: int, run_on: bool) -> None:
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._columns: list[list[int]] = []
        self._streamer = streamer
        self._pad = pad
        self._run_on = run_on

    def take(self, tokens: Sequence[Sequence[int]], finished: Sequence[bool]) -> None:
        """Add the tokens of one step."""
        for row, new in zip(self._rows, tokens, strict=True):
            row.extend(new)
        open_ = [len(row) for row, ended in zip(self._rows, finished, strict=True) if self._run_on or not ended]
        width = min(open_) if open_ else max(map(len, self._rows))
        for place in range(len(self._columns), width):
            column = [row[place] if place < len(row) else self._pad for row in self._rows]
            self._columns.append(column)
            if self._streamer is not None:
                self._streamer.put(torch.tensor(column))

    @property
    def width(self) -> int:
        """Number of complete columns."""
        return len(self._columns)

    @property
    def tokens(self) -> Tensor:
        """``[B, width]`` ids."""
        return torch.tensor(self._columns).T


class Recorder:
    """Recorder of the logits behind every emitted token, wrapped around an engine's rule."""

    def __init__(self, engine: Engine, do_sample: bool, rows: int) -> None:
        self._rule = _Rule(engine.rule(do_sample))
        self.engine = Engine(engine.target, engine.drafter, self._rule)  # the engine to record; it stays unchanged
        self._scores: list[list[Tensor]] = [[] for _ in range(rows)]
        self._logits: list[list[Tensor]] = [[] for _ in range(rows)]

    def take(self, tokens: Sequence[Sequence[int]]) -> None:
        """Record the logits of the tokens of one step; row i is in slot i."""
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
    """A rule that records scores and logits ``[D + 1, V]`` along the accepted path, per row."""

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

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self._judge.read(row, prompt, prefill)

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        verdict = self._judge.judge(rows, tree, scores, uniforms, output)
        at = verdict.path[..., None].expand(-1, -1, scores.shape[-1])
        along = (t.gather(1, at).float().unbind() for t in (scores, output.logits))
        for row, kept, raw in zip(rows, *along, strict=True):
            self.latest[row] = kept, raw
        return verdict


def _columns(rows: Sequence[Sequence[Tensor]], width: int) -> tuple[Tensor, ...]:
    padded = pad_sequence([torch.cat(list(row)) for row in rows], batch_first=True)
    return tuple(padded[:, :width].unbind(1))
