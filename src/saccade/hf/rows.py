"""Per-row limits, processors and criteria of a padded batch of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import MaxLengthCriteria, logits_process

from saccade.engine.generation import RowPlan
from saccade.errors import InputError
from saccade.processors import PREFIX_FREE, criterion_of_row, is_stateful, name_of, of_row, process

_READ_IDS = (
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.WatermarkLogitsProcessor,
)
"""Processors of transformers that read which ids there are, and not how many."""


class Rows:
    """The plans of the rows of a padded batch.

    Processors and criteria count the padding, as they do in `generate`: lengths measured on the padded prompt stay
    valid. Those that read ids see padding on the left, as in `generate`, but none on the right, where `generate` has no
    right answer: a row's tokens are those of its prompt alone.
    Shapes: ids ``[B, S]``; mask ``[B, S]``.
    """

    def __init__(
        self,
        ids: Tensor,
        mask: Tensor,
        each: int,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        with_scores: bool = False,
    ) -> None:
        self._with_scores = with_scores
        self._ids, self._kept = ids, mask.bool()
        self._padding = [row[~kept] for row, kept in zip(ids, self._kept, strict=True)]
        self._each = each
        self._processors = processors
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
            )
            for row in range(len(self._padding))
        )

    def _processor(self, processor: Any, row: int) -> Any:
        own = of_row(processor, row, len(self._padding), self._each)
        if not len(self._padding[row]) or type(own) in PREFIX_FREE or is_stateful(own):
            return own
        if type(own) in _READ_IDS and not self._kept[row, -1]:
            return _without_padding(own, self._ids[row], self._kept[row])
        return _Padded(own, self._padding[row])

    def _stop(self, row: int) -> Callable[[Tensor, Any], bool]:
        padding, stopped = self._padding[row], self._stopped
        criteria = [criterion_of_row(c, row, len(self._padding)) for c in self._criteria]

        def stop(ids: Tensor, scores: Any) -> bool:
            ids = torch.cat([padding[None], ids.to(padding.device)], 1)
            given = [_NoScores(c) if self._with_scores else scores for c in self._criteria]
            # Every criterion is called: it may count its calls.
            ends = [c(ids, s) for c, s in zip(criteria, given, strict=True)]
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
