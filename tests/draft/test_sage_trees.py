"""SAGE's trees are those of a naive recursion, step after step, whatever the rows beside them do."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_trees import Path, PathModel, assert_consistent, token_paths

from saccade.draft.trees.policy import SPECVLM_TREE, TopProposer
from saccade.draft.trees.sage import SageTree
from saccade.verify.rule import Verdict, path_to

VOCAB, BATCH = 13, 3
ROOTS = torch.tensor([3, 4, 5])
MARGIN = 1e-5
"""fp32 probabilities are off by about 1e-6; decisions closer than this are left out."""

POLICIES = st.builds(
    SageTree,
    d_min=st.integers(1, 3),
    d_max=st.integers(3, 5),
    w_min=st.integers(1, 3),
    w_max=st.integers(3, 6),
    total=st.sampled_from([5, 12, 64]),
    k=st.sampled_from([2, 5, 10, 20]),
    threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    signal=st.sampled_from(["entropy", "top"]),
    lookahead=st.booleans(),
    probability=st.sampled_from(["path", "own"]),
    window=st.sampled_from([0, 1, 3]),
    ceiling=st.just(6),
)


def half_up(value: float) -> int:
    return max(1, math.floor(value + 0.5))


@dataclass
class NaiveSage:
    """One row's policy over steps, by recursion over single nodes in double precision.

    Attributes:
        margin: the least distance of any decision from tipping over; rounding may decide below it.
    """

    policy: SageTree
    confidence: float = 0.5
    deepest: int = 0
    lengths: list[int] = field(default_factory=list)
    first: bool = True
    margin: float = 1.0

    def __post_init__(self) -> None:
        self.deepest = self.policy.d_max

    def step(self, model: PathModel, row: int) -> set[Path]:
        """The step's tree, as token paths."""
        root = sorted((math.exp(v) for v in model.log_probabilities(row, ())), reverse=True)[: self.policy.k]
        measured = root[0] if self.policy.signal == "top" else _confidence(root)
        if not self.policy.lookahead:
            self.confidence = measured
        found = self._static(model, row) if self.first else self._grown(model, row)
        self.confidence, self.first = measured, False
        best = sorted(found, key=lambda path: -found[path])
        if len(best) > self.policy.total:
            self._close(found[best[self.policy.total - 1]], found[best[self.policy.total]])
        return {(), *best[: self.policy.total]}

    def observe(self, accepted: int) -> None:
        if not self.policy.window:
            return
        self.lengths = [*self.lengths, accepted][-self.policy.window :]
        average = sum(self.lengths) / len(self.lengths)
        if average < self.policy.low:
            self.deepest = max(self.deepest - 1, self.policy.d_min)
        if average > self.policy.high:
            self.deepest = min(self.deepest + 1, self.policy.ceiling)

    def _static(self, model: PathModel, row: int) -> dict[Path, float]:
        tokens: dict[Path, Path] = {(): ()}
        found: dict[Path, float] = {}
        for ranks in sorted(SPECVLM_TREE, key=len):
            if ranks[:-1] not in tokens:
                continue
            above = tokens[ranks[:-1]]
            children = _best(model, row, above)
            if ranks[-1] < len(children):
                token, own = children[ranks[-1]]
                tokens[ranks] = (*above, token)
                found[tokens[ranks]] = found.get(above, 1.0) * own
        return found

    def _grown(self, model: PathModel, row: int) -> dict[Path, float]:
        policy = self.policy
        depth = policy.d_min + self.confidence * (self.deepest - policy.d_min)
        width = policy.w_min + (1 - self.confidence) * (policy.w_max - policy.w_min)
        self._close(depth % 1, 0.5)
        found: dict[Path, float] = {}

        def expand(path: Path, path_probability: float, probability: float) -> None:
            level = len(path) + 1
            if level > half_up(depth):
                return
            here = width if level == 1 else width / level * (0.5 + probability)
            self._close(here % 1, 0.5)
            for rank, (token, own) in enumerate(_best(model, row, path)[: half_up(here)]):
                likely = path_probability * own
                judged = likely if policy.probability == "path" else own
                self._close(judged, policy.threshold * level / depth)
                if judged > policy.threshold * level / depth or (level == 1 and rank == 0):
                    found[(*path, token)] = likely
                    expand((*path, token), likely, judged)

        expand((), 1.0, 1.0)
        return found

    def _close(self, one: float, other: float) -> None:
        self.margin = min(self.margin, abs(one - other))


def _best(model: PathModel, row: int, path: Path) -> list[tuple[int, float]]:
    own = [math.exp(v) for v in model.log_probabilities(row, path)]
    return sorted(enumerate(own), key=lambda item: -item[1])


def _confidence(top: list[float]) -> float:
    shares = [p / sum(top) for p in top]
    return 1 + sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))


class Sharper(PathModel):
    """Rows differ in how sure the drafter is."""

    def logits(self, row: int, path: tuple[int, ...]) -> list[float]:
        return [(row + 0.5) * value for value in super().logits(row, path)]


@settings(max_examples=30, deadline=None)
@given(
    POLICIES,
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.booleans()), min_size=BATCH, max_size=BATCH),
        min_size=3,
        max_size=5,
    ),
)
@pytest.mark.parametrize("exact", [True, False], ids=["host-sizes", "bounded-sizes"])
def test_trees_are_those_of_a_naive_recursion_for_rows_that_come_and_go_in_groups(
    exact: bool, policy: SageTree, steps: list[list[tuple[int, int, bool]]]
) -> None:
    """A row is in one of two groups of a step, or in none; all begin before any is observed. Some leave their slots."""
    if not exact and policy.probability == "own" and policy.threshold == 0:
        return  # 64 nodes at every level: right, but slow in the naive model
    shaping = policy.open(BATCH, torch.device("cpu"))
    naive = [NaiveSage(policy) for _ in range(BATCH)]
    for step, rows in enumerate(steps):
        model = Sharper(VOCAB, seed=step)
        groups = [[row for row in range(BATCH) if rows[row][1] == number] for number in (0, 1)]
        for group in filter(None, groups):
            growth = shaping.begin(group, ROOTS[group], TopProposer())
            growth._exact = exact  # type: ignore[attr-defined]
            tree = model.grow(growth, group)
            assert_consistent(tree)
            expected = [naive[row].step(model, row) for row in group]
            assume(min(row.margin for row in naive) > MARGIN)
            for place in range(len(group)):
                paths = token_paths(tree, place)
                assert set(paths) == expected[place]
                assert len(paths) == len(expected[place])
            assert not exact or tree.size == max(map(len, expected))
            assert tree.size <= policy.max_nodes
            assert tree.max_depth <= policy.max_depth
            assert tree.max_children <= policy.max_children
        for group in filter(None, groups):
            counts = torch.tensor([rows[row][0] for row in group])
            shaping.observe(group, Verdict(torch.zeros(len(group), 1).long(), counts, torch.zeros_like(counts)))
            for row in group:
                naive[row].observe(rows[row][0])
        for row, (_, _, leaves) in enumerate(rows):
            if leaves:
                shaping.restart(row)
                naive[row] = NaiveSage(policy)


def test_numbers_that_are_none_give_the_confidence_of_the_start() -> None:
    for top in ([math.nan] * 10, [0.0] * 10, [1.0], []):
        assert SageTree().confidence(top) == 0.5


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["path", "own"]))
def test_the_last_accepted_node_gives_the_confidence_if_that_is_asked_for(seed: int, probability: str) -> None:
    """Of a node that the drafter has not run, the one above it; after the first, static tree and after others."""
    policy = SageTree(d_max=5, ceiling=5, w_max=4, total=30, probability=probability, alpha_of="accepted")  # type: ignore[arg-type]
    shaping = policy.open(BATCH, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for step in range(3):
        model = Sharper(VOCAB, seed=seed + step)
        tree = model.grow(shaping.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
        nodes = [int(torch.randint(int(tree.valid[row].sum()), (), generator=generator)) for row in range(BATCH)]
        end = torch.tensor(nodes)
        shaping.observe(range(BATCH), Verdict(path_to(tree, end), tree.depth.gather(1, end[:, None])[:, 0], end))
        for row in shaping._rows:
            shaping._catch_up(row)
        for row, node in enumerate(nodes):
            path = token_paths(tree, row)[node]

            def measured(path: tuple[int, ...], row: int = row) -> float:
                p = sorted((math.exp(v) for v in model.log_probabilities(row, path)), reverse=True)  # noqa: B023
                return policy.confidence(p[: policy.k])

            found = shaping._rows[row].confidence
            has_children = bool((tree.parents[row, 1:] == node)[tree.valid[row, 1:]].any())
            wanted = [path] if has_children or not path else [path, path[:-1]]
            assert any(found == pytest.approx(measured(p), abs=1e-5) for p in wanted)


@settings(max_examples=30, deadline=None)
@given(POLICIES, st.floats(0, 1))
def test_no_confidence_needs_more_room_than_was_reserved(policy: SageTree, alpha: float) -> None:
    ran = 0
    shaping = policy.open(1, torch.device("cpu"))
    shaping._rows[0] = dataclasses.replace(shaping._rows[0], confidence=alpha, starting=False)
    growth, model = shaping.begin([0], torch.tensor([3]), TopProposer()), Sharper(VOCAB, 3)
    growth._exact = False  # type: ignore[attr-defined]
    frontier = growth.expand(torch.tensor([[model.logits(0, ())]]))
    while frontier is not None:
        ran += frontier.tokens.shape[1]
        assert frontier.attention_mask.shape == (1, frontier.tokens.shape[1], ran)
        frontier = growth.expand(torch.randn(1, frontier.tokens.shape[1], VOCAB))
    assert ran <= policy.max_run
    assert half_up(policy.depth_at(alpha, policy.d_max)) <= policy.max_depth


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_max": 2}, "depths must rise"),
        ({"ceiling": 7}, "depths must rise"),
        ({"w_max": 1}, "w_max must be at least w_min"),
        ({"low": 4.0}, "low must not be above high"),
        ({"alpha_of": "accepted", "lookahead": False}, "alpha_of=accepted needs lookahead"),
    ],
)
def test_settings_that_make_no_tree_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SageTree(**wrong)  # type: ignore[arg-type]
