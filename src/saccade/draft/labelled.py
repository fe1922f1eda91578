"""What verification has labelled in a row's last block, until the draft model says what it expected there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.history import Verified
from saccade.draft.tree import DraftTree
from saccade.verify.rule import Verdict


@dataclass(frozen=True, slots=True)
class Labelled:
    """Positions of one block: after its root, and after every token that it emitted but the last.

    Attributes:
        scores: ``[B, T, V]`` the target's processed logits there, for every emitted token or more.
        roots: ``[m, B, 1, V]`` what the views said after the root, before the block.
        emitted: per row what came of the block; nothing for rows that have nothing to teach.
    """

    scores: Tensor
    roots: Tensor
    emitted: Sequence[Sequence[int]]

    def heard(self, said: Tensor | None) -> Verified:
        """The positions, once the draft model has run what was emitted.

        Args:
            said: ``[m * B, P, V]`` logits after at least all emitted tokens but the last; None if there is but one.
        """
        (views, batch, _, _), count = self.roots.shape, max(map(len, self.emitted))
        q = self.roots
        if said is not None and count > 1:
            below = said[:, : count - 1].softmax(-1, torch.float32)
            q = torch.cat([q, below.view(views, batch, count - 1, -1)], 2)
        p = self.scores[:, :count].to(q.device).softmax(-1, torch.float32)
        if p.shape[2] != q.shape[3]:
            vocab = min(p.shape[2], q.shape[3])
            p, q = p[..., :vocab], q[..., :vocab]
        return Verified(p, q, self.emitted)


class Notes:
    """What verification has shown of the rows of one session and the views have not been asked about yet.

    The draft model runs what a row has emitted at the start of the row's next block, in any case and through every
    view, and what a view says after each token is what it expected at the labelled positions. So views that draft
    nothing because their weight is zero learn too, and no tree has to be searched for the accepted path. The last
    block of a row waits until the row is asked again.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._block: _Block | None = None
        self._ended: dict[int, tuple[Tensor, Tensor, list[int]]] = {}  # scores, roots, emitted tokens

    def note(
        self, telling: Sequence[int], roots: Tensor, tree: DraftTree, scores: Tensor, verdict: Verdict
    ) -> None:
        """A block was verified.

        Args:
            telling: rows to learn from.
            roots: ``[m, B, 1, V]`` what the views said after the block's roots.
            tree: as proposed.
            scores: ``[B, N, V]`` the target's processed logits.
            verdict: of every row.
        """
        if tree.max_children > 1:  # else the nodes are the path
            scores = scores.gather(1, verdict.path[..., None].expand(-1, -1, scores.shape[2]))
        self._block = _Block(telling, roots, scores, tree.tokens, verdict)

    def emitted(self, new: Sequence[Sequence[int]]) -> Labelled | None:
        """What the rows' ``new`` tokens label in the block before, if anything; rows without any have ended."""
        block, self._block = self._block, None
        if block is None:
            return None
        self._ended.update(block.rows(row for row in block.telling if not new[row]))
        taught = [new[row] if row in block.telling else [] for row in range(self._batch)]
        return Labelled(block.scores, block.roots, taught) if any(taught) else None

    def left(self) -> Labelled | None:
        """What every row emitted in the last block of its turn, if anything is to be learned from it."""
        block, self._block = self._block, None
        ended, self._ended = self._ended, {}
        if block is not None:
            ended.update(block.rows(block.telling))
        if not ended:
            return None
        scores, roots, _ = next(iter(ended.values()))
        every, q, emitted = zip(
            *(ended.get(row, (scores, roots, [])) for row in range(self._batch)), strict=True
        )
        return Labelled(pad_sequence(list(every), batch_first=True), torch.stack(q, 1), emitted)


@dataclass(frozen=True, slots=True)
class _Block:
    """As `Notes.note` was given it; scores ``[B, T, V]`` on the path."""

    telling: Sequence[int]
    roots: Tensor
    scores: Tensor
    tokens: Tensor
    verdict: Verdict

    def rows(self, rows: Iterable[int]) -> dict[int, tuple[Tensor, Tensor, list[int]]]:
        """Of single rows ``[T, V]`` scores, ``[m, 1, V]`` roots, and the emitted tokens (brought to the host)."""
        found = {}
        for row in rows:
            path = self.verdict.path[row, 1 : int(self.verdict.count[row]) + 1]
            emitted = [*self.tokens[row, path].tolist(), int(self.verdict.token[row])]
            found[row] = self.scores[row], self.roots[:, row], emitted
        return found
