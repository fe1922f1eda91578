"""Draft lengths by the cost model, in simulated generations whose costs and acceptance are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from checkpoints import ready
from saccade import load
from saccade.draft.model import ModelDraftSession
from saccade.engine.costs import Pacer, Trials, sampled_length
from saccade.errors import MethodError
from saccade.target_model.adapter import Target
from saccade.target_model.token_blocks import ContextError


@dataclass
class World:
    """Costs in units of a forward of one token.

    Attributes:
        accepted: chance that a draft token is accepted after accepted ones.
        later: the same in the second half of the answers.
        draft: a level of drafting, or all of them with ``one_pass``.
        slope: one more token in a forward of the target.
        guess: cost of drafting that the pacer assumes at first.
        prefill: of the target, per prompt token; the drafter's is ``draft`` times that.
        noise: relative spread of all times; every 20th is ten times as long.
        drift: the machine gets faster and slower by this share per step.
    """

    accepted: float
    later: float | None = None
    draft: float = 0.1
    slope: float = 0.1
    guess: float = 0.1
    prefill: float = 0.05
    noise: float = 0.0
    drift: float = 0.0
    prompt: int = 150
    answer: int = 50
    rows: int = 1
    one_pass: bool = False

    def forward(self, tokens: int) -> float:
        return 1 + self.slope * (tokens - 1)


class Course:
    """Time of paced and of plain decoding after each number of tokens."""

    def __init__(self) -> None:
        self.ours, self.plain, self.tokens = [0.0], [0.0], [0]

    def add(self, ours: float, plain: float, tokens: int) -> None:
        self.ours.append(self.ours[-1] + ours)
        self.plain.append(self.plain[-1] + plain)
        self.tokens.append(self.tokens[-1] + tokens)

    def worst(self, rows: int) -> float:
        """The largest ratio of both over any window of 1000 tokens of every row."""
        size = 1000 * rows
        starts = np.arange(0, self.tokens[-1] - size, 5)
        each = [
            np.interp(starts + size, self.tokens, seconds) - np.interp(starts, self.tokens, seconds)
            for seconds in (self.ours, self.plain)
        ]
        return float((each[0] / each[1]).max())


def simulate(world: World, answers: int, length: int | None = None, seed: int = 0) -> Course:
    """Generations of ``rows`` rows at once; ``length``: fixed, not paced."""
    rng, speed = random.Random(seed), 1.0

    def took(seconds: float) -> float:
        nonlocal speed
        speed = min(3.0, max(0.3, speed * math.exp(rng.gauss(0, world.drift))))
        spread = 1 + world.noise * rng.random()
        return seconds * speed * spread * (10 if world.noise and rng.random() < 0.05 else 1)

    pacer, course = Pacer(8, world.guess, one_pass=world.one_pass), Course()
    for number in range(answers):
        accepted = world.later if world.later is not None and 2 * number >= answers else world.accepted
        prefill = world.rows * world.prompt * world.prefill
        spent = world.prompt * world.prefill * world.draft
        joined = [
            length is not None or pacer.admits(world.rows - 1, world.prompt, world.answer) for _ in range(world.rows)
        ]
        for _ in filter(None, joined):
            pacer.observe_prefill(world.prompt, took(spent))
        pacer.observe_prefill_step(took(prefill), world.rows)
        course.add(prefill + sum(joined) * spent, prefill, world.rows)
        left, trials = [world.answer - 1] * world.rows, [Trials() for _ in range(world.rows)]
        while any(left):
            rows = [i for i, tokens in enumerate(left) if tokens]
            count, own = len(rows), [i for i in rows if joined[i]]
            lengths = dict.fromkeys(rows, length or 0)
            if length is None and own:
                paced = pacer.lengths([trials[i] for i in own], count - len(own))
                lengths |= {i: min(tokens, left[i]) for i, tokens in zip(own, paced, strict=True)}
            drafting, longest = sum(map(bool, lengths.values())), max(lengths.values())
            verified = count + sum(lengths.values())
            forward, emitted = world.forward(verified), 0
            passes = min(longest, 1) if world.one_pass else longest
            draft = passes * world.draft * world.forward(drafting) if drafting else 0.0
            for i, tokens in lengths.items():
                good = 0
                while good < tokens and rng.random() < accepted:
                    good += 1
                if tokens:
                    pacer.observe_acceptance(trials[i], tokens, good)
                emitted += min(left[i], good + 1)
                left[i] = max(0, left[i] - good - 1)
            pacer.observe_step(verified, took(forward), count, emitted, drafting, longest, took(draft))
            course.add(forward + draft, emitted / count * world.forward(count), emitted)
        for _ in range(world.rows):
            pacer.observe_end(world.answer)
    return course


HOPELESS = {
    "a random drafter": World(accepted=0.01),
    "a random drafter on a noisy machine": World(accepted=0.01, noise=0.2, drift=0.02),
    "a drafter as large as the target": World(accepted=0.95, draft=1.0, guess=1.0),
    "a slow drafter": World(accepted=0.6, draft=0.7, guess=0.7),
    "answers of five tokens": World(accepted=0.5, answer=5),
    "eight rows and a random drafter": World(accepted=0.01, rows=8),
    "eight rows on a processor bound by arithmetic": World(accepted=0.5, rows=8, slope=0.8),
    "long prompts and short answers": World(accepted=0.5, prompt=700, answer=10),
    "a good drafter that is useless later": World(accepted=0.9, later=0.0, slope=0.05),
    "eight rows and a good drafter that is useless later": World(accepted=0.9, later=0.0, slope=0.1, rows=8),
}


@pytest.mark.parametrize("world", HOPELESS.values(), ids=HOPELESS)
def test_drafting_that_cannot_pay_costs_two_percent_over_any_1000_tokens_of_every_row(world: World) -> None:
    courses = [simulate(world, max(40, 2000 // world.answer), seed=seed) for seed in range(9)]
    assert sorted(course.worst(world.rows) for course in courses)[4] < 1.02
    first = [[np.interp(200 * world.rows, c.tokens, each) for each in (c.ours, c.plain)] for c in courses]
    assert sorted(ours / plain for ours, plain in first)[4] < 1.02, "since the start"


@pytest.mark.singly
@pytest.mark.parametrize(("noise", "drift"), [(0.0, 0.0), (0.5, 0.0), (0.2, 0.02)])
@pytest.mark.parametrize(
    ("accepted", "draft", "slope", "rows"),
    [
        (0.8, 0.1, 0.1, 1),
        (0.9, 0.05, 0.02, 1),
        (0.7, 0.2, 0.3, 1),
        (0.8, 0.1, 0.3, 4),
        (0.9, 0.1, 0.1, 8),
        (0.95, 0.2, 0.05, 2),
    ],
)
def test_a_good_drafter_is_nearly_as_fast_as_its_best_fixed_length(
    accepted: float, draft: float, slope: float, rows: int, noise: float, drift: float
) -> None:
    world = World(accepted, None, draft, slope, guess=draft, noise=noise, drift=drift, rows=rows)
    ratios = []
    for seed in range(3):
        fixed = [simulate(world, 30, length, seed).ours[-1] for length in range(9)]
        ratios.append(simulate(world, 30, seed=seed).ours[-1] / min(fixed))
    relearned = 0.04 * (accepted == 0.7)  # every row's rate, by which the best length is only a tenth faster than none
    assert sorted(ratios)[1] < (1.08 if noise else 1.03) + relearned  # from a cold start


def test_a_drafter_of_one_pass_drafts_as_long_chains_as_it_can() -> None:
    """Whose pass is too long for a single level to be worth it."""
    world = World(accepted=0.8, draft=0.3, guess=0.3, slope=0.02, rows=4, one_pass=True)
    ratios = [simulate(world, 30, seed=seed).ours[-1] / simulate(world, 30, 6, seed).ours[-1] for seed in range(5)]
    assert sorted(ratios)[2] < 1.12  # 1.25 if every level had the price of a pass


def test_rows_whose_drafts_are_accepted_draw_the_tokens_to_them() -> None:
    pacer, rows, world = Pacer(8, 0.1), [Trials() for _ in range(8)], World(0.9, slope=0.05)
    lengths = []
    for _ in range(60):
        lengths = pacer.lengths(rows)
        accepted = [n * (place % 2) for place, n in enumerate(lengths)]
        for row, drafted, good in zip(rows, lengths, accepted, strict=True):
            if drafted:
                pacer.observe_acceptance(row, drafted, good)
        verified, longest = 8 + sum(lengths), max(lengths)
        drafting = sum(map(bool, lengths))
        pacer.observe_step(
            verified, world.forward(verified), 8, 8 + sum(accepted), drafting, longest, longest * world.draft
        )
    assert lengths[1::2] == [8] * 4
    assert max(lengths[::2]) <= 1


def read(confident: Sequence[float], accepted: Sequence[int]) -> tuple[Pacer, list[Trials]]:
    """A pacer, and rows of which some tokens of some confidence were verified."""
    pacer, rows = Pacer(8, 0.1), [Trials() for _ in confident]
    for _ in range(100):
        pacer.begin(rows, 0).add(confident)
        for row, count in zip(rows, accepted, strict=True):
            pacer.observe_acceptance(row, 1, count)
    return pacer, rows


def test_drafting_ends_where_the_drafter_is_unsure_and_what_is_likely_is_verified() -> None:
    pacer, rows = read([0.95] * 4, [1] * 4)
    drafts = pacer.begin(rows, 0)
    assert drafts.add([0.99, 0.99, 0.99, 0.05])
    assert drafts.add([0.99, 0.99, 0.05, 0.99])
    assert not drafts.add([0.05, 0.05, 0.05, 0.05])
    assert drafts.lengths == [2, 2, 1, 0]


def test_a_trial_is_verified_however_unsure_the_drafter_is() -> None:
    pacer, rows = read([0.9, 0.9], [1, 1])
    drafts = pacer.begin(rows, 6, levels=1)
    assert not drafts.add([0.01, 0.02])
    assert drafts.lengths == [0, 1]


def test_a_step_risks_half_of_the_credit_by_bad_luck_and_many_rows_together_less() -> None:
    """The luck of a row's tokens is all or nothing; that of many rows' tokens evens out."""
    for count, drafts in ((1, False), (16, True)):
        pacer, rows = Pacer(8, 0.1), [Trials() for _ in range(count)]
        for number in range(500):
            for row in rows:
                pacer.observe_acceptance(row, 1, int(number % 5 > 0))
        for credit in (0.02, 1.0):
            pacer.credit = credit
            lengths = [pacer.lengths(rows) for _ in range(3)][-1]
            assert any(lengths) == (drafts or credit == 1.0)


def test_a_row_counts_for_its_first_drafts_alone_among_all_rows_however_long_it_is() -> None:
    few, many = Pacer(8, 0.1), Pacer(8, 0.1)
    for pacer, drafts in ((few, 4), (many, 400)):
        row = Trials()
        for _ in range(drafts):
            pacer.observe_acceptance(row, 1, 0)
    assert many.begin([Trials()], 0).rates == few.begin([Trials()], 0).rates


def test_confidence_counts_for_what_became_of_the_rows_tokens() -> None:
    pacer, rows = read([0.95, 0.3], [0, 1])
    drafts = pacer.begin(rows, 0)
    drafts.add([0.95, 0.3])
    assert drafts.lengths == [0, 1]


def test_bad_luck_at_first_does_not_end_drafting_for_a_span() -> None:
    """A cold start whose first draft tokens are rejected, or on a machine that interrupts steps, drafts soon again."""
    world = World(accepted=0.75, draft=0.12, guess=0.12, slope=0.15, noise=0.5)
    slowness = sorted((run := simulate(world, 4, seed=seed)).ours[-1] / run.plain[-1] for seed in range(60))
    assert slowness[54] < 0.92


def test_a_single_interrupted_step_or_prefill_is_not_believed() -> None:
    pacer = Pacer(8, 0.1)
    for tokens, seconds in ((1, 0.01), (1, 0.01), (3, 0.2), (1, 0.01)):
        pacer.observe_step(tokens, seconds, 1, 1)
    assert pacer.times.extra[2] < pacer.times.plain[1]
    assert pacer.admits(0, 150, 100)
    pacer.observe_prefill(150, 4.0)
    for _ in range(400):
        pacer.observe_step(1, 0.01, 1, 1)
    assert pacer.admits(0, 150, 100)


def test_a_drafter_that_gets_better_is_found_again() -> None:
    bad = World(accepted=0.01)
    pacer, row = Pacer(8, 0.1), Trials()

    def step(accepts: bool) -> int:
        (length,) = pacer.lengths([row])
        accepted = length if accepts else 0
        if length:
            pacer.observe_acceptance(row, length, accepted)
        pacer.observe_step(length + 1, bad.forward(length + 1), 1, accepted + 1, int(length > 0), length, length * 0.1)
        return length

    for _ in range(200):
        step(accepts=False)
    assert max(step(accepts=False) for _ in range(50)) <= 1
    lengths = [step(accepts=True) for _ in range(1000)]
    assert min(sorted(lengths[-100:])[10:]) == 8


def test_what_rows_draft_by_themselves_changes_no_lengths_of_a_drafter() -> None:
    """A grammar forces nine tokens in every pass: those that are drafted beside them are worth as much as without."""
    lengths = []
    for own in (0, 9):
        pacer, row, world = Pacer(8, 0.1), Trials(), World(accepted=0.8)
        for _ in range(300):
            (length,) = pacer.lengths([row])
            nodes = 1 + length + (0 if pacer.measures else own)
            accepted = length - (length > 4)
            if length:
                pacer.observe_acceptance(row, length, accepted)
            draft = length * world.draft
            pacer.observe_step(
                nodes, world.forward(nodes), 1, 1 + accepted, int(length > 0), length, draft, nodes - 1 - length
            )
        lengths.append(pacer.lengths([row]))
    assert lengths[0] == lengths[1]
    assert lengths[0] > [2]


def test_a_row_that_samples_drafts_five_tokens_until_its_own_trials_say_none() -> None:
    row, pacer = Trials(), Pacer(8, 0.1)
    assert sampled_length(row) == 5
    for _ in range(10):
        pacer.observe_acceptance(row, 5, 0)
    assert sampled_length(row) == 0


def test_trials_count_only_tokens_behind_accepted_ones() -> None:
    trials, pacer = Trials(), Pacer(8, 0.1)
    pacer.observe_acceptance(trials, 5, 2)  # two accepted, the third rejected, the others never reached
    assert trials.accepted / trials.count == pytest.approx(2 / 3, abs=0.02)
    trials = Trials()
    pacer.observe_acceptance(trials, 2, 2)
    assert trials.accepted == trials.count


def test_a_drafter_joins_rows_that_began_without_it_once_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay plain decoding's whichever rows and steps are drafted, and however late drafting begins."""
    vlm = load(ready("llava"), ready("llava-draft"), "auto")
    questions = ["What is it?", "Why is it so?", "How many of them are there?", "Who?"]
    plain = [vlm.using("plain").generate(q, max_new_tokens=60).tokens for q in questions]
    lengths = random.Random(0)
    monkeypatch.setattr(Pacer, "admits", lambda self, others, prompt, remaining: remaining < 60 or others == 1)
    monkeypatch.setattr(Pacer, "is_proven", True)
    monkeypatch.setattr(Pacer, "lengths", lambda self, rows, others: lengths.choices((0, 0, 1, 3, 8), k=len(rows)))
    outputs = vlm.generate(questions, max_new_tokens=60)
    assert [output.tokens for output in outputs] == plain
    assert all(output.stats.drafted_tokens for output in outputs)
    assert sum(output.stats.accepted_tokens for output in outputs) > 20


@pytest.mark.parametrize("neighbours", [0, 30])
def test_what_neighbours_take_of_the_processor_shortens_no_drafts(
    neighbours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several answers of a drafter that is always right, which waits for neighbours in every forward."""
    vlm = load(ready("llava"), ready("llava"), "auto")
    vlm.engine.pacer = Pacer(8, 0.05)
    forward, seconds = Target.forward, {"wall": 0.0, "processor": 0.0}

    def timed(model: Target, cache: Any, blocks: Any, *more: Any) -> Any:
        units = 1 + 0.05 * (sum(block.tokens.numel() for block in blocks) - 1)
        seconds["processor"] += units if model is vlm.target else 0.05 * units
        seconds["wall"] += units if model is vlm.target else (1 + neighbours) * 0.05 * units
        return forward(model, cache, blocks, *more)

    monkeypatch.setattr(Target, "forward", timed)
    monkeypatch.setattr("saccade.engine.slots.time.perf_counter", lambda: seconds["wall"])
    monkeypatch.setattr("saccade.engine.slots.time.thread_time", lambda: seconds["processor"])
    outputs = vlm.generate(["What is it?", "Why is it so?", "How many of them are there?", "Who?"], max_new_tokens=100)
    # 13 with eight draft tokens in every one; two steps are measured without drafts, and every row's rate is learned.
    assert max(output.stats.target_passes for output in outputs) < 16
    last = max((output.stats.times for output in outputs), key=lambda times: times.verify)
    assert last.verify + last.prefill + last.draft + last.draft_prefill == pytest.approx(seconds["wall"])


def test_a_row_that_a_drafter_cannot_join_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = load(ready("llava"), ready("llava-draft"), "auto")
    plain = vlm.using("plain").generate("What is it?", max_new_tokens=60).tokens
    monkeypatch.setattr(Pacer, "admits", lambda self, others, prompt, remaining: remaining < 60)
    monkeypatch.setattr(Pacer, "is_proven", True)
    refused = []

    def load_nothing(session: ModelDraftSession, row: int, *rest: object) -> None:
        refused.append(row)
        raise ContextError(10, 4)

    monkeypatch.setattr(ModelDraftSession, "load", load_nothing)
    assert vlm.generate("What is it?", max_new_tokens=60).tokens == plain
    assert refused


@pytest.mark.parametrize("change", [{"rule": "fly"}, {"lookup_tokens": 3}, {"views": "MT"}])
def test_only_a_lossless_chain_of_a_draft_model_is_paced(change: dict[str, object]) -> None:
    name = next(iter(change))
    with pytest.raises(MethodError, match=f"may skip drafting at any step, which needs {name}="):
        load(ready("llava"), ready("llava-draft"), "auto", **change)


def test_rows_of_one_group_draft_alike_where_another_group_costs_more() -> None:
    pacer = Pacer(8, 0.1)
    assert pacer.joined([3, 5, 5, 0], 16) == [3, 5, 5, 0], "nothing is measured yet"
    for _ in range(9):
        pacer.observe_step(tokens=4, forward=0.004, rows=4, emitted=4)
    for drafts in (4, 8, 16, 32):
        for _ in range(9):
            pacer.observe_step(4 + drafts, forward=0.004 + 0.001 * drafts, rows=4, emitted=8, drafting=4, levels=4)
    assert pacer.joined([3, 5, 5, 0], 0) == [3, 5, 5, 0]
    assert pacer.joined([3, 5, 5, 0], 14) == [5, 5, 5, 0]
    assert pacer.joined([3, 5, 5, 0], 20) == [3, 5, 5, 3]
    assert pacer.joined([3, 5, 5, 0], 40) == [5, 5, 5, 5]
    assert pacer.joined([4, 4], 80) == [4, 4]
