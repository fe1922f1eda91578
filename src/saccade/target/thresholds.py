"""The lengths at which a decoder begins to compute otherwise, read from its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
