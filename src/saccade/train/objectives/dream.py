"""DREAM's objective: calibrated, compressed features and alignment of an inner state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head, HeadConfig, Placement
from saccade.errors import TrainingError
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.train.data import Source, TrainingSample
from saccade.train.features import Features, Finding, Needed, calibrate, extract_features
from saccade.train.objectives.entries import Entries, Feeder, LMHead
from saccade.train.objectives.losses import (
    FormedObjective,
    Kept,
    LossSums,
    Steps,
    Tally,
    Window,
    chance,
    divergence,
    in_chunks,
    lk,
    recomputed,
    shifted,
    smooth_l1,
    terms_of,
    with_guesses,
)


@dataclass(frozen=True, slots=True)
class DreamEntries(Entries):
    """E entries and S features of B samples, padded on the right.

    Shapes: features ``[B, S, d]``.
    """

    tokens: Tensor  # `[B, E]` the token of every entry; 0 where there is none
    middle: Tensor  # `[B, E, d]` an inner state of the target at the entry's token; `[B, E, 0]` without that term
    answered: Tensor  # `[B, E]` bool; entries whose token is part of the answer

    @property
    def positions(self) -> Tensor:
        """``[B, E]``."""
        return (self.tokens - 1).clamp(min=0)

    @property
    def attention_mask(self) -> Tensor:
        """``[1, E, E]`` bool."""
        count = self.tokens.shape[1]
        return torch.ones(1, count, count, dtype=torch.bool, device=self.tokens.device).tril()

    @property
    def places(self) -> Tensor:
        """``[1, S]`` the tokens of the features."""
        return torch.arange(self.features.shape[1], device=self.tokens.device)[None]

    @property
    def reach(self) -> Tensor:
        """``[B, E, S]`` bool: the features of the tokens before the entry's."""
        return self.places < self.tokens.clamp(min=1)[..., None]


def dream_entries(samples: Sequence[Features], middle: bool) -> DreamEntries:
    """The entries of samples, in float32."""
    rows = []
    for sample in samples:
        seen = torch.ones_like(sample.visual) if sample.dropped is None else ~sample.dropped
        tokens = seen.nonzero()[:, 0]
        tokens = tokens[tokens > 0]
        last = sample.states[max(sample.states)].float()
        inner = sample.states[min(sample.states)][tokens].float()
        rows.append(
            (
                last,
                sample.embeddings[tokens].float(),
                last[tokens],
                sample.ids.roll(-1)[tokens],
                sample.answer[tokens],
                tokens,
                inner if middle else inner[:, :0],
                sample.answer.roll(1)[tokens],
            )
        )
    return DreamEntries(*(pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True)))


class DreamFeeder(Feeder):
    """Makes entries of samples as a DREAM head drafts: without the visual tokens that its compression drops."""

    def __init__(self, target: Target, head: Dream, source: Source, *, objective: DreamObjective) -> None:
        super().__init__(target, head, source)
        self.layer: str = objective.layer
        self._pruning = head.pruning
        self._findings: dict[str, Finding] = {}  # of prompts, by their content

    @staticmethod
    def dependencies(config: HeadConfig, objective: DreamObjective) -> list[Any]:
        return [config.kind, objective.layer, config.options["keep"]]

    def _extract(self, samples: Sequence[TrainingSample]) -> list[Features]:
        count = len(self._target.layers)
        wanted, dropped = [], []
        for sample in samples:
            layer = inner_layer(self.layer, count)
            gone = torch.zeros(len(sample.ids), dtype=torch.bool)
            if self.layer == "entropy" or self._pruning.needs_attention:
                finding = self._finding(sample.prompt)
                gone[list(finding.dropped)] = True
                layer = finding.layer if self.layer == "entropy" else layer
            wanted.append(layer)
            dropped.append(gone.to(self._target.device))
        features = extract_features(self._target, samples, sorted(set(wanted)))
        return [
            replace(f, states={i: f.states[i] for i in {layer, count}}, dropped=gone)
            for f, layer, gone in zip(features, wanted, dropped, strict=True)
        ]

    def _finding(self, prompt: Prompt) -> Finding:
        content = repr((prompt.ids, [medium.digest for medium in prompt.media]))
        key = hashlib.sha256(content.encode()).hexdigest()
        if key not in self._findings:
            self._findings[key] = calibrate(self._target, prompt, self._pruning)
        return self._findings[key]

    def entries_of(self, features: Sequence[Features]) -> Entries:
        return dream_entries(features, self.layer != "none")

    def needed(self, sample: Features) -> Needed:
        last, whole = max(sample.states), torch.ones_like(sample.visual)
        shown = sample.visual if sample.dropped is None else sample.visual & ~sample.dropped
        return Needed({layer: whole if layer == last else sample.answer for layer in sample.states}, shown)


def inner_layer(layer: str, count: int) -> int:
    """Index of the state after the layer at a per cent of a decoder's depth; the last for any other word."""
    return min(count, max(1, round(int(layer) * count / 100))) if layer.isdigit() else count


LAYERS = ("entropy", "25", "50", "75", "none")
FEEDING = ("answer", "guess")


@dataclass(frozen=True, slots=True)
class DreamObjective(FormedObjective):
    """The target's last states, one of its inner states, and its distribution (DREAM, Section 3.2.1).

    The first draft step is teacher forcing; in every later one features are the head's own outputs of the step before,
    and the distribution alone counts.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("states", "middle", "distribution")

    states: float = 0.2  # weight of SmoothL1 between the last states and the head's (L_feat)
    middle: float = 0.2  # weight of SmoothL1 between an inner state and the head's first block's output (L_intermed)
    distribution: float = 1.0  # weight of KL(target || head) (L_KL)
    layer: str = "entropy"  # layer of the inner state
    middle_norms: bool = False  # whether L_intermed compares RMS-normed states: inner ones can be 100 times as large
    feeding: str = "guess"  # features of later steps

    def __post_init__(self) -> None:
        FormedObjective.__post_init__(self)
        if self.layer not in LAYERS:
            raise TrainingError(f"loss.layer must be one of {', '.join(LAYERS)}, not {self.layer!r}.")
        if self.feeding not in FEEDING:
            raise TrainingError(f"loss.feeding must be one of {', '.join(FEEDING)}, not {self.feeding!r}.")
        if self.middle_norms and self.layer == "none":
            raise TrainingError("loss.middle_norms is of an inner state; with loss.layer=none there is none.")
        if self.form == "dpace" and self.feeding != "guess":
            raise TrainingError("loss.form=dpace weights the tokens of a draft; it needs loss.feeding=guess.")

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        assert isinstance(head, Dream)
        assert isinstance(entries, DreamEntries)

        def measure(guess: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            logits = head.logits(guess, lm_head).float()  # [M, V]
            with torch.no_grad():
                teacher = head.logits(true, lm_head).float()
            sure = chance(logits.detach(), tokens) if self.form == "dpace" else tokens
            return divergence_of(logits, teacher), logits.argmax(-1) == tokens, sure

        divergence_of = lk if self.form == "lk" else divergence
        window = Window.of(entries.supervised)
        sums = LossSums(terms_of(self), Steps(self.form, window.supervised), draft_steps)
        following, states = window.gather(entries.following), window.gather(entries.states)
        at = Placement(entries.positions, entries.attention_mask)
        begun = recomputed(lambda _: head.begin(entries.embeddings, at))
        order = torch.arange(window.supervised.shape[1], device=window.supervised.device)
        for step, out in enumerate(drafts(head, entries, window, begun, draft_steps, self.feeding)):
            first = step if self.feeding == "guess" else min(2 * step, 2)  # place whose feature is the head's own
            supervised = window.supervised & (order >= first)
            if not supervised.any():
                break
            terms = {}
            if step == 0:
                terms["states"] = smooth_l1(out[supervised], states[supervised])
                if entries.middle.shape[-1] and head.first is not None:
                    two = (window.gather(x)[supervised] for x in (begun, entries.middle))
                    terms["middle"] = smooth_l1(*(F.rms_norm(x, x.shape[-1:]) if self.middle_norms else x for x in two))
            rows = out[supervised], states[supervised], following[supervised]
            terms["distribution"], right, sure = in_chunks(measure, head.config.vocab_size, *rows)
            sums.add(step, supervised, terms, sure, right)
        return sums.tally


def drafts(
    head: Dream, entries: DreamEntries, window: Window, begun: Tensor, steps: int, feeding: str
) -> Iterator[Tensor]:
    """Outputs ``[B, A, d]`` at the window's places, step by step; see `DreamObjective` for the feeding.

    Shapes: begun ``[B, E, d]``.
    """
    at, over = Placement(entries.positions, entries.attention_mask), Placement(entries.places, entries.reach)

    def drafted(
        features: Tensor, at: Placement, over: Placement, held: Sequence[Kept], begun: Tensor = begun
    ) -> Tensor:
        entered, memory = held or (None, None)
        return head.finish(begun, features, replace(at, cache=entered), replace(over, cache=memory))

    if feeding == "answer":
        features = entries.features
        for _ in range(steps):
            out = recomputed(partial(drafted, features, at, over))
            yield window.gather(out)
            features = self_fed(entries, out)
        return
    held = Kept(head.blocks), Kept(len(head.cross))
    out = recomputed(partial(drafted, entries.features, at, over), held)
    guess = window.gather(out)
    yield guess
    begun_here, tokens = window.gather(begun), window.gather(entries.tokens)
    order = torch.arange(entries.tokens.shape[1], device=tokens.device)
    for step in range(1, steps):
        seen = with_guesses(order <= (window.places - step)[:, :, None], step)
        reach = with_guesses(over.positions < (tokens - step).clamp(min=1)[:, :, None], step)
        at = Placement(tokens - 1, seen)
        draft = partial(drafted, shifted(guess), at, replace(at, attention_mask=reach), begun=begun_here)
        guess = recomputed(draft, held)
        yield guess


def self_fed(entries: DreamEntries, out: Tensor) -> Tensor:
    """The features ``[B, S, d]`` with the head's outputs ``[B, E, d]`` in place of the target's in the answer."""
    rows, places = entries.answered.nonzero(as_tuple=True)
    outputs = out[rows, places].to(entries.features.dtype)
    return entries.features.index_put((rows, entries.tokens[rows, places]), outputs)
