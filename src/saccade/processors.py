"""Logits processors as speculative decoding can call them: many times in a step, for guesses that may be rejected.

Plain decoding calls a processor once per token, in order, with all rows of its batch. Speculative decoding calls it at
every node of a tree, row by row, while rows come and go. A processor that keeps something between calls, or that looks
at which row it has, would then give other tokens without anybody noticing. Therefore three kinds are taken:

- those of transformers that depend on the ids and scores that they are given alone;
- others that say the same of themselves, by `stateless` or an attribute ``stateless = True``;
- `StatefulProcessor`, whose state of every guess is kept apart from the others'. `saccade.grammar` has some.

>>> vlm.generate("Name a colour.", logits_processor=[saccade.processors.stateless(my_processor)])
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

from saccade.errors import InputError

_Any = TypeVar("_Any")


def _classes(module: Any, *names: str) -> tuple[type, ...]:
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


PREFIX_FREE = _classes(
    logits_process,
    *(
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
    ),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor"),
    *("InfNanRemoveLogitsProcessor", "LogitNormalization"),
)
"""Processors whose scores depend on the logits alone."""

STATELESS = (
    *PREFIX_FREE,
    *_classes(
        logits_process,
        *(
            "MinLengthLogitsProcessor",
            "MinNewTokensLengthLogitsProcessor",
            "RepetitionPenaltyLogitsProcessor",
        ),
        *("EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
        *("EncoderNoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
        *(
            "PrefixConstrainedLogitsProcessor",
            "ForcedBOSTokenLogitsProcessor",
            "ForcedEOSTokenLogitsProcessor",
        ),
        *(
            "ExponentialDecayLengthPenalty",
            "SuppressTokensAtBeginLogitsProcessor",
            "WatermarkLogitsProcessor",
        ),
    ),
)
"""Processors of transformers that depend on the ids and logits that they are given alone."""

_CRITERIA = _classes(
    stopping_criteria, "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria"
)


@runtime_checkable
class StatefulProcessor(Protocol):
    """A processor whose scores depend on what it has read so far, token by token (a grammar, a counter).

    States are values: `advance` leaves the state that it is given as it was, because other guesses go on from it.
    Where copies are dear, keep one object and roll it back, as `saccade.grammar.Rollback` does.
    """

    def start(self, prompt: Sequence[int]) -> Any:
        """The state behind a row's prompt; called once per row."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state one token further; never called for a token that `scores` has set to -inf, if it left any other."""
        ...

    def scores(self, state: Any, scores: Tensor) -> Tensor:
        """Processed scores ``[V]`` of the next token from scores ``[V]``, which may be written to."""
        ...


def stateless(processor: _Any) -> _Any:
    """Say of a logits processor or a stopping criterion that it keeps nothing between calls.

    What it gives for a row may depend on that row's ids and scores, and on the row's number in the batch, alone. It is
    called for one node at a time, with as many rows as prompts were given together, all of which hold that node; of
    what it returns the row's own is taken. So ``scores[i] += bias[i]`` and tensors ``[B, V]`` do what they do in
    `generate`.

    Returns:
        The same object, marked by ``stateless = True``.

    Raises:
        InputError: it cannot be marked.
    """
    try:
        processor.stateless = True  # type: ignore[attr-defined]
    except AttributeError:
        raise InputError(
            f"{name_of(processor)} cannot be marked as stateless, as it takes no attributes; wrap it in a function."
        ) from None
    return processor


def name_of(processor: Any) -> str:
    """What to call an object of a class or a function."""
    return getattr(processor, "__name__", type(processor).__name__)


def is_stateful(processor: Any) -> bool:
    """Whether it is a `StatefulProcessor`."""
    return isinstance(processor, StatefulProcessor) and not isinstance(processor, type)


def of_row(processor: Any, row: int, rows: int, each: int = 1) -> Any:
    """A processor that was given for a batch of ``rows`` as one of its rows needs it alone.

    Args:
        each: rows per prompt, where `generate` returns several sequences for one.

    Raises:
        InputError: nobody has said that it keeps nothing between calls.
    """
    if type(processor) in PREFIX_FREE or is_stateful(processor):
        return processor
    if type(processor) in STATELESS:
        return _alone(processor, row, each)
    if getattr(processor, "stateless", False) is True:
        return OfRow(processor, row, rows)
    if type(processor).__module__.startswith("xgrammar."):
        from saccade.grammar import of_xgrammar

        return of_xgrammar(processor, row)
    raise InputError(
        f"The logits processor {name_of(processor)} may keep something between its calls, of which speculative "
        "decoding makes more, and in another order, than plain decoding; mark it by saccade.processors.stateless if it "
        "depends on the ids and scores that it is given alone, or give a StatefulProcessor."
    )


def criterion_of_row(criterion: Any, row: int, rows: int) -> Any:
    """The same for a stopping criterion.

    A row's criteria are called as in plain decoding: once after every token that it emits, with the ids so far. So a
    criterion may count its calls where it has a single row, but not where several share it.

    Raises:
        InputError: it reads scores, or several rows share it and nobody has said that it keeps nothing.
    """
    if type(criterion) in _CRITERIA:
        return criterion
    if type(criterion) in _classes(stopping_criteria, "ConfidenceCriteria"):
        raise InputError(
            "The stopping criterion ConfidenceCriteria reads scores, which criteria are not given in speculative "
            "decoding; leave it out."
        )
    if rows == 1:
        return criterion
    if getattr(criterion, "stateless", False) is True:
        return CriterionOfRow(criterion, row, rows)
    raise InputError(
        f"The stopping criterion {name_of(criterion)} is given for {rows} rows, which end at their own times, and may "
        "keep something between its calls; mark it by saccade.processors.stateless if it depends on the ids that it is "
        "given alone, or give the rows one by one."
    )


class OfRow:
    """A stateless processor made for a batch, called for nodes of one of its rows."""

    def __init__(self, processor: Any, row: int, rows: int) -> None:
        self._processor, self._row, self._rows = processor, row, rows
        self.__name__ = name_of(processor)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[n, V]`` of n nodes whose prefixes are ``ids`` ``[n, S]``."""
        return torch.cat([self._node(i, s) for i, s in zip(ids, scores, strict=True)])

    def _node(self, ids: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = self._processor(ids.repeat(self._rows, 1), scores.repeat(self._rows, 1))
        if found.shape != (self._rows, len(scores)):
            raise InputError(
                f"The logits processor {self.__name__} made scores of shape {tuple(found.shape)} from those of "
                f"{self._rows} rows and {len(scores)} tokens; let it keep the shape."
            )
        return found[self._row][None]


class CriterionOfRow:
    """A stateless stopping criterion made for a batch, called for one of its rows."""

    def __init__(self, criterion: Any, row: int, rows: int) -> None:
        self._criterion, self._row, self._rows = criterion, row, rows

    def __call__(self, ids: Tensor, scores: Any) -> bool:
        """Whether the row of ``ids`` ``[1, S]`` ends."""
        found = torch.as_tensor(self._criterion(ids.repeat(self._rows, 1), scores)).flatten()
        return bool(found[self._row if len(found) > 1 else 0])


def process(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Processed scores ``[n, V]`` of n nodes of one row, whose prefixes are ``ids`` ``[n, S]``."""
    if type(processor) is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        # older versions pass over all nodes but the first, as they hold one prompt
        return torch.cat([processor(i[None], s[None]) for i, s in zip(ids, scores, strict=True)])
    processed: Tensor = processor(ids, scores)
    return processed


def _alone(processor: Any, row: int, each: int) -> Any:
    """One of transformers' processors without what it holds for other rows."""
    own = copy.copy(processor)
    prompt = row // each
    if type(own) is logits_process.RepetitionPenaltyLogitsProcessor:
        if isinstance(getattr(own, "prompt_ignore_length", None), Tensor):
            own.prompt_ignore_length = int(own.prompt_ignore_length[row])
    elif type(own) is logits_process.PrefixConstrainedLogitsProcessor:
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    elif type(own) is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        if len(own.encoder_input_ids) > 1:
            own.encoder_input_ids = own.encoder_input_ids[prompt][None]
    elif type(own) is logits_process.EncoderNoRepeatNGramLogitsProcessor and own.batch_size > 1:
        own.generated_ngrams, own.batch_size = [own.generated_ngrams[prompt]], 1
    return own
