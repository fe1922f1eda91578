"""Rows that grow at different speeds, read column by column as `generate` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Sheet:
    """New tokens of all rows; a column is complete when every row that is still open has reached it.

    Args:
        rows: how many.
        streamer: a Hugging Face `BaseStreamer`, given each complete column ``[B]``.
        pad: id behind the end of a row.
        run_on: rows end together (see `Rows.run_on`); tokens beyond the shortest row do not count.
    """

    def __init__(self, rows: int, streamer: Any, pad: int, run_on: bool) -> None:
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._columns: list[list[int]] = []
        self._streamer = streamer
        self._pad = pad
        self._run_on = run_on

    def take(self, tokens: Sequence[Sequence[int]], finished: Sequence[bool]) -> None:
        """Take in what one step emitted."""
        for row, new in zip(self._rows, tokens, strict=True):
            row.extend(new)
        open_ = [
            len(row) for row, ended in zip(self._rows, finished, strict=True) if self._run_on or not ended
        ]
        width = min(open_) if open_ else max(map(len, self._rows))
        for place in range(len(self._columns), width):
            column = [row[place] if place < len(row) else self._pad for row in self._rows]
            self._columns.append(column)
            if self._streamer is not None:
                self._streamer.put(torch.tensor(column))

    @property
    def width(self) -> int:
        """Complete columns."""
        return len(self._columns)

    @property
    def tokens(self) -> Tensor:
        """``[B, width]`` ids."""
        return torch.tensor(self._columns).T
