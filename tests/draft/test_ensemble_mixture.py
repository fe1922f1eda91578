"""The mixture of views, and which positions teach an ensemble about them."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from random_trees import PathModel
from torch import Tensor

from families import FAMILIES
from harness import answers, draft, prompts_of, target
from numerals import Numerals
from saccade.draft.ensemble.ensemble import EnsembleDrafter, MixedGrowth, Mixture, Multimodal, TextOnly
from saccade.draft.ensemble.views import Caption
from saccade.draft.ensemble.weights import Grid, Verified, VerifiedBlock, blocks_of, verified_positions
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.policy import Chain, StaticTree, TopProposer
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.target_model.adapter import Target
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict, path_to

BATCH, VIEWS, VOCAB = 5, 3, 11
CPU = torch.device("cpu")
POLICIES: dict[str, Any] = {
    "chain": Chain(4),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]),
    "dynamic": DynamicTree(top=3, max_depth=4, total=12),
    "width": WidthTree(3, 4),
}


class _Hearing:
    """A growth that keeps what it was told."""

    def expand(self, logits: Tensor) -> None:
        self.logits = logits

    def tree(self) -> DraftTree:
        raise AssertionError("these tests look at what it was told, not at trees")


def mixture(logits: Tensor, weights: Tensor) -> Tensor:
    """``[B, W, V]`` what a policy is told, from ``[B, m, W, V]`` of the views."""
    rows, views = weights.shape
    hearing, mixing = _Hearing(), Mixture(Chain(1), rows, views, CPU)
    mixing.weights = weights
    MixedGrowth(hearing, mixing, range(rows * views), rows).expand(logits.transpose(0, 1).flatten(0, 1))
    return hearing.logits


@pytest.mark.parametrize("silent", [(0,), (2,), (1,), (0, 2), (0, 1)])
def test_views_that_have_no_weight_in_a_row_run_none_of_its_guesses(silent: tuple[int, ...]) -> None:
    """In the other rows they do: what a row runs is its own affair."""
    weights = torch.rand(BATCH, VIEWS)
    weights[::2, list(silent)] = 0
    weights /= weights.sum(1, keepdim=True)
    mixing = Mixture(WidthTree(2, 3), BATCH, VIEWS, CPU)
    mixing.weights = weights
    growth = mixing.begin(range(VIEWS * BATCH), torch.arange(BATCH).repeat(VIEWS), TopProposer())
    frontier = growth.expand(torch.randn(VIEWS * BATCH, 1, VOCAB))
    assert frontier is not None
    assert mixing.roots.shape == (VIEWS, BATCH, 1, VOCAB)
    run = [(i, b) for i in range(VIEWS) for b in range(BATCH) if b % 2 or i not in silent]
    assert frontier.rows == [i * BATCH + b for i, b in run]
    assert frontier.tokens.shape == (len(run), 2)
    guesses: dict[int, list[int]] = {}
    for (_, b), tokens in zip(run, frontier.tokens.tolist(), strict=True):
        assert guesses.setdefault(b, tokens) == tokens
    received = _Hearing()
    growth._growth = received  # type: ignore[attr-defined]
    logits = torch.randn(VIEWS, BATCH, 2, VOCAB)
    growth.expand(torch.stack([logits[i, b] for i, b in run]))
    expected = (weights.t()[..., None, None] * logits.softmax(-1)).sum(0)
    assert torch.allclose(received.logits.softmax(-1), expected, atol=1e-6)


def test_a_row_of_one_view_beside_others_is_told_what_that_view_says() -> None:
    """Rows 3 and 1 are named, of which row 1 has read the same in all views."""
    mixing = Mixture(WidthTree(2, 3), BATCH, VIEWS, CPU)
    mixing.weights = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    rows = [3, 1, BATCH + 3, 2 * BATCH + 3]
    growth = mixing.begin(rows, torch.tensor([7, 9, 7, 7]), TopProposer())
    logits = torch.randn(4, 1, VOCAB)
    frontier = growth.expand(logits)
    assert frontier is not None
    assert frontier.rows == rows
    q = logits.softmax(-1)
    mixed = torch.stack([0.5 * q[0] + 0.3 * q[2] + 0.2 * q[3], q[1]])
    best = mixed[:, 0].topk(2).indices
    assert torch.equal(frontier.tokens, best[[0, 1, 0, 0]])
    assert growth.tree().tokens[:, 0].tolist() == [7, 9]


def test_the_mixture_s_logits_are_finite_where_no_view_sees_a_token() -> None:
    """Policies add log-probabilities up and multiply them by probabilities."""
    logits = torch.tensor([0.0, -500.0, -math.inf]).expand(1, 2, 1, 3)
    mixed = mixture(logits, torch.tensor([[0.7, 0.3]]))
    assert torch.isfinite(mixed).all()
    assert torch.allclose(mixed.softmax(-1), torch.tensor([1.0, 0.0, 0.0]))


# --------------------------------------------------------------------------- which positions are learned from


MODEL = PathModel(VOCAB, seed=0)
"""A draft model of its own for every slot, view by view."""


def logits_after(row: int, path: list[int], view: int) -> Tensor:
    """``[V]``"""
    return torch.tensor(MODEL.logits(view * BATCH + row, tuple(path)))


def grown(policy: Any) -> tuple[Mixture, DraftTree]:
    """Trees of all rows, and the views' distributions at their roots."""
    mixing = Mixture(policy, BATCH, VIEWS, CPU)
    mixing.weights = torch.tensor([[0.5, 0.3, 0.2]] * BATCH)
    slots = range(VIEWS * BATCH)
    growth = mixing.begin(slots, torch.arange(BATCH).repeat(VIEWS), TopProposer())
    return mixing, MODEL.grow(growth, slots)


def slowly(tree: DraftTree, scores: Tensor, verdict: Verdict) -> list[list[Any]]:
    """Per row the labelled positions as (p, q of every view, label), by walking down the path."""
    positions = []
    for b in range(BATCH):
        nodes = verdict.path[b, : int(verdict.count[b]) + 1].tolist()
        tokens = [int(tree.tokens[b, n]) for n in nodes[1:]]
        row = []
        for t, node in enumerate(nodes):
            label = tokens[t] if t < len(tokens) else int(verdict.token[b])
            q = torch.stack([logits_after(b, tokens[:t], i).softmax(-1) for i in range(VIEWS)])
            row.append((scores[b, node].softmax(-1)[:VOCAB], q, label))
        positions.append(row)
    return positions


def verified(blocks: dict[int, VerifiedBlock], emitted: dict[int, list[int]]) -> Verified:
    """Verified positions of some rows' blocks, once the views have run the emitted tokens but the last."""
    logits = []
    for row, tokens in emitted.items():
        counts = range(1, max(len(tokens), 2))
        logits.append([torch.stack([logits_after(row, tokens[:n], view) for n in counts]) for view in range(VIEWS)])
    return verified_positions([blocks[row] for row in emitted], [*emitted.values()], logits)


def assert_row(seen: Verified, b: int, expected: list[Any]) -> None:
    """The b-th row of ``seen``."""
    assert list(seen.emitted[b]) == [label for _, _, label in expected]
    assert seen.label[b, : len(expected)].tolist() == list(seen.emitted[b])
    for t, (p, q, _) in enumerate(expected):
        assert torch.allclose(seen.p[b, t], p, atol=1e-6)
        assert torch.allclose(seen.q[:, b, t], q, atol=1e-6)


@pytest.mark.parametrize("larger", [0, 3], ids=["same-vocabulary", "larger-vocabulary"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_accepted_path_and_the_first_rejected_position_teach(policy: str, larger: int) -> None:
    """Where a row goes on, and in its next turn, when what was accepted after the row's end teaches nothing."""
    mixing, tree = grown(POLICIES[policy])
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        scores = torch.randn(BATCH, tree.size, VOCAB + larger, generator=generator)
        last = torch.randint(0, tree.size, (BATCH,), generator=generator)
        depth = tree.depth.expand(BATCH, -1).gather(1, last[:, None])[:, 0]
        verdict = Verdict(path_to(tree, last), depth, torch.randint(0, VOCAB, (BATCH,), generator=generator))
        expected = slowly(tree, scores, verdict)
        blocks = blocks_of(range(BATCH), mixing.roots.unbind(1), tree, scores, verdict)
        for row in range(BATCH):
            assert blocks[row].accepted() == [label for _, _, label in expected[row]]
        room = torch.randint(1, 6, (BATCH,), generator=generator).tolist()
        emitted = {row: blocks[row].accepted()[: room[row]] for row in range(BATCH) if row != step % BATCH}
        seen = verified(blocks, emitted)
        for place, row in enumerate(emitted):
            assert_row(seen, place, expected[row][: room[row]])


class _Watched(Grid):
    """Records the blocks that it observes."""

    def open(self, batch: int, views: int, device: torch.device) -> Any:
        weights: Any = super().open(batch, views, device)
        self.__dict__["seen"] = seen = list[tuple[int, list[int]]]()
        observe = weights.observe
        weights.observe = lambda rows, block: (seen.extend(zip(rows, block.emitted, strict=True)), observe(rows, block))
        return weights


def test_rows_that_have_ended_add_nothing_to_the_history() -> None:
    weighting, views = _Watched(), [Multimodal(), TextOnly(target("llava").config, Numerals())]
    engine = Engine(target("llava"), EnsembleDrafter(draft("llava"), Chain(4), views, weighting))
    end = FAMILIES["llava"].reference("image", rows=3)[1][9]
    outputs = answers(engine, prompts_of("llava"), 40, eos_token_id=end)
    assert len({len(output.tokens) for output in outputs}) > 1
    blocks: list[tuple[int, list[int]]] = weighting.__dict__["seen"]
    for row, output in enumerate(outputs):
        observed = [emitted for slot, emitted in blocks if slot == row]
        assert len(observed) == output.stats.target_passes, (
            "the first block was drafted before the target's prefill, and the last one is observed in the next turn"
        )
        tokens = [token for block in observed for token in block]
        assert tokens == output.tokens[: len(tokens)]


def test_the_time_of_captions_can_be_told_from_prefill() -> None:
    view = Caption(target("llava").config, Numerals(), lambda seen: time.sleep(0.05) or "a story")  # type: ignore[func-returns-value]
    engine = Engine(target("llava"), EnsembleDrafter(draft("llava"), Chain(2), [Multimodal(), view]))
    session: Any = engine.open(1)
    (first,) = answers(engine, prompts_of("llava", rows=1), 3, session=session)
    assert first.stats.times.caption == view.seconds >= 0.05
    (again,) = answers(engine, prompts_of("llava", rows=1), 3, session=session)
    assert again.stats.times.caption == 0


def test_an_ensemble_without_views_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one view"):
        EnsembleDrafter(target("llama"), Chain(2), [])


def test_a_caption_longer_than_its_image_finds_room() -> None:
    """The engine sizes caches by the prompt as it is."""
    case = FAMILIES["smolvlm"]
    target = Target(case.model())
    view = Caption(target.config, Numerals(), lambda seen: "a very long story " * 12)
    drafter = EnsembleDrafter(Target(case.draft_model()), Chain(4), [Multimodal(), view])
    requests = [Request(prompt) for prompt in split(target.config, case.inputs("images2", rows=2))]
    outputs = Engine(target, drafter).generate(requests, max_new_tokens=24)
    assert [output.tokens for output in outputs] == case.reference("images2", rows=2, n=24)
