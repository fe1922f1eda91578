"""What verification has labelled in a row's last block, until the draft model says what it expected there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.history import Verified
from saccade.draft.tree import DraftTree
from saccade.verify.rule import Verdict


@dataclass(frozen=True, slots=True)
class Labelled:
    """Positions of a row's last block: after its root, and after every token that it emitted but the last.

    Attributes:
        scores: ``[T, V]`` the target's processed logits there, for every emitted token or more.
        roots: ``[m, 1, V]`` what the views said after the root, before the block: distributions.
        emitted: what came of the block.
    """

    scores: Tensor
    roots: Tensor
    emitted: Sequence[int]


def heard(blocks: Sequence[Labelled], said: Sequence[Sequence[Tensor]]) -> Verified:
    """The positions of some rows' blocks, once the draft model has run what was emitted.

    Args:
        said: per row and view ``[n, V]`` logits after at least all emitted tokens but the last; nothing where there is
            but one.
    """
    p, q = [], []
    for block, views in zip(blocks, said, strict=True):
        count = len(block.emitted)
        expected = block.roots
        if count > 1:
            below = torch.stack([logits[: count - 1] for logits in views])
            expected = torch.cat([expected, below.softmax(-1, torch.float32)], 1)
        labels = block.scores[:count].to(expected.device).softmax(-1, torch.float32)
        vocab = min(labels.shape[1], expected.shape[2])
        p.append(labels[:, :vocab])
        q.append(expected[:, :, :vocab].transpose(0, 1))
    joint = pad_sequence(q, batch_first=True).permute(2, 0, 1, 3)  # [m, A, T, V]
    return Verified(pad_sequence(p, batch_first=True), joint.contiguous(), [b.emitted for b in blocks])


class Notes:
    """What verification has shown of rows and the views have not been asked about yet, by row.

    The draft model runs what a row has emitted at the start of the row's next block, in any case and through every
    view, and what a view says after each token is what it expected at the labelled positions. So views that draft
    nothing because their weight is zero learn too, and no tree has to be searched for the accepted path. The last
    block of a row waits until the row is asked again.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    def note(
        self,
        rows: Sequence[int],
        places: Sequence[int],
        roots: Tensor,
        tree: DraftTree,
        scores: Tensor,
        verdict: Verdict,
    ) -> None:
        """Blocks were verified.

        Args:
            rows: those to learn from.
            places: where these stand in what follows, which is of A rows.
            roots: ``[m, A, 1, V]`` what the views said after the block's roots.
            tree: as proposed.
            scores: ``[A, N, V]`` the target's processed logits.
            verdict: of every row.
        """
        if tree.max_children > 1:  # else the nodes are the path
            scores = scores.gather(1, verdict.path[..., None].expand(-1, -1, scores.shape[2]))
        for row, place in zip(rows, places, strict=True):
            self._blocks[row] = _Block(place, roots, scores, tree.tokens, verdict)

    def emitted(self, row: int, new: Sequence[int]) -> Labelled | None:
        """What the ``new`` tokens of a row label in the block before, if anything."""
        block = self._blocks.pop(row, None)
        return None if block is None else block.labelled(new)

    def left(self, row: int, room: int) -> Labelled | None:
        """What a row emitted in the last block of its turn, if anything is to be learned from it.

        Args:
            room: tokens that could still be emitted; what was accepted behind them was guessed for longer rows' sake.
        """
        block = self._blocks.pop(row, None)
        return None if block is None else block.labelled(block.emitted()[:room])

    def forget(self, row: int) -> None:
        """Drop what is known of a row."""
        self._blocks.pop(row, None)


@dataclass(frozen=True, slots=True)
class _Block:
    """One row, at ``place`` in what `Notes.note` was given; scores ``[A, T, V]`` on the path."""

    place: int
    roots: Tensor
    scores: Tensor
    tokens: Tensor
    verdict: Verdict

    def labelled(self, emitted: Sequence[int]) -> Labelled:
        return Labelled(self.scores[self.place], self.roots[:, self.place], emitted)

    def emitted(self) -> list[int]:
        """The tokens of the block, brought to the host."""
        place, verdict = self.place, self.verdict
        path = verdict.path[place, 1 : int(verdict.count[place]) + 1]
        return [*self.tokens[place, path].tolist(), int(verdict.token[place])]
