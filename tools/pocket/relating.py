"""A lesson in comparing: what every patch showed one picture, or one frame, before.

Answers on what changes are some forty tokens on hundreds of patches, and teach slowly where to look. So while it
trains, the language model is also asked at every patch of a later picture whether it has changed and what was there
before, from its hidden states at a third of its depth. The two linear readers that ask are thrown away afterwards.
"""

import torch
from torch import Tensor, nn

from saccade.pocket.labels import GRID, PATCH_SIZE
from tools.pocket.batches import Batch
from tools.pocket.chat import FRAME_TOKENS, IMAGE, NEWLINE, PATCHES, VIDEO


def _changed(pictures: Tensor, across: int) -> Tensor:
    """Which cells of a picture differ from those of the one before: `[P, 3, S, S]` to `[P - 1, across * across]`."""
    size = GRID * PATCH_SIZE // across
    differs = (pictures[1:] != pictures[:-1]).any(1).float()
    return nn.functional.max_pool2d(differs, size).flatten(1) > 0


def _places(row: Tensor, mark: int, count: int, each: int, between: int) -> Tensor | None:
    """Where the patches of adjoining pictures are in a prompt: `[count, each]`; None if words stand between them."""
    at = (row == mark).nonzero()[:, 0]
    starts = at[0] + (each + between) * torch.arange(count)
    places = starts[:, None] + torch.arange(each)
    return places if at[-1] < starts[-1] + each + NEWLINE else None


def pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Rows, places, places one picture before, and whether the two differ, of all patches that have one before.

    `[n]` each; None where no row has several pictures or frames without words between them.
    """
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    kinds = (
        (batch.pictures, batch.counts, IMAGE, PATCHES, NEWLINE, GRID),
        (batch.frames, batch.lengths, VIDEO, FRAME_TOKENS, 0, GRID // 2),
    )
    for shown, counts, mark, each, between, across in kinds:
        first = 0
        for row, count in enumerate(counts):
            mine, first = slice(first, first + count), first + count
            if count < 2 or shown is None:
                continue
            places = _places(batch.ids[row], mark, count, each, between)
            if places is not None:
                now, before = places[1:].flatten(), places[:-1].flatten()
                found.append(
                    (torch.full_like(now, row), now, before, _changed(shown[mine], across).flatten())
                )
    if not found:
        return None
    rows, now, before, changed = (torch.cat(part) for part in zip(*found, strict=True))
    return rows, now, before, changed


class Relating(nn.Module):
    """Reads from hidden states whether a patch has changed and what it showed before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.changed = nn.Linear(width, 1)
        self.before = nn.Linear(width, width)

    def forward(self, hidden: Tensor, seen: Tensor, batch: Batch) -> Tensor:
        """How badly it reads, 0 where there is nothing to compare.

        Args:
            hidden: `[B, N, d]`.
            seen: the input embeddings `[B, N, d]`.
        """
        found = pairs(batch)
        if found is None:
            return hidden.new_zeros(())
        rows, now, before, changed = (part.to(hidden.device) for part in found)
        states = self.norm(hidden[rows, now].float())
        was = seen[rows, before].detach().float()
        scale = was.std().clamp(min=1e-6)
        flags: Tensor = nn.functional.binary_cross_entropy_with_logits(
            self.changed(states)[:, 0], changed.float()
        )
        if not changed.any():
            return flags
        misses: Tensor = (self.before(states[changed]) - (was[changed] - was.mean(0)) / scale).square().mean()
        return flags + misses
