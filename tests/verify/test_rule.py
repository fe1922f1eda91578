"""The greedy rule walks down the tree as plain Python does, and paths lead from the root to their node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, judged, trees

from pretend_device import PretendDevice
from saccade.engine.step import VerificationGroup, pack, to_host
from saccade.target_model.token_blocks import ForwardOutput
from saccade.verify.rule import Greedy, path_to

VOCAB = 3  # few tokens, so that guesses are often right


@settings(max_examples=30, deadline=None)
@given(trees(rows=3), st.data())
def test_a_path_lists_the_nodes_from_the_root_down(rows: list[NaiveTree], data: st.DataObject) -> None:
    tree = draft_tree(rows)
    nodes = [data.draw(st.sampled_from([n for n, valid in enumerate(r.valid) if valid])) for r in rows]
    paths = path_to(tree, torch.tensor(nodes)).tolist()
    for row, node, path in zip(rows, nodes, paths, strict=True):
        expected = row.path(node)
        assert path == expected + [0] * (tree.max_depth + 1 - len(expected))


def naive_greedy(tree: NaiveTree, choice: list[int]) -> list[list[int]]:
    """Token paths of all deepest nodes that plain decoding would pass through."""
    standing = [0]
    for node in range(1, len(tree.parents)):
        above = tree.parents[node]
        if tree.valid[node] and above in standing and tree.tokens[node] == choice[above]:
            standing.append(node)
    deepest = max(tree.depth(n) for n in standing)
    return [tree.path(n) for n in standing if tree.depth(n) == deepest]


@settings(max_examples=60, deadline=None)
@given(trees(rows=3, vocab=VOCAB), st.integers(0, 999))
def test_greedy_accepts_exactly_what_plain_decoding_would_emit(rows: list[NaiveTree], seed: int) -> None:
    """Siblings may repeat a token, as mixed drafts make them; any of the repeated paths will do."""
    tree = draft_tree(rows)
    scores = torch.randn(3, tree.size, VOCAB, generator=torch.Generator().manual_seed(seed))
    verdict = judged(Greedy(), tree, scores)
    for row, naive in enumerate(rows):
        choice = scores[row].argmax(-1).tolist()
        count = int(verdict.count[row])
        path = verdict.path[row, : count + 1].tolist()
        assert path in naive_greedy(naive, choice)
        assert int(verdict.token[row]) == choice[path[-1]]
        assert verdict.path[row, count + 1 :].tolist() == [0] * (verdict.path.shape[1] - count - 1)


@settings(max_examples=40, deadline=None)
@given(trees(rows=2, vocab=VOCAB), st.integers(0, 999), st.integers(1, 6))
def test_a_device_and_the_host_give_the_same_verdict(rows: list[NaiveTree], seed: int, remaining: int) -> None:
    """What the host decides at once, a device packs: paths, tokens, drafted nodes, and logits that are not finite."""
    tree = draft_tree(rows)
    scores = torch.randn(2, tree.size, VOCAB, generator=torch.Generator().manual_seed(seed))
    scores[1, -1, 0] = torch.inf
    read = []
    for place in ("cpu", "pretend"):
        with PretendDevice():
            there, there_scores = tree.to(torch.device(place)), scores.to(place)
            verdict = judged(Greedy(), there, there_scores)
            assert (verdict.host is None) == (place == "pretend")
            two = [SimpleNamespace(remaining=remaining, slot=slot) for slot in range(2)]
            group: Any = SimpleNamespace(rows=two, tree=there, output=ForwardOutput(there_scores))
            if verdict.host is not None:
                decided: Any = VerificationGroup._on_host(group, verdict.host)
            else:
                decided = pack(there, verdict, there_scores, None)
            read.append(to_host([decided], [[remaining] * 2])()[0])
    for ours, theirs in zip(*read, strict=True):
        assert (ours.token, ours.drafted, ours.unsound) == (theirs.token, theirs.drafted, theirs.unsound)
        assert ours.tokens == theirs.tokens  # of siblings that repeat a token, any will do
    assert [each.unsound for each in read[0]] == [False, True]


def test_greedy_takes_the_longest_of_two_paths_with_the_same_tokens() -> None:
    row = NaiveTree((0, 0, 0, 2), (0, 1, 1, 2), (True,) * 4)
    scores = torch.full((1, 4, VOCAB), -1.0)
    for node, token in enumerate((1, 2, 2, 0)):
        scores[0, node, token] = 1.0
    verdict = judged(Greedy(), draft_tree([row]), scores)
    assert verdict.path.tolist() == [[0, 2, 3]]
    assert verdict.token.tolist() == [0]


def test_a_padding_node_is_never_accepted_even_when_its_token_is_right() -> None:
    row = NaiveTree((0, 0), (0, 1), (True, False))
    scores = torch.zeros(1, 2, VOCAB)
    scores[..., 1] = 1.0
    tree = draft_tree([row])
    tree.max_depth = 1
    assert judged(Greedy(), tree, scores).count.tolist() == [0]
