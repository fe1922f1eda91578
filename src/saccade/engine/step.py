"""Parts of one step: prefill chunks, and trees with their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.engine.row import Row
from saccade.output import TreeTrace
from saccade.target_model.context import Context, Prefill
from saccade.target_model.forward import ForwardOutput, TokenBlock
from saccade.target_model.sharding import Ranks
from saccade.tree import DraftTree
from saccade.verify.lossless import Uniforms
from saccade.verify.processing import Processing
from saccade.verify.rule import Judge, Rule, Verdict


def pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None) -> Tensor:
    """Pack verdicts into ``[A, 4 + 4 * (D + 1)]`` integers for one transfer.

    Per row: accepted count, token, whether logits are not finite, whether the token was sampled from scores without a
    finite maximum, path nodes, path tokens, nodes of at most each depth without padding, path marks.
    Shapes: sampled ``[A, N, V]``.
    """
    unsound = _not_finite(logits.amax((1, 2)))
    barred = torch.zeros_like(unsound)
    if sampled is not None:  # only at the path's last node: nothing is accepted below it
        last = verdict.path.gather(1, verdict.count[:, None])[..., None]
        barred = _not_finite(sampled.gather(1, last.expand(-1, 1, sampled.shape[2])).amax((1, 2)))
    count, token = verdict.count[:, None], verdict.token[:, None]
    path_tokens = tree.tokens.gather(1, verdict.path)
    depths = torch.arange(verdict.path.shape[1], device=logits.device)[:, None]
    nodes = (tree.valid[:, None] & (tree.depth[:, None] <= depths)).sum(-1).expand_as(path_tokens)
    marks = torch.zeros_like(path_tokens) if verdict.marks is None else verdict.marks
    flags = [unsound[:, None], barred[:, None]]
    return torch.cat([count, token, *flags, verdict.path, path_tokens, nodes, marks], 1)


def _not_finite(values: Tensor) -> Tensor:
    """1 where values are infinite or NaN, else 0."""
    return (values - values != 0).long()


def to_host(packed: Sequence[Tensor]) -> list[list[list[int]]]:
    """Move the rows of several packed tensors to the host in one transfer."""
    if len(packed) == 1:
        return [packed[0].tolist()]
    widest = max(part.shape[1] for part in packed)
    joint = torch.cat([pad(part, (0, widest - part.shape[1])) for part in packed]).tolist()
    rows = iter(joint)
    return [[next(rows)[: part.shape[1]] for _ in range(len(part))] for part in packed]


def traces(
    tree: DraftTree, paths: Sequence[Sequence[int]], signals: Sequence[Mapping[str, tuple[float, ...]]]
) -> list[TreeTrace | None]:
    """Copy every row's tree to the host without padding nodes, which are last; None for rows without a path."""
    batch = tree.tokens.shape[0]
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.expand(batch, -1).tolist(),
        tree.valid.expand(batch, -1).sum(1).tolist(),
        paths,
        signals,
        strict=True,
    )
    return [
        TreeTrace(tuple(tokens[:count]), tuple(parents[:count]), tuple(path), own) if path else None
        for tokens, parents, count, path, own in rows
    ]


@dataclass(slots=True)
class PrefillChunk:
    """Part of a row's prompt that runs in this step."""

    row: Row  # the row
    prefill: Prefill  # of its prompt
    stop: int  # prompt tokens that are computed once it has run
    has_tree: bool = False  # whether the row's first tree runs behind it
    block: TokenBlock | None = None  # its tokens; None where it runs in a pass of its own

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.stop == len(self.prefill.prompt)


@dataclass(slots=True)
class VerificationGroup:
    """Rows that one rule judges together, with their trees and the target's outputs."""

    rows: list[Row]  # decoding rows first, then those whose prompts end in this step
    tree: DraftTree  # one tree per row
    rule: Rule
    judge: Judge
    processing: Processing
    uniforms: Uniforms | None
    drafted: bool  # whether a drafter proposed the trees and observes the outcome
    output: ForwardOutput | None = None  # logits `[A, N, V]` and hidden states `[A, N, d]` of the trees' nodes
    scores: Tensor | None = None
    verdict: Verdict | None = None
    failed: dict[int, Exception] = field(default_factory=dict)  # errors of logits processors by index of the row

    @property
    def slots(self) -> list[int]:
        """Cache slots of the rows."""
        return [slot for row in self.rows if (slot := row.slot) is not None]

    def decide(self, ranks: Ranks | None = None) -> Tensor:
        """Process the logits and judge the trees; return the packed verdict (`pack`), that of rank 0."""
        assert self.output is not None
        self.scores = self._processed(self.output.logits)
        numbers = None if self.uniforms is None else self.uniforms.judging
        self.verdict = self.judge.judge(self.slots, self.tree, self.scores, numbers, self.output)
        if ranks is not None:
            self.verdict = _first_verdict(ranks, self.verdict)
        sampled = self.scores if self.rule.samples else None
        return pack(self.tree, self.verdict, self.output.logits, sampled)

    def _processed(self, logits: Tensor) -> Tensor:
        prefixes, remaining = [row.ids for row in self.rows], [row.remaining for row in self.rows]
        try:
            return self.processing(self.tree, logits, prefixes, remaining)
        except Exception as error:
            if len(self.rows) == 1:
                self.failed[0] = error
                return logits
        parts = []
        for index, row in enumerate(self.rows):  # find the rows whose processors fail; the others continue
            alone = Processing([row.processing])
            one = logits[index : index + 1]
            try:
                parts.append(alone(select_trees(self.tree, [index]), one, [row.ids], [row.remaining]).float())
            except Exception as error:
                self.failed[index] = error
                parts.append(one.float())
        return torch.cat(parts)


def _first_verdict(ranks: Ranks, verdict: Verdict) -> Verdict:
    marks = [] if verdict.marks is None else [verdict.marks]
    _, found = ranks.tensors([], [verdict.path, verdict.count, verdict.token, *marks])
    return Verdict(*found)


def select_trees(tree: DraftTree, places: Sequence[int]) -> DraftTree:
    """Select the trees of some rows."""
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


def tree_block(context: Context, slots: Sequence[int], tree: DraftTree) -> TokenBlock:
    """Block of the trees of decoding rows; ``tree`` may hold further rows behind theirs."""
    count = len(slots)

    def mine(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == 1 else tensor[:count]

    mask = None if tree.size == 1 else mine(tree.ancestors)
    return context.block(slots, tree.tokens[:count], mask, mine(tree.depth))


def append_tree(context: Context, chunk: TokenBlock, length: int, tree: DraftTree, index: int) -> TokenBlock:
    """Append one row's tree to the last chunk of a prompt of ``length`` tokens, whose last token is the root."""
    target, count, nodes = context.target, chunk.count, tree.size - 1
    device = target.device
    one = select_trees(tree, [index])
    tokens, depth, above = one.tokens[0, 1:], one.depth[0, 1:], one.ancestors[0, 1:, 1:]
    mask = torch.ones(count + nodes, count + nodes, dtype=torch.bool, device=device).tril()
    if chunk.attention_mask is not None:
        mask[:count, :count] = chunk.attention_mask[0]
    mask[count:, count:] = above
    own = torch.arange(count, device=device) if chunk.depth is None else chunk.depth[0]
    assert chunk.positions is not None
    root = chunk.positions[..., -1:]  # [3 or 1, 1, 1]
    below = target.traits.limits.clamp_positions(root[0] + depth, [length], None)
    embeddings = chunk.embeddings
    if embeddings is not None:
        embeddings = torch.cat([embeddings, target.embed(tokens)[None].to(embeddings)], 1)
    return TokenBlock(
        rows=chunk.rows,
        tokens=torch.cat([chunk.tokens, tokens[None]], 1),
        attention_mask=mask[None],
        depth=torch.cat([own, own[-1] + depth])[None],
        slot_shifts=chunk.slot_shifts,
        embeddings=embeddings,
        deepstack=[pad(layer, (0, 0, 0, nodes)) for layer in chunk.deepstack],
        positions=torch.cat([chunk.positions, below[None].expand(root.shape[0], -1, -1)], 2),
        logits_from=count - 1,
    )
