"""A lesson in searching: where in a picture is what a question asks for, and how much of it.

One yes or one total teaches slowly to look for things of a kind. So while it trains, the language model is also asked,
where its answer is to begin, how many such things are in each of the nine places of the picture, from its hidden states
at half its depth, and how many there are in all, from those at three quarters. The linear readers that ask are thrown
away afterwards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.pocket.sample import Sample
from saccade.pocket.shapes import Thing, key
from saccade.pocket.words import COLUMNS, ROWS
from tools.pocket.chat import ASSISTANT

PLACES = [(row, column) for row in ROWS for column in COLUMNS]
_CROWD = 3  # so many in one place, or more, are not told apart
_MOST = 8
_TOTAL = 0.3  # what reading the total weighs beside the places


def _asked(sample: Sample) -> list[list[Thing] | None]:
    """What every question of a sample asks for and the picture has; None where it does not ask for things."""
    if "found" in sample.facts:
        return list(sample.facts["found"])
    if sample.task == "count":
        return [sample.facts["counted"]]
    if sample.task == "existence":
        suspect = key(dict(sample.facts))
        return [[thing for thing in sample.facts["reason"] if key(thing) == suspect]]
    return [None] * (len(sample.turns) + 1)


def sought(samples: Sequence[Sample], ids: Tensor) -> Tensor:
    """Of every question that asks for things: its row, where its answer begins, how many each place has, and all have.

    `[Q, 2 + 9 + 1]`.

    Args:
        ids: the samples' conversations, `[B, N]`.
    """
    told = []
    for row, sample in enumerate(samples):
        begins = (ids[row] == ASSISTANT).nonzero()[:, 0].tolist()
        for begin, found in zip(begins, _asked(sample), strict=True):
            if found is not None:
                there = [(thing["row"], thing["column"]) for thing in found]
                many = (min(there.count(place), _CROWD) for place in PLACES)
                told.append([row, begin, *many, min(len(found), _MOST)])
    return torch.tensor(told, dtype=torch.long).reshape(-1, 2 + len(PLACES) + 1)


class Searching(nn.Module):
    """Reads from hidden states how many of what a question asks for each place of a picture has, and all have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.total_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.there = nn.Linear(width, len(PLACES) * (_CROWD + 1))
        self.total = nn.Linear(width, _MOST + 1)

    def forward(self, hidden: Tensor, deeper: Tensor, asked: Tensor) -> Tensor:
        """How badly it reads, 0 where nothing is sought.

        Args:
            hidden, deeper: where places and totals are read, `[B, N, d]`.
            asked: as `sought` gives it.
        """
        if not len(asked):
            return hidden.new_zeros(())
        asked = asked.to(hidden.device)
        rows, begins = asked[:, 0], asked[:, 1]
        places = self.there(self.norm(hidden[rows, begins].float())).view(-1, _CROWD + 1)
        total = self.total(self.total_norm(deeper[rows, begins].float()))
        misses: Tensor = nn.functional.cross_entropy(places, asked[:, 2:-1].flatten())
        return misses + _TOTAL * nn.functional.cross_entropy(total, asked[:, -1])
