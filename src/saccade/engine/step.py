"""Parts of one step: prompt chunks, trees with their verdicts, and stage timers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.engine.row import Row
from saccade.output import TreeTrace
from saccade.target.context import Context, Prefill
from saccade.target.forward import ForwardOutput, TokenBlock
from saccade.tree import DraftTree
from saccade.verify.processing import Processing
from saccade.verify.randomness import Uniforms
from saccade.verify.rule import Judge, Rule, Verdict


class Clock:
    """Seconds per named stage of a step: wall time on the CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time until the context closes under ``name``."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            try:
                yield
            finally:
                stop.record(stream)
                self._events.append((name, start, stop))
        else:
            started = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - started

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def read(self) -> dict[str, float]:
        """Seconds per stage; to be asked for once the step's results are on the host."""
        for name, start, stop in self._events:
            stop.synchronize()  # has happened: the transfer of the results came behind it
            self._seconds[name] += start.elapsed_time(stop) / 1000
        self._events.clear()
        return dict(self._seconds)


HEAD = 5
"""Numbers per row before the path."""


def pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None, room: Tensor) -> Tensor:
    """``[A, 5 + 3 * (D + 1)]`` integers: count, token, drafted nodes (without padding and those deeper than what may
    still be emitted, which are there for longer rows' sake), whether logits are unsound, whether the token was sampled
    from scores without a finite maximum, path nodes, path tokens, path marks.

    Args:
        sampled: scores ``[A, N, V]`` that tokens were sampled from; None when decoding greedily.
        room: ``[A]`` tokens that each row may still get.
    """
    unsound = ~torch.isfinite(logits.amax((1, 2)))
    barred = torch.zeros_like(unsound)
    if sampled is not None:  # only the path's last node can be such a one: nothing is accepted below it
        last = verdict.path.gather(1, verdict.count[:, None])[:, 0]
        barred = ~torch.isfinite(sampled[torch.arange(len(last), device=last.device), last].amax(-1))
    path_tokens = tree.tokens.gather(1, verdict.path)
    drafted = (tree.valid & (tree.depth <= room[:, None])).sum(1) - 1
    head = torch.stack([verdict.count, verdict.token, drafted, unsound.long(), barred.long()], 1)
    marks = torch.zeros_like(path_tokens) if verdict.marks is None else verdict.marks
    return torch.cat([head, verdict.path, path_tokens, marks], 1)


def to_host(packed: Sequence[Tensor]) -> list[list[list[int]]]:
    """The rows of several packed tensors on the host, by one transfer."""
    if len(packed) == 1:
        return [packed[0].tolist()]
    widest = max(part.shape[1] for part in packed)
    joint = torch.cat([pad(part, (0, widest - part.shape[1])) for part in packed]).tolist()
    found, at = [], 0
    for part in packed:
        found.append([row[: part.shape[1]] for row in joint[at : at + len(part)]])
        at += len(part)
    return found


def traces(tree: DraftTree, kept: Sequence[Sequence[int]]) -> list[TreeTrace | None]:
    """Every row's tree on the host, padding nodes left out (they stand behind the others)."""
    batch = tree.tokens.shape[0]
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.expand(batch, -1).tolist(),
        tree.valid.expand(batch, -1).sum(1).tolist(),
        kept,
        strict=True,
    )
    return [
        TreeTrace(tuple(tokens[:count]), tuple(parents[:count]), tuple(path)) if path else None
        for tokens, parents, count, path in rows
    ]


@dataclass(slots=True)
class Chunk:
    """A part of a row's prompt that runs in this step.

    Attributes:
        stop: prompt tokens that have run after it.
        guessed: whether the row's first tree runs behind it.
        piece: what runs of it; None where it runs alone.
    """

    row: Row
    reader: Prefill
    stop: int
    guessed: bool = False
    piece: TokenBlock | None = None

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.reader.prompt)


@dataclass(slots=True)
class VerificationGroup:
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
    reading: ForwardOutput | None = None
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


def tree_piece(context: Context, slots: Sequence[int], tree: DraftTree) -> TokenBlock:
    """The trees of rows whose prompts are in the cache; ``tree`` may hold further rows behind theirs."""
    count = len(slots)

    def mine(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 else tensor[:count]

    chain = tree.size == 1
    allow = None if chain else mine(tree.ancestors)
    return context.piece(slots, tree.tokens[:count], allow, mine(tree.depth))


def with_tree(context: Context, chunk: TokenBlock, length: int, tree: DraftTree, place: int) -> TokenBlock:
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
    return TokenBlock(
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


def joined(readings: Sequence[ForwardOutput], firsts: Sequence[int]) -> ForwardOutput:
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
    return ForwardOutput(torch.cat([r.logits for r in readings]), hidden)
