"""Context length, and sequence lengths at which a decoder's computation changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saccade.errors import InputError

_SAYS_LENGTH = re.compile(
    r"window|chunk|floor_scale|block_(size|len)|index_topk|compress_rate|local_attention|original_max_position"
)
"""Names under which configurations of transformers keep such lengths."""
_SAYS_OTHERWISE = re.compile(r"window_layers|window_pattern|use_|num_local|^(n|max)_positions")
"""Counts of layers, switches and numbers of experts that are named alike."""
_POSITIONS = ("original_max_position_embeddings", "floor_scale")
_WINDOWS = ("sliding_window",)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Lengths, in tokens, that a configuration names.

    Attributes:
        windows: of attention to the latest tokens, which masks enforce.
        positions: behind which queries or rotary angles are computed otherwise, whatever stands before them.
        unknown: name to value of what looks like a length and is none of these.
    """

    windows: tuple[int, ...]
    positions: tuple[int, ...]
    unknown: dict[str, int]

    @classmethod
    def of(cls, text_config: Any) -> Thresholds:
        """Read a decoder's configuration."""
        windows: set[int] = set()
        positions: set[int] = set()
        unknown: dict[str, int] = {}
        for name, value in _lengths(text_config.to_dict()):
            if name in _WINDOWS:
                windows.add(value)
            elif name in _POSITIONS:
                positions.add(value)
            else:
                unknown[name] = value
        return cls(tuple(sorted(windows)), tuple(sorted(positions)), unknown)

    def beyond(self, context: int | None) -> list[int]:
        """Positions on both sides of every length and, four times apart, over the whole context; ascending.

        What a configuration does not name then shows too, wherever it lasts for long.
        """
        last = (context or max((*self.windows, *self.positions, *self.unknown.values(), 4096)) * 4 + 2) - 1
        sides = {n + d for n in (*self.windows, *self.positions, *self.unknown.values()) for d in (-1, 0, 1)}
        spread = {4**power for power in range(3, 16)}
        return sorted(n for n in {*sides, *spread, last} if 0 < n <= last)


def _lengths(values: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        name = str(key)
        if isinstance(value, dict) and not name.endswith("_config"):
            yield from _lengths(value)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value > 1
            and _SAYS_LENGTH.search(name)
            and not _SAYS_OTHERWISE.search(name)
        ):
            yield name, value


class ContextError(InputError):
    """A sequence is longer than a model's context.

    Attributes:
        length: of the sequence.
        context: of the model.
    """

    def __init__(self, length: int, context: int) -> None:
        super().__init__(
            f"The sequence needs {length} tokens but this model's context is {context}; shorten the prompt, "
            "use fewer or smaller images, or lower max_new_tokens."
        )
        self.length, self.context = length, context


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one model, in tokens.

    Attributes:
        context: longest sequence that the model supports, or None when it does not say.
        turn: longest sequence that is read with the short factors of a longrope embedding, None for other embeddings.
            The longest one of a forward decides for all of its rows and nodes.
    """

    context: int | None
    turn: int | None

    @classmethod
    def of(cls, text_config: Any) -> Limits:
        """Read a decoder's configuration."""
        turns = [
            rope["original_max_position_embeddings"]
            for rope in _ropes(getattr(text_config, "rope_parameters", None))
            if rope.get("rope_type") == "longrope"
        ]
        return cls(getattr(text_config, "max_position_embeddings", None), min(turns, default=None))

    def check(self, length: int) -> None:
        """Raise `InputError` when a sequence of ``length`` tokens does not fit the context."""
        if length < 1:
            raise InputError("The prompt is empty; give at least one token of text.")
        if self.context is not None and length > self.context:
            raise ContextError(length, self.context)

    def check_rows(self, prompts: Sequence[int], new: Sequence[int]) -> None:
        """Raise `InputError` when rows that run together do not fit, each alone or all on one side of the turn.

        Args:
            prompts: length of every row's prompt.
            new: how many tokens each row may get.
        """
        ends = [p + n for p, n in zip(prompts, new, strict=True)]
        for end in ends:
            self.check(end)
        if self.turn is not None and not (max(ends) <= self.turn or min(prompts) > self.turn):
            raise InputError(
                f"This model's rotary embedding (longrope) changes behind {self.turn} tokens, for all of a pass at "
                f"once, but the rows go from {min(prompts)} to {max(ends)} tokens; stay within {self.turn} by a lower "
                "max_new_tokens, or run only longer prompts together."
            )

    def is_long(self, length: int) -> bool:
        """Whether a sequence is read with a longrope embedding's long factors."""
        return self.turn is not None and length > self.turn

    def within(self, positions: Tensor, lengths: Sequence[int], ahead: Tensor | None = None) -> Tensor:
        """Positions ``[B, Q]`` of new tokens, none behind the last one that a token of these rows can have.

        What stands there belongs to guesses beyond the end, which are never emitted; but it would have no entry in a
        table of positions, or change the embedding of the whole pass.

        Args:
            lengths: committed entries per row.
            ahead: ``[B, 1]`` rope deltas of M-RoPE, whose positions may be ahead of the number of tokens.
        """
        bound = self.context
        if self.turn is not None and max(lengths) < self.turn:
            bound = self.turn
        if bound is None:
            return positions
        if ahead is None:
            return positions.clamp(max=bound - 1)
        return positions.minimum(ahead.clamp(min=0) + (bound - 1))


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The embeddings of a configuration: one, or one per layer type."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters
        return
    for part in parameters.values():
        yield from _ropes(part)
