"""Every kind of head learns to use the target's features: another sample's cost it at least 15 points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head, HeadConfig, Placement, build_head
from saccade.draft.heads.medusa import StackedHead
from saccade.draft.heads.registry import HEAD_KINDS, head_class
from saccade.train.features import Features
from saccade.train.objectives.denoising import BlockEntries, _denoised
from saccade.train.objectives.dream import DreamEntries, drafts, dream_entries
from saccade.train.objectives.entries import Entries, entries_of
from saccade.train.objectives.losses import Window, unroll
from saccade.train.recipe import objective_of

WIDTH, VOCABULARY, LAYERS = 32, 24, 4
PROMPT, ANSWER = 5, 10
BATCH, STEPS = 16, 60
"""Samples a training step is given, and training steps."""


class Recurrent:
    """The state at a token is a turn of the one before it and the token's embedding, normed; it begins at random.

    What it began with, which stands for what a picture told the target, is nowhere but in the states: the tokens of a
    prompt are noise, so that a head without features can only guess from the answer so far.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
        self.maps = torch.randn(LAYERS + 1, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.maps[LAYERS] = torch.eye(WIDTH)  # what enters other layers says the same in other words

    def lm_head(self, states: Tensor) -> Tensor:
        return F.linear(states, self.head)

    def samples(self, seed: int, count: int = 64) -> list[Features]:
        """A batch of prompts with two visual tokens, and the target's greedy answers."""
        generator = torch.Generator().manual_seed(seed)
        state = torch.randn(count, WIDTH, generator=generator)
        ids = torch.randint(VOCABULARY, (count, PROMPT), generator=generator)
        states = []
        for place in range(PROMPT + ANSWER):
            if place >= PROMPT:
                ids = torch.cat([ids, self.lm_head(states[-1]).argmax(-1, keepdim=True)], 1)
            moved = state @ self.turn + 0.4 * self.embedding[ids[:, place]]
            state = F.rms_norm(moved, (WIDTH,))
            states.append(state)
        last = torch.stack(states, 1)
        places = torch.arange(PROMPT + ANSWER)
        visual = (places == 1) | (places == 2)
        answer = (places >= PROMPT - 1) & (places < PROMPT + ANSWER - 1)
        return [
            Features(
                ids=ids[row],
                visual=visual,
                answer=answer,
                states={layer: last[row] @ self.maps[layer] for layer in range(LAYERS + 1)},
                embeddings=self.embedding[ids[row]],
                stops=(3,),
            )
            for row in range(count)
        ]


def head_for(kind: str, **options: Any) -> Head:
    own = head_class(kind)
    options = {**own.defaults, **options}
    steps = 1 if kind == "kangaroo" else 2
    config = HeadConfig(
        kind=kind,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        heads=2,
        kv_heads=2,
        head_dim=WIDTH // 2,
        vocab_size=VOCABULARY,
        layers=own.reads(LAYERS, **options),
        target_class="Recurrent",
        target_layers=LAYERS,
        steps=steps,
        options=options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_head(config)


def entries(head: Head, samples: Sequence[Features]) -> Entries:
    if isinstance(head, Dream):
        kept = [{i: f.states[i] for i in (LAYERS - 1, LAYERS)} for f in samples]
        return dream_entries([replace(f, states=k) for f, k in zip(samples, kept, strict=True)], True)
    given = entries_of(head, samples)
    if not isinstance(head, DFlash):
        return given
    return BlockEntries(**{name: getattr(given, name) for name in given.names}, filler=given.embeddings[:, :1] * 0 + 1)


def train(head: Head, target: Recurrent, steps: int = STEPS) -> Head:
    """A short training with the loss of its kind, every step on fresh samples."""
    objective, depth = objective_of(head.kind)(), head.config.steps
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05, steps)
    for step in range(steps):
        tally = objective(head, entries(head, target.samples(1000 + step, BATCH)), target.lm_head, depth)
        optimiser.zero_grad()
        (tally.loss / tally.kept.sum().clamp(min=1)).backward()
        optimiser.step()
        schedule.step()
    return head.eval()


@torch.no_grad()
def agreement(head: Head, target: Recurrent, swapped: bool) -> float:
    """Share of the answer's tokens that the head guesses first, of samples it has not seen.

    Args:
        swapped: every sample is fed the features of another, place by place.
    """
    given = entries(head, target.samples(1))
    if swapped:
        given = replace(given, features=given.features.roll(1, 0))
    window = Window.of(given.supervised)
    if isinstance(head, StackedHead):
        path = window.gather(given.embeddings)[:, :, None] if head.follows else None
        out = head(window.gather(given.features), path, step=0)
    elif isinstance(head, Dream):
        assert isinstance(given, DreamEntries)
        begun = head.begin(given.embeddings, Placement(given.positions, given.attention_mask))
        out = next(drafts(head, given, window, begun, 1, "guess"))
    elif isinstance(given, BlockEntries):
        out = _denoised(head, given, window.places)[:, :, head.first]
    else:
        out = next(unroll(head, given, window, 1))
    right = head.logits(out, target.lm_head).argmax(-1) == window.gather(given.following)
    return float(right[window.supervised].float().mean())


def cost(head: Head, target: Recurrent) -> float:
    """Agreement lost, as a share of all tokens, when another sample's features are fed."""
    return agreement(head, target, False) - agreement(head, target, True)


LEAST = 0.15
LONGER = {"medusa": 120, "dflash": 240, "dflash2": 240, "dspark": 240}
"""Training steps of kinds that learn slowly."""
QUICKLY = ("eagle2", "dream", "hydra")
"""Kinds of different architectures, which the fast tests train."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICKLY else [pytest.mark.slow]) for kind in HEAD_KINDS]
)
def test_another_sample_s_features_cost_what_features_are_for(kind: str) -> None:
    target = Recurrent()
    head = train(head_for(kind), target, LONGER.get(kind, STEPS))
    found = cost(head, target)
    assert found >= LEAST, f"{kind}: {agreement(head, target, False):.3f}, swapped {-found:+.3f}"


def blind(head: Any) -> Any:
    """A head to which a planted mistake gives no feature."""
    name = "finish" if head.kind == "dream" else "forward"
    plain, place = getattr(head, name), int(head.kind == "dream")

    def without(*given: Any, **more: Any) -> Tensor:
        features = given[place] * 0
        out: Tensor = plain(*given[:place], features, *given[place + 1 :], **more)
        return out

    setattr(head, name, without)
    return head


@pytest.mark.parametrize(
    "kind", ["eagle2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hivis", "dream", "medusa"))]
)
def test_a_head_that_ignores_its_features_is_noticed(kind: str) -> None:
    target = Recurrent()
    assert cost(train(blind(head_for(kind)), target), target) < LEAST


@pytest.mark.slow
def test_dream_as_released_learns_little_of_its_features() -> None:
    """The reason for the defaults: without positions or a direct path the latest feature is not found."""
    target = Recurrent()
    released = train(head_for("dream", gate="tanh", rotary=False, direct=False), target, 2 * STEPS)
    chosen = train(head_for("dream"), target, 2 * STEPS)
    assert cost(chosen, target) > 2 * cost(released, target)


def test_a_head_of_text_alone_gets_nothing_of_the_picture() -> None:
    """HiViS's control, Table 1 (a): neither visual tokens nor states of the target, which saw them.

    Hiding the visual tokens alone is not enough: the states still tell what the picture told the target.
    """
    target = Recurrent()
    text_alone = train(head_for("eagle2", text_only=True, features="none"), target)
    hidden = train(head_for("eagle2", text_only=True), target)
    assert text_alone.hides_visual
    assert not text_alone.is_shown_visual
    assert cost(text_alone, target) == 0
    assert cost(hidden, target) >= LEAST
    assert agreement(hidden, target, False) > agreement(text_alone, target, False) + LEAST
