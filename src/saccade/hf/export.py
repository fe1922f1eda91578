"""A generation's KV cache as `generate` would have left it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.target.cache import RowCache


def fill(theirs: Any, ours: RowCache, mask: Tensor, width: int) -> None:
    """Copy what rows have committed into an empty cache of transformers, in the columns of a padded batch.

    Entries of padding, and of columns behind the end of a row, are zeros: `generate` has those of padding tokens there,
    which no mask lets be seen.

    Args:
        theirs: a `Cache` of transformers without content.
        ours: the rows' cache, row i in slot i.
        mask: ``[B, S]``, 0 on padding.
        width: columns of prompts and answers; as in `generate`, the last one is not in the cache.
    """
    rows = [ours.export(row) for row in range(len(mask))]
    for layer in range(len(rows[0])):
        keys, values = (
            torch.cat(
                [_placed(row[layer][which], kept, width - 1) for row, kept in zip(rows, mask, strict=True)]
            )
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
