"""The lossy rules against plain Python, with the guards that keep them from harm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from random_trees import judged as judged_by

from families import FAMILIES
from saccade.draft.lookup import chains
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.errors import InputError
from saccade.inputs.families import split, visual_mask
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.forward import ForwardOutput, Requirements
from saccade.tree import DraftTree
from saccade.verify.loose import FLy, LVSpec, RandomLoosening
from saccade.verify.rule import LOOSE, SHIFTED, STRICT, Greedy, Rule, Uniforms, Verdict

VOCAB = 9
EOS = 8
GUESSES = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=6), min_size=1, max_size=3)


def scored(tree: DraftTree, seed: int, sharp: float = 3.0) -> torch.Tensor:
    """Random target logits."""
    generator = torch.Generator().manual_seed(seed)
    return sharp * torch.randn(*tree.tokens.shape, VOCAB, generator=generator)


def chain_of(guesses: list[list[int]]) -> DraftTree:
    return chains([0] * len(guesses), guesses, torch.device("cpu"))


def judged(rule: Rule, tree: DraftTree, scores: torch.Tensor, uniforms: torch.Tensor | None = None) -> Verdict:
    nothing: Any = None
    return judged_by(rule.open(nothing), tree, scores, uniforms)


def follow(guesses: list[int], choice: list[int], passes: list[int | None]) -> tuple[int, int, list[int]]:
    """(accepted, next token, marks) of a chain whose guess i passes as ``passes[i]`` or fails (None)."""
    marks = []
    for mark in passes[: len(guesses)]:
        if mark is None:
            break
        marks.append(mark)
    return len(marks), choice[len(marks)], marks


@given(GUESSES, st.integers(0, 1000), st.sampled_from([0.0, 0.3, 0.8]), st.integers(0, 3))
def test_fly_forgives_where_the_target_is_unsure_and_the_window_matches(
    guesses: list[list[int]], seed: int, least: float, window: int
) -> None:
    tree = chain_of(guesses)
    scores = scored(tree, seed, 1.0)
    verdict = judged(FLy(least, window, (EOS,)), tree, scores)
    for row, tokens in enumerate(guesses):
        p = scores[row].softmax(-1)
        entropy = [float(-(q * q.log()).sum()) / math.log(VOCAB) for q in p]
        choice = scores[row].argmax(-1).tolist()
        match = [t == choice[i] for i, t in enumerate(tokens)]
        passes: list[int | None] = []
        for i, token in enumerate(tokens):
            after = match[i + 1 : i + 1 + window]
            fine = entropy[i] > least and len(after) == window and all(after) and EOS not in (token, choice[i])
            passes.append(STRICT if match[i] else LOOSE if fine else None)
        count, token, marks = follow(tokens, choice, passes)
        assert (int(verdict.count[row]), int(verdict.token[row])) == (count, token)
        assert verdict.marks is not None
        assert verdict.marks[row, 1 : count + 1].tolist() == marks


@given(GUESSES, st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]))
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


def lvspec_reference(
    rule: LVSpec, tree: DraftTree, scores: torch.Tensor, nodes: torch.Tensor, visual: list[torch.Tensor]
) -> list[tuple[int, int, list[int]]]:
    """Row by row and guess by guess, for chains."""
    out = []
    for row in range(tree.tokens.shape[0]):
        tokens = [int(t) for t, v in zip(tree.tokens[row, 1:], tree.valid[row, 1:], strict=True) if v]
        choice = scores[row].argmax(-1).tolist()
        relevance = []
        for i in range(len(tokens)):
            judging = nodes[row, i if rule.position == "verifying" else i + 1]
            similar = F.cosine_similarity(judging[None], visual[row]).sort(descending=True).values
            relevance.append(float(similar[: rule.nearest].mean()) if len(similar) else 0.0)
        loose = set(sorted(range(len(tokens)), key=lambda i: relevance[i])[: int(rule.share * len(tokens) + 1e-6)])
        passes: list[int | None] = []
        p = scores[row].double().softmax(-1)
        entropy = [float(-(q * q.log()).sum()) / math.log(VOCAB) for q in p]
        for i, token in enumerate(tokens):
            guarded = bool({token, choice[i]} & set(rule.special_ids)) or not len(visual[row])
            guarded = guarded or (rule.entropy > 0 and entropy[i] <= rule.entropy)
            if token == choice[i]:
                passes.append(STRICT)
            elif i in loose and not guarded:
                passes.append(LOOSE)
            elif rule.shift and choice[i] in tokens and not guarded:
                passes.append(SHIFTED)
            else:
                passes.append(None)
        out.append(follow(tokens, choice, passes))
    return out


class Still(Context):
    """A target's context with given hidden states and no model behind it."""

    def __init__(self, nodes: torch.Tensor, visual: list[torch.Tensor]) -> None:
        self.rows = len(visual)
        self.target: Any = type("T", (), {"layers": [0, 1], "device": torch.device("cpu"), "config": None})()
        self.requirements = Requirements()
        self._nodes, self._visual = nodes, visual

    def judge(self, rule: LVSpec, tree: DraftTree, scores: torch.Tensor) -> Verdict:
        judge = rule.open(self)
        assert self.requirements.layers == (2,)
        judge._visual = [(list(range(len(v))), F.normalize(v, dim=-1)) for v in self._visual]
        return judge.judge(range(len(scores)), tree, scores, None, ForwardOutput(scores, {2: self._nodes}))


@given(
    GUESSES.filter(any),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.4, 0.7, 1.0]),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from(["verifying", "own"]),
    st.sampled_from([0.0, 0.5, 0.8]),
)
def test_lvspec_equals_the_rule_written_out(
    guesses: list[list[int]], seed: int, share: float, shift: bool, nearest: int, position: Any, entropy: float
) -> None:
    tree = chain_of(guesses)
    scores = scored(tree, seed)
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randn(*tree.tokens.shape, 5, generator=generator)
    visual = [torch.randn((seed + 3 * b) % 4, 5, generator=generator) for b in range(len(guesses))]
    rule = LVSpec(share, nearest, shift, special_ids=(EOS,), position=position, entropy=entropy)
    verdict = Still(nodes, visual).judge(rule, tree, scores)
    assert verdict.marks is not None
    for row, (count, token, marks) in enumerate(lvspec_reference(rule, tree, scores, nodes, visual)):
        assert (int(verdict.count[row]), int(verdict.token[row])) == (count, token)
        assert verdict.marks[row, 1 : count + 1].tolist() == marks


def engine(name: str, rule: Rule | None, policy: Any = None) -> tuple[Engine, list[Request]]:
    case = FAMILIES[name]
    drafter = ModelDrafter(Target(case.draft_model()), policy or Chain(8))
    requests = [Request(p) for p in split(case.model().config, case.inputs("image", rows=3))]
    return Engine(Target(case.model()), drafter, rule), requests


@pytest.mark.parametrize(
    "name", ["llava", "qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "idefics3"))]
)
def test_lvspec_without_loose_share_and_shift_is_the_greedy_rule_exactly(name: str) -> None:
    strict, requests = engine(name, None)
    loose, _ = engine(name, LVSpec(share=0.0, shift=False))
    for ours, theirs in zip(
        loose.generate(requests, max_new_tokens=24), strict.generate(requests, max_new_tokens=24), strict=True
    ):
        # Drafts of a lossless rule end where the answer does, so that its last token may be the target's there.
        assert (ours.tokens, ours.marks[:-1]) == (theirs.tokens, theirs.marks[:-1])
        assert ours.stats.target_passes == theirs.stats.target_passes


@pytest.mark.parametrize("policy", [Chain(8), StaticTree([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)])])
@pytest.mark.parametrize("space", ["hidden", "embedding"])
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


def test_lvspec_is_strict_without_visual_tokens() -> None:
    case = FAMILIES["llava"]
    requests = [Request(p) for p in split(case.model().config, case.inputs("text", rows=2))]
    loose, _ = engine("llava", LVSpec(1.0))
    strict, _ = engine("llava", None)
    ours, theirs = (e.generate(requests, max_new_tokens=30) for e in (loose, strict))
    assert [o.tokens for o in ours] == [o.tokens for o in theirs]
    assert not any(o.stats.loosened_tokens for o in ours)


def test_lvspec_reads_the_visual_tokens_of_every_turn_once() -> None:
    case = FAMILIES["qwen2_5_vl"]
    under_test, _ = engine("qwen2_5_vl", LVSpec())
    session = under_test.open(1)
    (prompt,) = split(case.model().config, case.inputs("images2"))
    for _ in range(2):
        under_test.generate([Request(prompt)], max_new_tokens=3, session=session)
        judge: Any = session._state.judge(False)[1]
        places, kept = judge._visual[0]
        assert places == visual_mask(case.model().config, prompt.ids).nonzero()[:, 0].tolist()
        assert len(kept) == len(places)


def test_lvspec_compares_with_the_visual_tokens_of_the_row_s_own_prompt_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a slot's earlier prompt only what is reused counts, whatever was read of it beyond."""
    monkeypatch.setattr("saccade.verify.loose.visual_mask", lambda _, ids: torch.tensor(ids) == 1)
    generator = torch.Generator().manual_seed(0)
    judge = LVSpec().open(Still(torch.zeros(0), [torch.zeros(0)] * 2))

    def read(row: int, ids: list[int], start: int) -> torch.Tensor:
        states = torch.randn(len(ids) - start, 5, generator=generator)
        prompt = Prompt(tuple(ids))
        judge.read(row, prompt, PrefillResult(prompt, start, hidden={2: states}))
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


def test_special_tokens_are_never_loosened() -> None:
    tree = chain_of([[EOS, 1], [2, 1]])
    scores = torch.full((2, 3, VOCAB), -5.0)
    scores[0, :, 3] = 5.0  # the drafter guesses the end where the target goes on
    scores[1, :, EOS] = 5.0  # the target ends where the drafter goes on
    nodes, visual = torch.randn(2, 3, 4), [torch.randn(6, 4)] * 2
    for rule in (LVSpec(1.0, special_ids=(EOS,)), LVSpec(1.0)):
        verdict = Still(nodes, visual).judge(rule, tree, scores)
        assert verdict.count.tolist() == ([0, 0] if rule.special_ids else [2, 2])


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: LVSpec(share=1.5),
        lambda: LVSpec(nearest=0),
        lambda: LVSpec(space="pixels"),  # type: ignore[arg-type]
        lambda: LVSpec(position="child"),  # type: ignore[arg-type]
        lambda: LVSpec(entropy=2),
        lambda: FLy(entropy=-1),
        lambda: FLy(deferred=-1),
        lambda: RandomLoosening(share=2),
    ],
)
def test_settings_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
