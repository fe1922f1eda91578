"""What is asked of the language model's hidden states beside the answers, to teach it where to look."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from saccade.pocket.sample import Sample
from tools.pocket.batches import Batch
from tools.pocket.relating import Relating
from tools.pocket.searching import Searching, sought
from tools.pocket.watching import Watching, happening


def taught(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """The batch of those samples with what the lessons ask of it."""
    return replace(batch, sought=sought(samples, batch.ids), happening=happening(samples, batch.ids))


class Lessons(nn.Module):
    """The lessons in comparing, searching and watching, each weighed; its readers are of no use afterwards."""

    def __init__(self, width: int, relating: float, searching: float, watching: float) -> None:
        super().__init__()
        self.relating, self.searching, self.watching = Relating(width), Searching(width), Watching(width)
        self._weights = (relating, searching, watching)

    def forward(self, states: Sequence[Tensor], seen: Tensor, batch: Batch) -> Tensor:
        """How badly all are answered.

        Args:
            states: the hidden states after every layer, `[B, N, d]` each.
            seen: the input embeddings `[B, N, d]`.
        """
        third, half = states[(len(states) - 1) // 3], states[len(states) // 2]
        deeper = states[3 * len(states) // 4]
        assert batch.sought is not None
        assert batch.happening is not None
        relating, searching, watching = self._weights
        total: Tensor = (
            relating * self.relating(third, seen, batch)
            + searching * self.searching(half, deeper, batch.sought)
            + watching * self.watching(half, batch.happening)
        )
        return total
