"""One step's work: prompts and trees that share a forward, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.tree import DraftTree
from saccade.engine.row import Row
from saccade.target.context import Context, PromptReader
from saccade.target.pieces import Piece, Reading
from saccade.verify.processing import Processing
from saccade.verify.randomness import Uniforms
from saccade.verify.rule import Judge, Rule, Verdict


@dataclass(slots=True)
class Chunk:
    """A part of a row's prompt that runs in this step.

    Attributes:
        stop: prompt tokens that have run after it.
        guessed: whether the row's first tree runs behind it.
        piece: what runs of it; None where it runs alone.
    """

    row: Row
    reader: PromptReader
    stop: int
    guessed: bool = False
    piece: Piece | None = None

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.reader.prompt)


@dataclass(slots=True)
class Ballot:
    """Rows that one rule judges together: their trees, and what the target said about them.

    Attributes:
        rows: those under way first, then those whose prompt ends in this step.
        tree: one tree per row.
        reading: logits ``[A, N, V]`` and hidden states ``[A, N, d]`` of the trees' nodes.
        drafted: whether a drafter made the trees, and is told of the outcome.
        scores, verdict: set by `judge`.
    """

    rows: list[Row]
    tree: DraftTree
    rule: Rule
    judge: Judge
    processing: Processing
    uniforms: Uniforms | None
    drafted: bool
    reading: Reading | None = None
    scores: Tensor | None = None
    verdict: Verdict | None = None
    failed: dict[int, Exception] = field(default_factory=dict)

    @property
    def slots(self) -> list[int]:
        """The rows' places in the caches."""
        return [slot for row in self.rows if (slot := row.slot) is not None]

    def decide(self) -> Verdict:
        """Process the logits and judge; a row whose processors fail is noted in ``failed``."""
        assert self.reading is not None
        self.scores = self._processed(self.reading.logits)
        numbers = None if self.uniforms is None else self.uniforms.judging
        self.verdict = self.judge.judge(self.slots, self.tree, self.scores, numbers, self.reading)
        return self.verdict

    def _processed(self, logits: Tensor) -> Tensor:
        prefixes, room = [row.ids for row in self.rows], [row.room for row in self.rows]
        try:
            return self.processing(self.tree, logits, prefixes, room)
        except Exception as error:
            if len(self.rows) == 1:
                self.failed[0] = error
                return logits
        parts = []
        for place, row in enumerate(self.rows):  # find whose processors fail; the others go on
            alone = Processing([row.processing])
            one = logits[place : place + 1]
            try:
                parts.append(alone(tree_of(self.tree, [place]), one, [row.ids], [row.room]).float())
            except Exception as error:
                self.failed[place] = error
                parts.append(one.float())
        return torch.cat(parts)


def tree_of(tree: DraftTree, places: Sequence[int]) -> DraftTree:
    """The trees of some rows."""
    index = list(places)

    def mine(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 and tree.tokens.shape[0] != 1 else tensor[index]

    return DraftTree(
        tokens=tree.tokens[index],
        parents=mine(tree.parents),
        depth=mine(tree.depth),
        ancestors=mine(tree.ancestors),
        valid=mine(tree.valid),
        max_depth=tree.max_depth,
        max_children=tree.max_children,
        q=None if tree.q is None else tree.q[index],
    )


def tree_piece(context: Context, slots: Sequence[int], tree: DraftTree) -> Piece:
    """The trees of rows whose prompts are in the cache; ``tree`` may hold further rows behind theirs."""
    count = len(slots)

    def mine(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 else tensor[:count]

    chain = tree.size == 1
    allow = None if chain else mine(tree.ancestors)
    return context.piece(slots, tree.tokens[:count], allow, mine(tree.depth))


def with_tree(context: Context, chunk: Piece, length: int, tree: DraftTree, place: int) -> Piece:
    """The last chunk of a prompt of ``length`` tokens with the guesses behind it: its last token is their root."""
    target, count, nodes = context.target, chunk.count, tree.size - 1
    device = target.device
    one = tree_of(tree, [place])
    tokens, depth, above = one.tokens[0, 1:], one.depth[0, 1:], one.ancestors[0, 1:, 1:]
    allow = torch.ones(count + nodes, count + nodes, dtype=torch.bool, device=device).tril()
    if chunk.allow is not None:
        allow[:count, :count] = chunk.allow[0]
    allow[count:, count:] = above
    own = torch.arange(count, device=device) if chunk.depth is None else chunk.depth[0]
    assert chunk.positions is not None
    root = chunk.positions[..., -1:]  # [3 or 1, 1, 1]
    behind = target.family.limits.within(root[0] + depth, [length], None)
    embeddings = chunk.embeddings
    if embeddings is not None:
        embeddings = torch.cat([embeddings, target.embed(tokens)[None].to(embeddings)], 1)
    return Piece(
        rows=chunk.rows,
        tokens=torch.cat([chunk.tokens, tokens[None]], 1),
        allow=allow[None],
        depth=torch.cat([own, own[-1] + depth])[None],
        shift=chunk.shift,
        embeddings=embeddings,
        added=[pad(a, (0, 0, 0, nodes)) for a in chunk.added],
        positions=torch.cat([chunk.positions, behind[None].expand(root.shape[0], -1, -1)], 2),
        logits_from=count - 1,
    )


def joined(readings: Sequence[Reading], firsts: Sequence[int]) -> Reading:
    """One reading of several rows' trees.

    Args:
        firsts: per reading the first of its tokens that belongs to a tree (its root).
    """
    if len(readings) == 1 and firsts[0] == 0:
        return readings[0]
    hidden = {
        layer: torch.cat([r.hidden[layer][:, first:] for r, first in zip(readings, firsts, strict=True)])
        for layer in readings[0].hidden
    }
    return Reading(torch.cat([r.logits for r in readings]), hidden)
