"""A padded batch of `generate`: its rows' limits, processors and criteria; its tokens, scores, logits and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import MaxLengthCriteria, logits_process

from saccade.engine import Engine
from saccade.engine.row import RowPlan
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.processors import PREFIX_FREE, criterion_of_row, is_stateful, name_of, of_row, process
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Rows, at_nodes
from saccade.verify.rule import Judge, Verdict

_PENALTIES = ("RepetitionPenalty", "EncoderRepetitionPenalty", "NoRepeatNGram", "EncoderNoRepeatNGram")
_READ_IDS = tuple(
    getattr(logits_process, f"{name}LogitsProcessor")
    for name in (*_PENALTIES, "SequenceBias", "NoBadWords", "Watermark")
)
"""Processors of transformers that read which ids there are, and not how many."""


class PaddedRows:
    """The plans of the rows of a padded batch of ids ``[B, S]``.

    Processors and criteria count the padding, as they do in `generate`: lengths measured on the padded prompt stay
    valid. Those that read ids see padding on the left, as in `generate`, but none on the right, where `generate` has no
    right answer: a row's tokens are those of its prompt alone.
    """

    def __init__(
        self,
        ids: Tensor,
        mask: Tensor,
        each: int,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        do_sample: bool = False,
        with_scores: bool = False,
    ) -> None:
        self._ids = ids
        self._kept = mask.bool()
        self._padding = [row[~kept] for row, kept in zip(ids, self._kept, strict=True)]
        self._each = each
        self._processors = processors
        self._do_sample, self._with_scores = do_sample, with_scores
        longest = min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
        self._limit = max(longest - ids.shape[1], 1)
        ends = [c for c in criteria if hasattr(c, "eos_token_id")]
        self._eos = frozenset(int(t) for c in ends for t in torch.as_tensor(c.eos_token_id).flatten())
        self._criteria = [c for c in criteria if c not in ends and not isinstance(c, MaxLengthCriteria)]
        self.run_on = len(ids) > 1 and bool(self._criteria) and not ends
        self._stopped: list[int | None] = [None] * len(ids)

    @property
    def plans(self) -> tuple[RowPlan, ...]:
        """One per row."""
        return tuple(
            RowPlan(
                max_new_tokens=self._limit,
                eos=self._eos,
                processors=tuple(self._processor(p, row) for p in self._processors),
                criteria=(self._stop(row),) if self._criteria else (),
                do_sample=self._do_sample,
            )
            for row in range(len(self._padding))
        )

    def _processor(self, processor: Any, row: int) -> Any:
        alone = of_row(processor, row, len(self._padding), self._each)
        if not len(self._padding[row]) or type(alone) in PREFIX_FREE or is_stateful(alone):
            return alone
        if type(alone) in _READ_IDS and not self._kept[row, -1]:
            return _without_padding(alone, self._ids[row], self._kept[row])
        return _Padded(alone, self._padding[row])

    def _stop(self, row: int) -> Callable[[Tensor, Any], bool]:
        padding = self._padding[row]
        stopped = self._stopped
        criteria = [criterion_of_row(c, row, len(self._padding)) for c in self._criteria]

        def stop(ids: Tensor, scores: Any) -> bool:
            ids = torch.cat([padding[None], ids.to(padding.device)], 1)
            unread = [_NoScores(c) if self._with_scores else scores for c in self._criteria]
            # Every criterion is called: it may count its calls.
            ends = [c(ids, s) for c, s in zip(criteria, unread, strict=True)]
            now = any(bool(torch.as_tensor(end).any()) for end in ends)
            if not self.run_on:
                return now
            if now and stopped[row] is None:
                stopped[row] = ids.shape[1]
            return all(n is not None and n <= ids.shape[1] for n in stopped)

        return stop


def _without_padding(processor: Any, ids: Tensor, kept: Tensor) -> Any:
    """Return a row's processor of `_READ_IDS` as it is made for unpadded ids; ``ids``, ``kept`` ``[S]``."""
    if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length or 0  # columns
        processor.prompt_ignore_length = int(kept[:ignored].sum()) + max(ignored - len(kept), 0)
    elif isinstance(processor, logits_process.EncoderRepetitionPenaltyLogitsProcessor):
        processor.encoder_input_ids = ids[kept][None]
    elif isinstance(processor, logits_process.EncoderNoRepeatNGramLogitsProcessor):
        return type(processor)(processor.ngram_size, ids[kept][None])
    return processor


class _Padded:
    """A logits processor whose prefixes are preceded by the row's padding."""

    def __init__(self, processor: Any, padding: Tensor) -> None:
        self._processor = processor
        self._padding = padding

    @property
    def __name__(self) -> str:
        return name_of(self._processor)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padding = self._padding.to(input_ids.device).expand(len(input_ids), -1)
        return process(self._processor, torch.cat([padding, input_ids], 1), scores)


class _NoScores:
    """Placeholder for the scores that `generate` passes to criteria; reading it raises `InputError`."""

    def __init__(self, criterion: Any) -> None:
        self._name = name_of(criterion)

    def _refuse(self, *_: Any) -> Any:
        raise InputError(
            f"The stopping criterion {self._name} reads scores, which speculative decoding does not pass to criteria; "
            "leave it out, or leave out custom_generate."
        )

    __getitem__ = __len__ = __iter__ = __bool__ = _refuse


def fill(theirs: Any, ours: RowCache, mask: Tensor, width: int) -> None:
    """Copy the committed entries of all rows into an empty cache of transformers, in the columns of a padded batch.

    Entries of padding and of columns after a row's end are zeros; `generate` has padding tokens' entries there, which
    every mask ``[B, S]`` hides.
    """

    def placed(held: Tensor, kept: Tensor) -> Tensor:
        """One row's entries ``[1, H, n, D]`` at their columns, ``[1, H, width - 1, D]``."""
        prompt = kept.nonzero().flatten().to(held.device)
        columns = held.new_zeros(1, held.shape[1], width - 1, held.shape[3])
        columns[:, :, prompt] = held[:, :, : len(prompt)]
        answer = held[:, :, len(prompt) :][:, :, : width - 1 - len(kept)]
        columns[:, :, len(kept) : len(kept) + answer.shape[2]] = answer
        return columns

    rows = [ours.export(row) for row in range(len(mask))]
    for layer in range(len(rows[0])):
        keys, values = (
            torch.cat([placed(row[layer][which], kept) for row, kept in zip(rows, mask, strict=True)])
            for which in (0, 1)
        )
        theirs.update(keys, values, layer)


class Sheet:
    """New tokens of all rows; a column is complete when every unfinished row has reached it."""

    def __init__(self, rows: int, streamer: Any, pad: int, run_on: bool) -> None:
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._columns: list[list[int]] = []
        self._streamer = streamer
        self._pad = pad
        self._run_on = run_on

    def write(self, tokens: Sequence[Sequence[int]], finished: Sequence[bool]) -> None:
        """Add the tokens of one step."""
        for row, new in zip(self._rows, tokens, strict=True):
            row.extend(new)
        running = [len(row) for row, ended in zip(self._rows, finished, strict=True) if self._run_on or not ended]
        width = min(running, default=max(map(len, self._rows)))
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
    """A rule around an engine's that records scores and logits ``[n, 2, V]`` after every emitted token, per row."""

    def __init__(self, engine: Engine, do_sample: bool, rows: int) -> None:
        self._rule = engine.rule(do_sample)
        self.lossless, self.samples = self._rule.lossless, self._rule.samples
        self.uniforms = self._rule.uniforms
        self.engine = Engine(engine.target, engine.drafter, self)  # the engine to record; the other stays unchanged
        self._rows: list[list[Tensor]] = [[] for _ in range(rows)]
        self._latest: dict[int, Tensor] = {}  # along the accepted path
        self._judge: Judge

    def open(self, context: Context) -> Recorder:
        self._judge = self._rule.open(context)
        return self

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self._judge.load(row, prompt, prefill)

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        verdict = self._judge.judge(rows, tree, scores, uniforms, output)
        along = torch.stack([at_nodes(t, verdict.path).float() for t in (scores, output.logits)], 2)
        self._latest |= dict(zip(rows, along, strict=True))
        return verdict

    def record(self, tokens: Sequence[Sequence[int]]) -> None:
        """Record the tokens of one step; row i is in slot i."""
        for row, new in enumerate(tokens):
            if new:
                self._rows[row].append(self._latest[row][: len(new)])

    def columns(self, which: int, width: int) -> tuple[Tensor, ...]:
        """Processed (0) or raw (1) logits ``[B, V]`` of ``width`` tokens, zeros after a row's end."""
        padded = pad_sequence([torch.cat(row)[:, which] for row in self._rows], batch_first=True)
        return tuple(padded[:, :width].unbind(1))
