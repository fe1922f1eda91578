"""A lesson in searching: where in a picture is what a question asks for.

One yes or one total teaches slowly to look for things of a kind. So while it trains, the language model is also asked,
where its answer is to begin, in which of the nine places of the picture such things are, from its hidden states at
half its depth. The linear reader that asks is thrown away afterwards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.pocket.sample import Sample
from saccade.pocket.shapes import Thing, key
from saccade.pocket.train.chat import ASSISTANT
from saccade.pocket.words import COLUMNS, ROWS

PLACES = [(row, column) for row in ROWS for column in COLUMNS]


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
    """Of every question that asks for things: its row, where its answer begins, and 1 for each place that has some.

    `[Q, 2 + 9]`.

    Args:
        ids: the samples' conversations, `[B, N]`.
    """
    told = []
    for row, sample in enumerate(samples):
        begins = (ids[row] == ASSISTANT).nonzero()[:, 0].tolist()
        for begin, found in zip(begins, _asked(sample), strict=True):
            if found is not None:
                there = {(thing["row"], thing["column"]) for thing in found}
                told.append([row, begin, *(int(place in there) for place in PLACES)])
    return torch.tensor(told, dtype=torch.long).reshape(-1, 2 + len(PLACES))


class Searching(nn.Module):
    """Reads from hidden states in which places of a picture is what a question asks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.there = nn.Linear(width, len(PLACES))

    def forward(self, hidden: Tensor, asked: Tensor) -> Tensor:
        """How badly it reads, 0 where nothing is sought.

        Args:
            hidden: `[B, N, d]`.
            asked: as `sought` gives it.
        """
        if not len(asked):
            return hidden.new_zeros(())
        asked = asked.to(hidden.device)
        states = self.norm(hidden[asked[:, 0], asked[:, 1]].float())
        misses: Tensor = nn.functional.binary_cross_entropy_with_logits(
            self.there(states), asked[:, 2:].float()
        )
        return misses
