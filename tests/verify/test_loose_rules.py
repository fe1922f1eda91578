"""The lossy rules against plain Python on chains and trees, with the guards that keep them from harm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from random_trees import NaiveTree, chains, draft_tree, trees
from random_trees import judged as judged_by

import harness
from families import FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain, StaticTree, branches_of
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request
from saccade.errors import InputError
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Prompt
from saccade.options import RELEVANCES
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput, Requirements
from saccade.tree import DraftTree
from saccade.verify.loose import FLy, LVSpec, RandomLoosening
from saccade.verify.rule import LOOSE, SHIFTED, STRICT, Greedy, Rule, Uniforms, Verdict

VOCAB = 9
EOS = 8
GUESSES = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=6), min_size=1, max_size=3)
SEEDS = st.integers(0, 1000)


@st.composite
def branches(draw: st.DrawFn) -> list[NaiveTree]:
    """Rows of one or two chains below the root, in the order of `branches_of`, the last one perhaps padded."""
    count, length = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    parents = tuple(branches_of(count, length).shape.parents)
    size = len(parents)
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)
    ends = size, draw(st.integers(1, size))
    return [NaiveTree(parents, (0, *draw(tokens)[1:]), tuple(node < end for node in range(size))) for end in ends]


ROWS = st.one_of(branches(), trees(rows=2, vocab=VOCAB).filter(lambda rows: len(rows[0].parents) > 1))


def scored(tree: DraftTree, seed: int, sharp: float = 3.0) -> torch.Tensor:
    """Random target logits."""
    generator = torch.Generator().manual_seed(seed)
    return sharp * torch.randn(*tree.tokens.shape, VOCAB, generator=generator)


def states(tree: DraftTree, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of the nodes, and of every row's visual tokens; some rows have none."""
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randn(*tree.tokens.shape, 5, generator=generator)
    return nodes, [torch.randn((seed + 3 * b) % 4, 5, generator=generator) for b in range(len(tree.tokens))]


def chain_of(guesses: list[list[int]]) -> DraftTree:
    return chains([0] * len(guesses), guesses)


def judged(rule: Rule, tree: DraftTree, scores: torch.Tensor, uniforms: torch.Tensor | None = None) -> Verdict:
    nothing: Any = None
    return judged_by(rule.open(nothing), tree, scores, uniforms)


@given(GUESSES, SEEDS, st.sampled_from([0.0, 0.5, 1.0]))
def test_random_loosening_forgives_the_right_number(guesses: list[list[int]], seed: int, share: float) -> None:
    tree = chain_of(guesses)
    scores = scored(tree, seed)
    generators = [torch.Generator().manual_seed(seed + b) for b in range(len(guesses))]
    numbers = Uniforms(generators, RandomLoosening(share).uniforms(6, 1), 0, torch.device("cpu"))
    verdict = judged(RandomLoosening(share), tree, scores, numbers.judging)
    strict = judged(Greedy(), tree, scores)
    if share == 0.0:
        assert torch.equal(verdict.count, strict.count)
        assert torch.equal(verdict.token, strict.token)
    if share == 1.0:
        assert verdict.count.tolist() == [len(g) for g in guesses]
    assert verdict.marks is not None
    for row, tokens in enumerate(guesses):
        assert int((verdict.marks[row] == LOOSE).sum()) <= share * len(tokens) + 1e-6


class Still(Context):
    """A target's context with given hidden states and no model behind it."""

    def __init__(self, nodes: torch.Tensor, visual: list[torch.Tensor]) -> None:
        self.rows = len(visual)
        self.target: Any = type("T", (), {"layers": [0, 1], "device": torch.device("cpu"), "family": None})()
        self.requirements = Requirements()
        self._nodes, self._visual = nodes, visual

    def judge(self, rule: LVSpec, tree: DraftTree, scores: torch.Tensor) -> Verdict:
        judge = rule.open(self)
        assert self.requirements.layers == (2,)
        judge._visual = [(list(range(len(v))), F.normalize(v, dim=-1)) for v in self._visual]
        return judge.judge(range(len(scores)), tree, scores, None, ForwardOutput(scores, {2: self._nodes}))


RULES = st.builds(
    LVSpec,
    loose_share=st.sampled_from([0.0, 0.4, 0.7, 1.0]),
    nearest=st.integers(1, 4),
    shift=st.booleans(),
    special_ids=st.just((EOS,)),
    position=st.sampled_from(["verifying", "own"]),
    entropy=st.sampled_from([0.0, 0.5, 0.8]),
    min_probability_ratio=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    loose_probability_ratio=st.sampled_from([0.0, 0.3]),
    relevance=st.sampled_from(["states", "tokens"]),
)
RELEVANCES["tokens"] = lambda tree: tree.tokens.float()


def entropies(scores: torch.Tensor) -> list[float]:
    p = scores.double().softmax(-1)
    return (-(p * p.log()).sum(-1) / math.log(VOCAB)).tolist()


@given(ROWS, RULES, SEEDS)
def test_lvspec_takes_the_longest_line_that_stands_by_the_rule_written_out(
    rows: list[NaiveTree], rule: LVSpec, seed: int
) -> None:
    tree = draft_tree(rows)
    scores = scored(tree, seed)
    nodes, visual = states(tree, seed)
    verdict = Still(nodes, visual).judge(rule, tree, scores)
    for index, row in enumerate(rows):
        choice, unsure = scores[index].argmax(-1).tolist(), entropies(scores[index])
        guesses = [n for n in range(1, len(row.parents)) if row.valid[n]]
        relevance = {}
        for n in guesses:
            judging = nodes[index, row.parents[n] if rule.position == "verifying" else n]
            similar = F.cosine_similarity(judging[None], visual[index]).sort(descending=True).values
            relevance[n] = float(similar[: rule.nearest].mean()) if len(similar) else 0.0
            relevance[n] = row.tokens[n] if rule.relevance == "tokens" else relevance[n]

        marked: dict[int, int | None] = {}
        for node in guesses:
            wanted = choice[row.parents[node]]
            line = [n for n in guesses if n in row.path(node) or node in row.path(n)]
            guarded = EOS in (row.tokens[node], wanted) or not len(visual[index])
            guarded = guarded or 0 < rule.entropy >= unsure[row.parents[node]]
            p = scores[index, row.parents[node]].softmax(-1)
            odds = float(p[row.tokens[node]] / p.max())
            guarded = guarded or odds < rule.min_probability_ratio
            least = sorted(line, key=relevance.__getitem__)[: int(rule.loose_share * len(line) + 1e-6)]
            marked[node] = None
            if row.tokens[node] == wanted:
                marked[node] = STRICT
            elif (node in least or 0 < rule.loose_probability_ratio <= odds) and not guarded:
                marked[node] = LOOSE
            elif rule.shift and wanted in [row.tokens[n] for n in line] and not guarded:
                marked[node] = SHIFTED
        paths = [row.path(n)[1:] for n in [0, *guesses]]
        standing = [p for p in paths if all(marked[n] is not None for n in p)]
        best = max(standing, key=lambda p: (len(p), sum(marked[n] == STRICT for n in p)))
        assert int(verdict.count[index]) == len(best)
        assert verdict.path[index, 1 : len(best) + 1].tolist() == best
        assert verdict.marks is not None
        assert verdict.marks[index, 1 : len(best) + 1].tolist() == [marked[n] for n in best]
        assert int(verdict.token[index]) == choice[best[-1] if best else 0]


def test_a_relevance_of_one_s_own_ranks_the_draft_token_that_it_is_given_for() -> None:
    tree = chain_of([[1, 5, 2, 4, 3]])  # the target wants another everywhere
    scores = F.one_hot(torch.full(tree.tokens.shape, 7), VOCAB).float()
    context = Still(torch.randn(1, 6, 5), [torch.randn(3, 5)])
    for share, count in ((0.0, 0), (0.4, 1), (0.8, 1), (1.0, 5)):
        verdict = context.judge(LVSpec(share, shift=False, relevance="tokens"), tree, scores)
        assert int(verdict.count[0]) == count


@given(ROWS, SEEDS, st.sampled_from([0.0, 0.3, 0.8]), st.integers(0, 3))
def test_fly_takes_the_longest_branch_that_stands_as_a_chain(
    rows: list[NaiveTree], seed: int, least: float, deferred: int
) -> None:
    tree = draft_tree(rows)
    scores = scored(tree, seed, 1.0)
    verdict = judged(FLy(least, deferred, (EOS,)), tree, scores)
    for index, row in enumerate(rows):
        choice, entropy = scores[index].argmax(-1).tolist(), entropies(scores[index])

        def stands(path: list[int], row: NaiveTree = row) -> bool:
            wanted = [choice[row.parents[n]] for n in path]  # noqa: B023
            match = [row.tokens[n] == w for n, w in zip(path, wanted, strict=True)]
            for i, node in enumerate(path):
                after = match[i + 1 : i + 1 + deferred]
                fine = entropy[row.parents[node]] > least and EOS not in (row.tokens[node], wanted[i])  # noqa: B023
                if not match[i] and not (fine and len(after) == deferred and all(after)):
                    return False
            return True

        guesses = [n for n in range(1, len(row.parents)) if row.valid[n]]
        paths = [row.path(n)[1:] for n in [0, *guesses]]
        longest = max(len(path) for path in paths if stands(path))
        assert int(verdict.count[index]) == longest
        path = verdict.path[index, 1 : longest + 1].tolist()
        assert stands(path)
        assert int(verdict.token[index]) == choice[path[-1] if path else 0]
        matches = [row.tokens[n] == choice[row.parents[n]] for n in path]
        assert verdict.marks is not None
        assert verdict.marks[index, 1 : longest + 1].tolist() == [STRICT if match else LOOSE for match in matches]


def engine(name: str, rule: Rule | None, policy: Any = None) -> tuple[Engine, list[Request]]:
    drafter = ModelDrafter(harness.draft(name), policy or Chain(8))
    return Engine(harness.target(name), drafter, rule), harness.requests(name, "image")


@pytest.mark.parametrize(
    ("policy", "space"),
    [(Chain(8), "embedding"), (StaticTree(), "hidden"), (branches_of(2, 6), "hidden"), (SageTree(), "hidden")],
    ids=["chain", "static", "branches", "sage"],
)
def test_lvspec_accepts_more_and_marks_what_it_loosened(space: Any, policy: Any) -> None:
    strict, requests = engine("llava", None, policy)
    loose, _ = engine("llava", LVSpec(0.7, space=space), policy)
    before = strict.generate(requests, max_new_tokens=24)
    after = loose.generate(requests, max_new_tokens=24)
    assert sum(o.stats.accepted_length for o in after) > sum(o.stats.accepted_length for o in before)
    for output in after:
        marked = sum(m in ("loose", "shifted") for m in output.marks)
        assert output.stats.loosened_tokens == marked
        assert output.stats.accepted_tokens == sum(m != "target" for m in output.marks)
    assert any(o.stats.loosened_tokens for o in after)


def test_lvspec_loosens_only_tokens_near_the_target_s_own_and_a_row_among_others_as_alone() -> None:
    under_test, requests = engine("llava", LVSpec(1.0, shift=False, min_probability_ratio=0.4))
    together = under_test.generate(requests, max_new_tokens=24)
    alone = [under_test.generate([request], max_new_tokens=24)[0] for request in requests]
    assert [o.tokens for o in together] == [o.tokens for o in alone]
    loose = [o.stats.loosened_tokens for o in together]
    without, _ = engine("llava", LVSpec(1.0, shift=False))
    most = [o.stats.loosened_tokens for o in without.generate(requests, max_new_tokens=24)]
    assert 0 < sum(loose) < sum(most)
    at_one, _ = engine("llava", LVSpec(1.0, shift=False, min_probability_ratio=1.0))
    strict, _ = engine("llava", None)
    answers = [[o.tokens for o in under.generate(requests, max_new_tokens=24)] for under in (at_one, strict)]
    assert answers[0] == answers[1]


def test_lvspec_reads_the_visual_tokens_of_every_turn_once() -> None:
    case = FAMILIES["qwen2_5_vl"]
    under_test, _ = engine("qwen2_5_vl", LVSpec())
    session = under_test.open(1)
    (prompt,) = split(case.model().config, case.inputs("images2"))
    for _ in range(2):
        under_test.generate([Request(prompt)], max_new_tokens=3, session=session)
        judge: Any = session._state.judge(False)[1]
        places, kept = judge._visual[0]
        assert places == family_of(case.model().config).visual_mask(prompt.ids).nonzero()[:, 0].tolist()
        assert len(kept) == len(places)


def test_lvspec_compares_with_the_visual_tokens_of_the_row_s_own_prompt_alone() -> None:
    """Of a slot's earlier prompt only what is reused counts, whatever was read of it beyond."""
    generator = torch.Generator().manual_seed(0)
    context = Still(torch.zeros(0), [torch.zeros(0)] * 2)
    context.target.family = type("Ones", (), {"visual_mask": staticmethod(lambda ids: torch.tensor(ids) == 1)})
    judge = LVSpec().open(context)

    def read(row: int, ids: list[int], start: int) -> torch.Tensor:
        states = torch.randn(len(ids) - start, 5, generator=generator)
        prompt = Prompt(tuple(ids))
        judge.load(row, prompt, PrefillResult(prompt, start, hidden={2: states}))
        return F.normalize(states, dim=-1)

    neighbour = read(1, [1, 1, 1], 0)
    first = read(0, [0, 1, 1, 1, 0], 0)
    second = read(0, [0, 1, 2, 1, 0, 1], 2)
    visual, real = judge._gather([0])
    assert real.all()
    torch.testing.assert_close(visual[0], torch.stack([first[1], second[1], second[3]]))
    torch.testing.assert_close(judge._gather([1])[0][0], neighbour)
    both, real = judge._gather([1, 0])
    assert both.shape[:2] == real.shape == (2, 3)
    other = read(0, [1, 0], 0)
    torch.testing.assert_close(judge._gather([0])[0][0], other[:1])


def test_tokens_that_a_processor_forbids_are_never_loosened() -> None:
    tree = chain_of([[1, 3, 3, 3, 3], [2, 3, 3, 3, 3], [VOCAB, 3, 3, 3, 3]])  # the last is not the target's
    scores = torch.zeros(3, 6, VOCAB)
    scores[:, :, 3] = 0.5
    scores[1, 0, 2] = -torch.inf
    nodes, visual = torch.randn(3, 6, 4), [torch.randn(6, 4)] * 3
    even = torch.zeros(3, 5, 1)
    verdicts = [
        Still(nodes, visual).judge(LVSpec(1.0), tree, scores),
        judged(RandomLoosening(1.0), tree, scores, even),
        judged(FLy(0.1, 4), tree, scores),
    ]
    for verdict in verdicts:
        assert verdict.count.tolist() == [5, 0, 0]


def test_loose_rules_refuse_sampling() -> None:
    loose, requests = engine("llava", LVSpec())
    with pytest.raises(InputError, match="greedy decoding"):
        loose.generate(requests, max_new_tokens=4, do_sample=True)
