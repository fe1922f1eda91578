"""Logits processors and stopping criteria of speculative decoding.

Plain decoding calls a processor once per token, in order, with all rows of its batch. Speculative decoding calls it at
every node of a tree, row by row, while rows join and leave. A processor with state between calls, or one that depends
on the row's number, would silently change tokens. Three kinds are therefore supported:

- processors of transformers that depend on their ids and scores alone;
- others that are marked so, by `stateless` or an attribute ``stateless = True``;
- `StatefulProcessor`, with a separate state per node of a tree. `saccade.grammar` has some.

>>> vlm.generate("Name a colour.", logits_processor=[saccade.processors.stateless(my_processor)])
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

from saccade.errors import InputError

_Any = TypeVar("_Any")


def _classes(module: Any, ending: str, names: str) -> tuple[type, ...]:
    return tuple(getattr(module, name + ending) for name in names.split() if hasattr(module, name + ending))


PREFIX_FREE = (
    *_classes(logits_process, "LogitsWarper", "Temperature TopK TopP TopH MinP Typical Epsilon Eta"),
    *_classes(logits_process, "LogitsProcessor", "SuppressTokens InfNanRemove"),
    logits_process.LogitNormalization,
)
"""Processors whose scores depend on the logits alone."""

_OF_IDS = (
    "MinLength MinNewTokensLength RepetitionPenalty EncoderRepetitionPenalty NoRepeatNGram EncoderNoRepeatNGram "
    "SequenceBias NoBadWords PrefixConstrained ForcedBOSToken ForcedEOSToken SuppressTokensAtBegin Watermark"
)
STATELESS = (
    *PREFIX_FREE,
    *_classes(logits_process, "LogitsProcessor", _OF_IDS),
    logits_process.ExponentialDecayLengthPenalty,
)
"""Processors of transformers that depend on their ids and logits alone."""

_CRITERIA = _classes(stopping_criteria, "Criteria", "MaxLength MaxTime StopString EosToken")


@runtime_checkable
class StatefulProcessor(Protocol):
    """A processor whose scores depend on a state that follows the tokens (a grammar, a counter).

    States are values: `advance` leaves its argument unchanged, because sibling nodes continue from it.
    Where copies are expensive, use one object with rollback, as `saccade.grammar.Rollback` does.

    >>> class Alternate:  # tokens of even and odd ids in turn
    ...     def start(self, prompt):
    ...         return 0
    ...     def advance(self, state, token):
    ...         return 1 - state
    ...     def scores(self, state, scores):
    ...         scores[1 - state :: 2] = -float("inf")
    ...         return scores
    >>> output = saccade.load("pocket").generate("Hello", logits_processor=[Alternate()], max_new_tokens=4)
    >>> [token % 2 for token in output.tokens]
    [0, 1, 0, 1]
    """

    def start(self, prompt: Sequence[int]) -> Any:
        """Return the state after a row's prompt; called once per row."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """Return the state after one more token; never a token that `scores` set to -inf, unless it left none."""
        ...

    def scores(self, state: Any, scores: Tensor) -> Tensor:
        """Return processed scores ``[V]`` of the next token from scores ``[V]``, which may be modified."""
        ...


def stateless(processor: _Any) -> _Any:
    """Mark a logits processor or a stopping criterion as stateless.

    Its result for a row may depend only on that row's ids and scores and on the row's number in the batch. It is
    called for one node at a time, repeated to as many rows as prompts were submitted together, and the row's own result
    is used. So ``scores[i] += bias[i]`` and tensors ``[B, V]`` work as in `generate`.

    Returns:
        The same object with ``stateless = True``.

    Raises:
        InputError: the object takes no attributes.

    >>> @saccade.processors.stateless
    ... def never_42(ids, scores):
    ...     scores[:, 42] = -float("inf")
    ...     return scores
    >>> 42 in saccade.load("pocket").generate("Hello", logits_processor=[never_42], max_new_tokens=9).tokens
    False
    """
    try:
        processor.stateless = True  # type: ignore[attr-defined]
    except AttributeError:
        raise InputError(
            f"{name_of(processor)} cannot be marked as stateless, as it takes no attributes; wrap it in a function."
        ) from None
    return processor


def name_of(processor: Any) -> str:
    """Name of a function, or of an object's class."""
    return getattr(processor, "__name__", type(processor).__name__)


def is_stateful(processor: Any) -> bool:
    """Whether it is a `StatefulProcessor`."""
    return isinstance(processor, StatefulProcessor) and not isinstance(processor, type)


def of_row(processor: Any, row: int, rows: int, each: int = 1) -> Any:
    """Convert a processor of a batch of ``rows``, with ``each`` rows per prompt, to one for a single row."""
    if type(processor) in PREFIX_FREE or is_stateful(processor):
        return processor
    if type(processor) in STATELESS:
        return _alone(processor, row, each)
    if getattr(processor, "stateless", False) is True:
        return _stateless_of_row(processor, row, rows)
    if type(processor).__module__.startswith("xgrammar."):
        from saccade.grammar import of_xgrammar

        return of_xgrammar(processor, row)
    raise InputError(
        f"The logits processor {name_of(processor)} may have state between its calls, which speculative decoding "
        "makes more often and in another order than plain decoding; mark it by saccade.processors.stateless if it "
        "depends on its ids and scores alone, or give a StatefulProcessor."
    )


def criterion_of_row(criterion: Any, row: int, rows: int) -> Any:
    """Convert a stopping criterion of a batch of ``rows`` to one for a single row.

    A row's criteria are called as in plain decoding: once after every emitted token, with the ids so far. So a
    criterion may count its calls if it has a single row, but not if several share it.
    """
    if type(criterion) in _CRITERIA:
        return criterion
    if type(criterion) in _classes(stopping_criteria, "Criteria", "Confidence"):
        raise InputError(
            "The stopping criterion ConfidenceCriteria reads scores, which speculative decoding does not pass to "
            "criteria; leave it out."
        )
    if rows == 1:
        return criterion
    if getattr(criterion, "stateless", False) is True:

        def ends(ids: Tensor, scores: Any) -> bool:
            """Whether the row of ``ids`` ``[1, S]`` ends."""
            verdicts = torch.as_tensor(criterion(ids.repeat(rows, 1), scores)).flatten()
            return bool(verdicts[row if len(verdicts) > 1 else 0])

        return ends
    raise InputError(
        f"The stopping criterion {name_of(criterion)} is shared by {rows} rows, which end at different times, and may "
        "have state between its calls; mark it by saccade.processors.stateless if it depends on its ids alone, or "
        "submit the rows one by one."
    )


def _stateless_of_row(processor: Any, row: int, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A stateless processor of a batch, called for nodes of one of its rows."""

    def of_nodes(ids: Tensor, scores: Tensor) -> Tensor:
        """Process scores ``[n, V]`` of n nodes whose prefixes are ``ids`` ``[n, S]``."""
        parts = []
        for prefix, node in zip(ids, scores, strict=True):
            processed: Tensor = processor(prefix.repeat(rows, 1), node.repeat(rows, 1))
            if processed.shape != (rows, len(node)):
                raise InputError(
                    f"The logits processor {of_nodes.__name__} returned scores of shape {tuple(processed.shape)} for "
                    f"{rows} rows of {len(node)} tokens; it must keep the shape."
                )
            parts.append(processed[row])
        return torch.stack(parts)

    of_nodes.__name__ = name_of(processor)
    return of_nodes


def process(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Return processed scores ``[n, V]`` of n nodes of one row, whose prefixes are ``ids`` ``[n, S]``."""
    if type(processor) is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        # older versions process only the first node, as they have one prompt
        return torch.cat([processor(i[None], s[None]) for i, s in zip(ids, scores, strict=True)])
    processed: Tensor = processor(ids, scores)
    return processed


def _alone(processor: Any, row: int, each: int) -> Any:
    """Copy a processor of transformers without its data of other rows."""
    alone = copy.copy(processor)
    prompt = row // each
    if type(alone) is logits_process.RepetitionPenaltyLogitsProcessor:
        if isinstance(getattr(alone, "prompt_ignore_length", None), Tensor):
            alone.prompt_ignore_length = int(alone.prompt_ignore_length[row])
    elif type(alone) is logits_process.PrefixConstrainedLogitsProcessor:
        allowed = alone._prefix_allowed_tokens_fn
        alone._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    elif type(alone) is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        if len(alone.encoder_input_ids) > 1:
            alone.encoder_input_ids = alone.encoder_input_ids[prompt][None]
    elif type(alone) is logits_process.EncoderNoRepeatNGramLogitsProcessor and alone.batch_size > 1:
        alone.generated_ngrams, alone.batch_size = [alone.generated_ngrams[prompt]], 1
    return alone
