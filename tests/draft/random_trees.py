"""Random trees for hypothesis, with everything about them computed in plain Python."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from saccade.draft.trees.policy import Frontier, Growth
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict

Path = tuple[int, ...]


@dataclass(frozen=True)
class NaiveTree:
    """One row's tree: parent, token and validity of every node, root first."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    valid: tuple[bool, ...]

    def path(self, node: int) -> list[int]:
        """Node indices from the root down to ``node``; a padding node stands alone."""
        if not self.valid[node]:
            return [node]
        return [0] if node == 0 else [*self.path(self.parents[node]), node]

    def depth(self, node: int) -> int:
        return len(self.path(node)) - 1

    def below_root(self, node: int) -> list[int]:
        """Tokens on the way to ``node``, the root's own not counted."""
        return [self.tokens[n] for n in self.path(node)[1:]]


def rank_paths(tree: NaiveTree) -> list[tuple[int, ...]]:
    """Child ranks on the way to every node but the root."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents):
        if node:
            paths.append((*paths[parent], tree.parents[1:node].count(parent)))
    return paths[1:]


def trees(rows: int, vocab: int = 5, max_nodes: int = 9, padded: bool = True) -> st.SearchStrategy[list[NaiveTree]]:
    """``rows`` trees of equally many nodes."""

    def build(count: int) -> st.SearchStrategy[list[NaiveTree]]:
        parents = st.tuples(st.just(0), *(st.integers(0, i - 1) for i in range(1, count)))
        tokens = st.tuples(*(st.integers(0, vocab - 1) for _ in range(count)))
        cut = st.integers(1, count) if padded else st.just(count)
        one = st.builds(lambda p, t, n: NaiveTree(p, t, tuple(i < n for i in range(count))), parents, tokens, cut)
        return st.lists(one, min_size=rows, max_size=rows)

    return st.integers(1, max_nodes).flatmap(build)


def draft_tree(rows: Sequence[NaiveTree], q: Tensor | None = None) -> DraftTree:
    """The batch of trees as the library has it."""
    count = len(rows[0].parents)
    ancestors = [[[j in row.path(i) for j in range(count)] for i in range(count)] for row in rows]
    depth = [[row.depth(i) for i in range(count)] for row in rows]
    children = [max((row.parents[1:].count(i) for i in range(count)), default=0) for row in rows]
    return DraftTree(
        tokens=torch.tensor([row.tokens for row in rows]),
        parents=torch.tensor([row.parents for row in rows]),
        depth=torch.tensor(depth),
        ancestors=torch.tensor(ancestors),
        valid=torch.tensor([row.valid for row in rows]),
        max_depth=max(map(max, depth)),
        max_children=max(children),
        q=q,
    )


def chains(roots: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftTree:
    """One chain per row, after its root."""
    count = max(map(len, drafts)) + 1
    rows = [[root, *draft, *[0] * (count - 1 - len(draft))] for root, draft in zip(roots, drafts, strict=True)]
    lengths = torch.tensor([[len(draft) + 1] for draft in drafts])
    return DraftTree.chains(torch.tensor(rows), torch.arange(count) < lengths)


def judged(judge: Any, tree: DraftTree, scores: Tensor, uniforms: Tensor | None = None) -> Verdict:
    """A judge's verdict on trees of as many rows as there are scores."""
    verdict: Verdict = judge.judge(range(len(scores)), tree, scores, uniforms, ForwardOutput(scores))
    return verdict


class PathModel:
    """A drafter whose logits are fixed random numbers for every path of tokens.

    Args:
        levels: how many different logits there are; few of them make ties.
    """

    def __init__(self, vocab: int, seed: int, levels: int | None = None) -> None:
        self.vocab, self._seed, self._levels = vocab, seed, levels
        self._known: dict[tuple[int, Path], list[float]] = {}

    def logits(self, row: int, path: Path) -> list[float]:
        if (row, path) not in self._known:
            self._known[row, path] = self._draw(row, path)
        return self._known[row, path]

    def _draw(self, row: int, path: Path) -> list[float]:
        seed = zlib.crc32(repr((self._seed, row, path)).encode())
        generator = torch.Generator().manual_seed(seed)
        if self._levels is not None:
            return torch.randint(self._levels, (self.vocab,), generator=generator).double().tolist()
        return (2 * torch.randn(self.vocab, generator=generator, dtype=torch.double)).tolist()

    def log_probabilities(self, row: int, path: Path) -> list[float]:
        return torch.tensor(self.logits(row, path), dtype=torch.double).log_softmax(-1).tolist()

    def grow(self, growth: Growth, rows: Sequence[int]) -> DraftTree:
        """Run a policy to its end as a drafter does: a node's path is read off its attention mask alone."""
        ran = [list[tuple[int, int]]() for _ in rows]  # per row (depth, token) of every entry run so far
        frontier = growth.expand(torch.tensor([[self.logits(row, ())] for row in rows]))
        while frontier is not None:
            allow = allowed(frontier, len(ran[0])).expand(len(rows), -1, -1).tolist()
            batch_logits = []
            for place, row in enumerate(rows):
                ran[place] += [(frontier.depth, token) for token in frontier.tokens[place].tolist()]
                node_logits = []
                for seen in allow[place]:
                    assert len(seen) == len(ran[place])
                    path = [entry for entry, visible in zip(ran[place], seen, strict=True) if visible]
                    assert [depth for depth, _ in path] == list(range(1, frontier.depth + 1))
                    node_logits.append(self.logits(row, tuple(token for _, token in path)))
                batch_logits.append(node_logits)
            frontier = growth.expand(torch.tensor(batch_logits))
        return growth.tree()


def allowed(frontier: Frontier, before: int) -> Tensor:
    """``[B or 1, W, F + W]`` what the nodes of a frontier see of the F entries run ``before`` and themselves."""
    if frontier.attention_mask is not None:
        return frontier.attention_mask
    width = frontier.tokens.shape[1]
    return torch.ones(1, width, before + width, dtype=torch.bool).tril(before)


def token_paths(tree: DraftTree, row: int) -> list[Path]:
    """Every valid node's token path, in node order."""
    parents = tree.parents.expand(tree.tokens.shape[0], -1)[row].tolist()
    tokens, valid = tree.tokens[row].tolist(), tree.valid.expand(tree.tokens.shape[0], -1)[row].tolist()
    paths: list[Path] = [()]
    for node in range(1, tree.size):
        assert parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return [path for path, is_valid in zip(paths, valid, strict=True) if is_valid]


def assert_consistent(tree: DraftTree) -> None:
    """Depth, ancestors and bounds say what the parents say."""
    batch = tree.tokens.shape[0]
    parents, valid = (t.expand(batch, -1).tolist() for t in (tree.parents, tree.valid))
    depth, ancestors = tree.depth.expand(batch, -1).tolist(), tree.ancestors.expand(batch, -1, -1).tolist()
    for row in range(batch):
        naive = NaiveTree(tuple(parents[row]), tuple(tree.tokens[row].tolist()), tuple(valid[row]))
        for node in range(tree.size):
            assert depth[row][node] == naive.depth(node) <= tree.max_depth
            assert [n for n, above in enumerate(ancestors[row][node]) if above] == sorted(naive.path(node))
            children = [n for n in range(1, tree.size) if parents[row][n] == node and valid[row][n]]
            assert len(children) <= tree.max_children
