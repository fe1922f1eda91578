"""How a DREAM head learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head
from saccade.errors import TrainingError
from saccade.train.dream_entries import DreamEntries
from saccade.train.entries import Entries
from saccade.train.losses import LMHead, Tally, smooth_l1

LAYERS = ("entropy", "25", "50", "75", "none")


@dataclass(frozen=True, slots=True)
class DreamObjective:
    """The target's last states, one of its inner states, and its distribution (DREAM, Section 3.2.1).

    The first draft step is teacher forcing. In every later one the answer's features are the head's own outputs of
    the step before, at all places at once, and the distribution alone counts.

    Attributes:
        states: weight of SmoothL1 between the last states and the head's (L_feat).
        middle: weight of SmoothL1 between an inner state and the output of the head's first block (L_intermed).
        distribution: weight of KL(target || head) (L_KL).
        layer: whose output the inner state is: ``entropy``: the layer of the least attention entropy, for every prompt
            its own (Eq. 2); ``25``, ``50``, ``75``: the one at that per cent of the depth; ``none``: no such term
            (Figure 4).
    """

    states: float = 0.2
    middle: float = 0.2
    distribution: float = 1.0
    layer: str = "entropy"

    def __post_init__(self) -> None:
        if self.layer not in LAYERS:
            raise TrainingError(f"loss.layer must be one of {', '.join(LAYERS)}, not {self.layer!r}.")

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        assert isinstance(head, Dream)
        assert isinstance(entries, DreamEntries)
        device = entries.states.device
        terms = {name: torch.zeros((), device=device) for name in self.terms}
        loss, counts = (
            torch.zeros((), device=device),
            torch.zeros(2, draft_steps, dtype=torch.long, device=device),
        )
        begun = head.begin(entries.embeddings, entries.positions, entries.allow)
        learnt, features = entries.learnt, entries.features
        for step in range(draft_steps):
            if step:
                learnt = entries.learnt & _behind_own(entries.own)
            if not learnt.any():
                break
            out = head.finish(begun, features, entries.positions, entries.allow, entries.reach)
            logits = head.logits(out[learnt], lm_head).float()  # [M, V]
            with torch.no_grad():
                teacher = head.logits(entries.states[learnt], lm_head).float()
            found = {"distribution": divergence(logits, teacher)}
            if step == 0:
                found["states"] = smooth_l1(out[learnt], entries.states[learnt])
                if entries.middle.shape[-1] and head.first is not None:
                    found["middle"] = smooth_l1(begun[learnt], entries.middle[learnt])
            for name, values in found.items():
                if name in terms:
                    loss = loss + getattr(self, name) * values.sum()
                    terms[name] += values.detach().sum()
            right = logits.argmax(-1) == entries.following[learnt]
            counts[0, step], counts[1, step] = len(right), right.sum()
            features = self_fed(entries, out)
        tried, agreed = counts.unbind()
        return Tally(loss, terms, tried, tried.clone(), agreed)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that count."""
        return tuple(name for name in ("states", "middle", "distribution") if getattr(self, name))


def self_fed(entries: DreamEntries, out: Tensor) -> Tensor:
    """The features ``[B, S, d]`` with the head's outputs ``[B, E, d]`` in place of the target's in the answer."""
    rows, places = entries.own.nonzero(as_tuple=True)
    own = out[rows, places].to(entries.features.dtype)
    return entries.features.index_put((rows, entries.tokens[rows, places]), own)


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """``[M]`` KL(teacher || head) in nats, of logits ``[M, V]``."""
    return F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(
        -1
    )


def _behind_own(own: Tensor) -> Tensor:
    """``[B, E]`` bool: the token before the entry's own is part of the answer, where entries have no gaps."""
    return pad(own[:, :-1], (1, 0))
