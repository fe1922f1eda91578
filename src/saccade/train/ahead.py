"""How Medusa and Hydra heads learn: every stack guesses the answer another number of tokens ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.draft.heads.head import Head
from saccade.draft.heads.stacked import StackedHead
from saccade.train.entries import Entries
from saccade.train.losses import LMHead, Tally, in_chunks
from saccade.train.unroll import Window


@dataclass(frozen=True, slots=True)
class AheadObjective:
    """Cross entropy of the answer's own tokens, the target being frozen (Medusa-1, Eq. 1; Hydra, Section 3).

    Attributes:
        tokens: weight of the cross entropy.
        decay: what every further stack counts for, relative to the one before.
    """

    tokens: float = 1.0
    decay: float = 0.8

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """The first ``draft_steps`` stacks; stack s at an entry guesses the token s + 1 behind the entry's own."""
        assert isinstance(head, StackedHead)
        window = Window.of(entries.learnt)
        features, embeddings = window.take(entries.features), window.take(entries.embeddings)
        following, count = window.take(entries.following), window.places.shape[1]
        loss = features.new_zeros(())
        total = torch.zeros((), device=loss.device)
        counts = torch.zeros(2, draft_steps, dtype=torch.long, device=loss.device)
        for step in range(min(draft_steps, count)):
            learnt = window.learnt[:, step:]  # by place of the token that is guessed
            here = features[:, : count - step][learnt]  # [M, d]
            path = None
            if head.follows:  # [M, step + 1, d]
                windows = embeddings.unfold(1, step + 1, 1).transpose(2, 3)  # [B, A - step, step + 1, d]
                path = windows[learnt]
            guess, tokens = head(here, path, step=step), following[:, step:][learnt]

            def judge(guess: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
                logits = head.logits(guess, lm_head).float()
                summed = F.cross_entropy(logits, tokens, reduction="sum")
                return summed, (logits.argmax(-1) == tokens).sum()

            counts[0, step] = len(tokens)
            for summed, right in in_chunks(judge, head.config.vocab_size, guess, tokens):
                loss = loss + self.decay**step * self.tokens * summed
                total += summed.detach()
                counts[1, step] += right
        tried, right = counts.unbind()
        return Tally(loss, {"tokens": total} if self.tokens else {}, tried, tried.clone(), right)
