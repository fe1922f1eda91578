"""Objectives of EAGLE-2, EAGLE-3, HiViS, Kangaroo, Medusa and Hydra heads, and of draft VLMs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.draft.heads.head import Head
from saccade.draft.heads.medusa import StackedHead
from saccade.errors import TrainingError
from saccade.train.objectives.entries import Entries, LMHead
from saccade.train.objectives.losses import (
    FormedObjective,
    LossSums,
    Steps,
    Tally,
    Window,
    draft_loss,
    in_chunks,
    lk,
    recomputed,
    terms_of,
)


@dataclass(frozen=True, slots=True)
class Eagle2Objective(FormedObjective):
    """SmoothL1 of the states and a tenth of the distribution's cross entropy (EAGLE, Section 4.2), over all steps.

    EAGLE itself trains one step on features with uniform noise of up to 0.1; more steps on the head's own outputs match
    drafting better (HASS, Section 3.2).
    """

    TERMS: ClassVar[tuple[str, ...]] = ("states", "distribution")

    noise: float = 0.0  # largest value added to or taken from each element of a feature, drawn evenly
    states: float = 1.0  # weight of SmoothL1
    distribution: float = 0.1  # weight of the cross entropy

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        if self.noise and torch.is_grad_enabled():
            features = entries.features
            # seeded by the tokens, so that a resumed run draws the same
            draws = torch.Generator(features.device).manual_seed(int(entries.following.sum()))
            noise = 2 * torch.rand(features.shape, generator=draws, device=features.device) - 1
            entries = replace(entries, features=features + self.noise * noise)
        return draft_loss(head, entries, lm_head, draft_steps, terms_of(self), form=self.form)


@dataclass(frozen=True, slots=True)
class Eagle3Objective(FormedObjective):
    """Training-time test: the distribution alone, over steps on the head's own outputs (EAGLE-3, 3.2)."""

    TERMS: ClassVar[tuple[str, ...]] = ("distribution",)

    distribution: float = 1.0  # weight of the cross entropy under the target's distribution
    decay: float = 0.8  # weight of every further step, relative to the one before; not in the paper, 0.8 as released

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        return draft_loss(head, entries, lm_head, draft_steps, terms_of(self), decay=self.decay, form=self.form)


@dataclass(frozen=True, slots=True)
class HiViSObjective(FormedObjective):
    """Three terms, and drafts that stop where the head has lost the answer (HiViS, Section 3.3).

    Stage 1 is one draft step at all supervised places. Stage 2 has more; there a step of a draft counts only if the
    answer's token was in the head's top K in it and in all earlier ones.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("states", "distribution", "top")

    states: float = 1.0  # weight of SmoothL1 (L_fus)
    distribution: float = 0.1  # weight of the cross entropy (beta)
    top: float = 1.0  # weight of the top-K term (gamma)
    k: int = 5  # K of the top-K term and of the early stop
    early_stop: bool = True  # filter in stage 2

    def __post_init__(self) -> None:
        FormedObjective.__post_init__(self)
        if self.k < 1:
            raise TrainingError(f"loss.k is {self.k}; it must be at least 1.")

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        return draft_loss(
            head,
            entries,
            lm_head,
            draft_steps,
            terms_of(self),
            top_k=self.k,
            early_stop=self.early_stop and draft_steps > 1,
            form=self.form,
        )


@dataclass(frozen=True, slots=True)
class KangarooObjective(FormedObjective):
    """Cross entropy of the adapter's distribution under the target's (Kangaroo, Section 3.1).

    There is only one draft step: in drafting, too, every token's state comes from the target's own layers.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("distribution",)
    FORMS: ClassVar[tuple[str, ...]] = ("kl", "lk")  # one step has no prefixes

    distribution: float = 1.0  # weight of the cross entropy

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        if draft_steps != 1:
            raise TrainingError(
                f"A kangaroo head never drafts from its own states, so draft_steps must be 1, not {draft_steps}."
            )
        return draft_loss(head, entries, lm_head, 1, terms_of(self), form=self.form)


@dataclass(frozen=True, slots=True)
class AheadObjective(FormedObjective):
    """Cross entropy of the answer's own tokens, the target being frozen (Medusa-1, Eq. 1; Hydra, Section 3).

    By acceptance (`lk`) each stack is compared with the target's distribution instead, which reads the tokens between.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: float = 1.0  # weight of the cross entropy
    decay: float = 0.8  # weight of every further stack, relative to the one before

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """The first ``draft_steps`` stacks; stack s at an entry predicts the token s + 1 after the entry's."""
        assert isinstance(head, StackedHead)
        window = Window.of(entries.supervised)
        features, embeddings = window.gather(entries.features), window.gather(entries.embeddings)
        following, states = window.gather(entries.following), window.gather(entries.states)
        sums = LossSums(terms_of(self), Steps(self.form, window.supervised, self.decay), draft_steps)
        order = torch.arange(window.places.shape[1], device=features.device)

        def measure(guess: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            logits = head.logits(guess, lm_head).float()
            values = F.cross_entropy(logits, tokens, reduction="none")
            if self.form == "lk":
                with torch.no_grad():
                    teacher = lm_head(true).float()
                values = lk(logits, teacher)
            return values, logits.argmax(-1) == tokens

        for step in range(min(draft_steps, len(order))):
            judged = window.supervised & (order >= step)  # places of the predicted tokens
            supervised = judged[:, step:]
            here = features[:, : len(order) - step][supervised]  # [M, d]
            path = None
            if head.follows:  # [M, step + 1, d]
                windows = embeddings.unfold(1, step + 1, 1).transpose(2, 3)  # [B, A - step, step + 1, d]
                path = windows[supervised]
            guess = recomputed(partial(_stack, head, here, path, step))
            values, right = in_chunks(measure, head.config.vocab_size, guess, states[judged], following[judged])
            sums.add(step, judged, {"tokens": values}, (-values).exp(), right)
        return sums.tally


def _stack(head: StackedHead, here: Tensor, path: Tensor | None, step: int, _: object) -> Tensor:
    out: Tensor = head(here, path, step=step)
    return out


@dataclass(frozen=True, slots=True)
class DraftVlmObjective:
    """Cross entropy on the answer's tokens, and Kullback-Leibler divergence from the target (TABED, Appendix H.1, has
    the first alone).
    """

    TERMS: ClassVar[tuple[str, ...]] = ("tokens", "kl")

    tokens: float = 1.0  # weight of the cross entropy
    kl: float = 0.0  # weight of KL(target || drafter); above 0 the target runs on every batch, too
    blind_every: int = 3  # every n-th batch has a line break in place of every medium

    def __post_init__(self) -> None:
        weights = self.tokens, self.kl
        if not min(*weights, self.blind_every) >= 0 or not max(weights) > 0:
            raise TrainingError(
                "loss.tokens and loss.kl must be 0 or more, one of them above 0, and loss.blind_every 0 or more; they "
                f"are {self.tokens}, {self.kl} and {self.blind_every}."
            )

    def is_blind(self, step: int) -> bool:
        """Whether the batch of a step, counted from 0, has no media."""
        return self.blind_every > 0 and (step + 1) % self.blind_every == 0

    def __call__(self, logits: Tensor, answer: Tensor, teacher: Tensor | None) -> Tally:
        """Score M tokens.

        Shapes: logits ``[M, V]``; answer ``[M]``; teacher ``[M, W]``.
        """
        logits = logits.float()
        count = logits.new_full((1,), len(answer), dtype=torch.long)
        loss = logits.new_zeros(())
        terms: dict[str, Tensor] = {}
        if self.tokens:
            tokens = F.cross_entropy(logits, answer, reduction="sum")
            loss = loss + self.tokens * tokens
            terms["tokens"] = tokens.detach()
        if self.kl and teacher is not None:
            shared = min(logits.shape[-1], teacher.shape[-1])
            p = teacher[:, :shared].float().log_softmax(-1)
            q = logits[:, :shared].log_softmax(-1)
            kl = F.kl_div(q, p, log_target=True, reduction="sum")
            loss = loss + self.kl * kl
            terms["kl"] = kl.detach()
        right = (logits.argmax(-1) == answer).sum()[None]
        return Tally(loss, terms, count, count, right)
