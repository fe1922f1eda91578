"""How a draft VLM learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.errors import TrainingError
from saccade.train.losses import Tally


@dataclass(frozen=True, slots=True)
class DraftVlmObjective:
    """Cross entropy on the answer's tokens, and Kullback-Leibler divergence from the target (TABED, Appendix H.1, has
    the first alone).

    Attributes:
        tokens: weight of the cross entropy.
        kl: weight of KL(target || drafter); above 0 the target runs on every batch, too.
        blind_every: of so many batches the last has a line break in the place of every medium, so that the drafter can
            also draft from text alone; 0 for none, 1 for all. The target still sees them.
    """

    tokens: float = 1.0
    kl: float = 0.0
    blind_every: int = 3

    def __post_init__(self) -> None:
        if not (min(self.tokens, self.kl) >= 0 and max(self.tokens, self.kl) > 0 and self.blind_every >= 0):
            raise TrainingError(
                "loss.tokens and loss.kl must be 0 or more, one of them above 0, and loss.blind_every 0 or more; they "
                f"are {self.tokens}, {self.kl} and {self.blind_every}."
            )

    def is_blind(self, step: int) -> bool:
        """Whether the batch of a step, counted from 0, is without its media."""
        return self.blind_every > 0 and (step + 1) % self.blind_every == 0

    def __call__(self, logits: Tensor, answer: Tensor, teacher: Tensor | None) -> Tally:
        """Judge M tokens.

        Args:
            logits: ``[M, V]`` of the drafter.
            answer: ``[M]`` ids that the answer has there.
            teacher: ``[M, W]`` logits of the target; divergence is over the tokens that both have. None without KL.
        """
        logits, count = logits.float(), logits.new_full((1,), len(answer), dtype=torch.long)
        found: dict[str, Tensor] = {}
        if self.tokens:
            found["tokens"] = F.cross_entropy(logits, answer, reduction="sum")
        if self.kl and teacher is not None:
            shared = min(logits.shape[-1], teacher.shape[-1])
            p, q = (side[:, :shared].float().log_softmax(-1) for side in (teacher, logits))
            found["kl"] = F.kl_div(q, p, log_target=True, reduction="sum")
        right = (logits.argmax(-1) == answer).sum()[None]
        loss = torch.stack([getattr(self, name) * value for name, value in found.items()]).sum()
        return Tally(loss, {name: v.detach() for name, v in found.items()}, count, count, right)
