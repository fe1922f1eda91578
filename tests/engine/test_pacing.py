"""Draft lengths by the cost model, in simulated generations whose costs and acceptance are known."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from checkpoints import ready
from saccade import load
from saccade.engine.pacing import Pacer, Trials
from saccade.errors import MethodError


@dataclass
class World:
    """Costs in units of a forward of one token.

    Attributes:
        accepted: chance that a draft token is accepted behind accepted ones.
        draft: a level of drafting.
        slope: one more token in a forward of the target.
        guess: cost of drafting that the pacer assumes at first.
        prefill: of the target, per prompt token; the drafter's is ``draft`` times that.
        noise: relative spread of all times; every 20th is ten times as long.
    """

    accepted: float
    draft: float = 0.1
    slope: float = 0.1
    guess: float = 0.1
    prefill: float = 0.05
    noise: float = 0.0
    prompt: int = 150
    answer: int = 50
    rows: int = 1

    def forward(self, tokens: int) -> float:
        return 1 + self.slope * (tokens - 1)


def simulate(world: World, answers: int, length: int | None = None, seed: int = 0) -> list[tuple[float, float]]:
    """Time of every answer of ``rows`` rows at once, and plain decoding's, in turn; ``length``: fixed, not paced."""
    rng = random.Random(seed)

    def took(seconds: float) -> float:
        spread = 1 + world.noise * rng.random()
        return seconds * spread * (10 if world.noise and rng.random() < 0.05 else 1)

    pacer = Pacer(8, world.guess)
    found = []
    for _ in range(answers):
        prefill = world.rows * world.prompt * world.prefill
        ours, plain = prefill, prefill + (world.answer - 1) * world.forward(world.rows)
        spent = world.prompt * world.prefill * world.draft
        joined = [length is not None or pacer.admits(i, world.prompt, world.answer) for i in range(world.rows)]
        for _ in filter(None, joined):
            ours += spent
            pacer.observe_prefill(world.prompt, took(spent))
        left, trials = [world.answer - 1] * world.rows, [Trials() for _ in range(world.rows)]
        while any(left):
            rows = [i for i, tokens in enumerate(left) if tokens]
            count = len(rows)
            lengths = [0] * count
            if length is not None:
                lengths = [length] * count
            elif any(joined[i] for i in rows):
                found_lengths = iter(pacer.lengths([trials[i] for i in rows if joined[i]]))
                lengths = [next(found_lengths) if joined[i] else 0 for i in rows]
            lengths = [min(tokens, left[i]) for i, tokens in zip(rows, lengths, strict=True)]
            drafting, longest = sum(map(bool, lengths)), max(lengths)
            forward = world.forward(count + sum(lengths))
            draft = longest * world.draft * world.forward(drafting)
            ours += forward + draft
            pacer.observe_step(count + sum(lengths), took(forward), drafting, longest, took(draft))
            for i, tokens in zip(rows, lengths, strict=True):
                good = 0
                while good < tokens and rng.random() < world.accepted:
                    good += 1
                if tokens:
                    pacer.observe_acceptance(trials[i], tokens, good)
                left[i] = max(0, left[i] - good - 1)
        for _ in range(world.rows):
            pacer.observe_end(world.answer)
        found.append((ours, plain))
    return found


HOPELESS = {
    "a random drafter": World(accepted=0.01),
    "a random drafter, noisy times": World(accepted=0.01, noise=0.5),
    "a drafter as large as the target": World(accepted=0.95, draft=1.0, guess=1.0),
    "a slow drafter": World(accepted=0.6, draft=0.7, guess=0.7),
    "answers of five tokens": World(accepted=0.5, answer=5),
    "eight rows and a random drafter": World(accepted=0.01, rows=8),
    "eight rows on a processor bound by arithmetic": World(accepted=0.5, rows=8, slope=0.8),
}


@pytest.mark.parametrize("world", HOPELESS.values(), ids=HOPELESS)
def test_drafting_that_cannot_pay_costs_two_percent_over_any_200_tokens(world: World) -> None:
    times = simulate(world, max(40, 2000 // world.answer))
    span = max(1, round(200 / (world.answer * world.rows)))
    worst = max(
        sum(ours for ours, _ in times[i : i + span]) / sum(plain for _, plain in times[i : i + span])
        for i in range(len(times) - span + 1)
    )
    assert worst < (1.04 if world.noise else 1.02)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(
    ("accepted", "draft", "slope", "rows"),
    [(0.8, 0.1, 0.1, 1), (0.9, 0.05, 0.02, 1), (0.7, 0.2, 0.3, 1), (0.8, 0.1, 0.3, 4), (0.95, 0.3, 0.05, 2)],
)
def test_a_good_drafter_is_nearly_as_fast_as_its_best_fixed_length(
    accepted: float, draft: float, slope: float, rows: int, noise: float
) -> None:
    world = World(accepted, draft, slope, noise=noise, rows=rows)
    paced = sum(ours for ours, _ in simulate(world, 20))
    fixed = {length: sum(ours for ours, _ in simulate(world, 20, length)) for length in range(9)}
    assert paced < 1.08 * min(fixed.values())


def test_a_drafter_that_gets_better_is_found_again() -> None:
    bad = World(accepted=0.01)
    pacer, trials = Pacer(8, 0.1), Trials()
    for _ in range(200):
        (length,) = pacer.lengths([trials])
        pacer.observe_step(length + 1, bad.forward(length + 1), 1, length, length * 0.1)
        if length:
            pacer.observe_acceptance(trials, length, 0)
    assert pacer.lengths([trials]) == [0]
    lengths = []
    for _ in range(3000):
        (length,) = pacer.lengths([trials])
        pacer.observe_step(length + 1, bad.forward(length + 1), 1, length, length * 0.1)
        if length:
            pacer.observe_acceptance(trials, length, length)
        lengths.append(length)
    assert max(lengths[-100:]) == 8


def test_the_longest_chain_is_drafted_where_every_token_is_accepted_and_none_where_none_is() -> None:
    for accepted, expected in ((8, 8), (0, 0)):
        pacer, trials = Pacer(8, 0.05), Trials()
        pacer.observe_step(1, 1.0, 1, 0, 0.0)
        pacer.observe_step(9, 1.3, 1, 8, 0.4)
        for _ in range(60):
            pacer.observe_acceptance(trials, 8, accepted)
        assert pacer.lengths([trials]) == [expected]


def test_trials_count_only_tokens_behind_accepted_ones() -> None:
    trials = Trials()
    trials.add(5, 2)  # two accepted, the third rejected, the others never reached
    assert trials.accepted / trials.count == pytest.approx(2 / 3, abs=0.02)
    trials = Trials()
    trials.add(2, 2)
    assert trials.accepted == trials.count


def test_a_drafter_joins_rows_that_began_without_it_once_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay plain decoding's whichever rows and steps are drafted, and however late drafting begins."""
    vlm = load(ready("llava"), ready("llava-draft"), "auto")
    questions = ["What is it?", "Why is it so?", "How many of them are there?", "Who?"]
    plain = [vlm.using("plain").generate(q, max_new_tokens=60).tokens for q in questions]
    lengths = random.Random(0)
    monkeypatch.setattr(Pacer, "admits", lambda self, others, prompt, remaining: remaining < 60 or others == 1)
    monkeypatch.setattr(Pacer, "is_proven", True)
    monkeypatch.setattr(Pacer, "lengths", lambda self, rows: [lengths.choice((0, 0, 1, 3, 8)) for _ in rows])
    outputs = vlm.generate(questions, max_new_tokens=60)
    assert [output.tokens for output in outputs] == plain
    assert all(output.stats.drafted_tokens for output in outputs)
    assert sum(output.stats.accepted_tokens for output in outputs) > 20


@pytest.mark.parametrize("change", [{"rule": "fly"}, {"copied": 3}, {"views": "MT"}])
def test_only_a_lossless_chain_of_a_draft_model_is_paced(change: dict[str, object]) -> None:
    name = next(iter(change))
    with pytest.raises(MethodError, match=f"may skip drafting at any step, which needs {name}="):
        load(ready("llava"), ready("llava-draft"), "auto", **change)
