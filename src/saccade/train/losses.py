"""The loss of self-fed drafting, and its terms; what a kind of head takes of it is in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade.draft.heads.head import Head
from saccade.train.entries import Entries
from saccade.train.unroll import Window, unroll

LMHead = Callable[[Tensor], Tensor]

LOGITS = 1 << 24
"""Logits that are judged at once; bounds the memory of places times vocabulary (64 MB a copy in float32)."""


@dataclass(slots=True)
class Tally:
    """Sums over examples, so that those of several batches and processes add up to the same mean.

    An example is one learnt place in one draft step.

    Attributes:
        loss: sum of the weighted terms, with gradients.
        terms: each term's sum without its weight, without gradients.
        kept: ``[steps]`` examples that were learnt from.
        tried: ``[steps]`` examples before the filter of the top K.
        right: ``[steps]`` of those tried: the head's first choice is the answer's token.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    kept: Tensor
    tried: Tensor
    right: Tensor


class Objective(Protocol):
    """How one kind of head learns."""

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """Draft ``draft_steps`` steps and judge them."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """What each term counts for.

    Attributes:
        states: SmoothL1 between the target's state and the head's.
        distribution: cross entropy of the head's next-token distribution under the target's.
        top: the same sum over the target's K likeliest tokens alone.
    """

    states: float = 1.0
    distribution: float = 0.1
    top: float = 0.0


def draft_loss(
    head: Head,
    entries: Entries,
    lm_head: LMHead,
    draft_steps: int,
    weights: Weights,
    *,
    top_k: int = 0,
    early_stop: bool = False,
    decay: float = 1.0,
) -> Tally:
    """Loss over ``draft_steps`` self-fed steps.

    Args:
        top_k: K of the top term and of the early stop.
        early_stop: an example is learnt from only if the answer's token was among the head's top K in every earlier
            step of its draft and is in this one (HiViS, Eq. 3); a draft in which one has failed is not continued.
        decay: what every further step counts for in the loss, relative to the one before.
    """
    window = Window.of(entries.learnt)
    states, following = window.take(entries.states), window.take(entries.following)
    device = states.device
    sums = {name: torch.zeros((), device=device) for name in _names(weights)}
    counts = torch.zeros(3, draft_steps, dtype=torch.long, device=device)
    loss = states.new_zeros(())
    alive = window.learnt
    for step, guess in enumerate(unroll(head, entries, window, draft_steps)):
        if step:
            alive = torch.cat([torch.zeros_like(alive[:, :1]), alive[:, :-1]], 1) & window.learnt
        if not alive.any():
            break

        def judge(guess: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            logits = head.logits(guess, lm_head).float()  # [M, V]
            right = (logits.argmax(-1) == tokens).sum()
            kept = in_top(logits, tokens, top_k) if early_stop else torch.ones_like(tokens, dtype=torch.bool)
            with torch.no_grad():
                teacher = lm_head(true[kept]).float()
            found = _terms(guess[kept], true[kept], logits[kept], teacher, weights, top_k)
            return kept, right, *(found[name].sum() for name in sums)

        kept = []
        counts[1, step] = alive.sum()
        for stays, right, *values in in_chunks(
            judge, head.config.vocab_size, guess[alive], states[alive], following[alive]
        ):
            kept.append(stays)
            counts[2, step] += right
            for name, value in zip(sums, values, strict=True):
                loss = loss + decay**step * getattr(weights, name) * value
                sums[name] += value.detach()
        alive = alive.masked_scatter(alive, torch.cat(kept))
        counts[0, step] = alive.sum()
    return Tally(loss, sums, *counts.unbind())


def in_chunks(
    judge: Callable[..., tuple[Tensor, ...]], vocabulary: int, *rows: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """What ``judge`` makes of rows, by chunks of at most `LOGITS` logits; more than one are made again for gradients.

    Args:
        judge: takes slices of the rows; what it makes of them must not depend on how they are cut.
        vocabulary: logits that it makes of one row.
        rows: ``[M, ...]`` each.
    """
    count, size = len(rows[0]), max(LOGITS // vocabulary, 1)
    if count <= size:
        yield judge(*rows)
        return
    for start in range(0, count, size):
        part = [row[start : start + size] for row in rows]
        yield checkpoint(judge, *part, use_reentrant=False, preserve_rng_state=False)


def smooth_l1(guess: Tensor, true: Tensor) -> Tensor:
    """``[M]`` SmoothL1, mean over the d dimensions of ``[M, d]``."""
    return F.smooth_l1_loss(guess.float(), true.float(), reduction="none").mean(-1)


def cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """``[M]`` minus the mean over the teacher of the head's log-probability, of logits ``[M, V]``."""
    return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def top_cross_entropy(logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """``[M]`` the part of `cross_entropy` on the teacher's k likeliest tokens (HiViS, Eq. 4, L_topK).

    The paper writes the roles of target and drafter the other way round; the teacher is the target.
    """
    p, tokens = teacher.softmax(-1).topk(k)
    return -(p * logits.log_softmax(-1).gather(-1, tokens)).sum(-1)


def in_top(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """``[M]`` bool: the token is among the k likeliest of logits ``[M, V]``."""
    return (logits.topk(k).indices == tokens[:, None]).any(-1)


def _names(weights: Weights) -> list[str]:
    return [name for name in ("states", "distribution", "top") if getattr(weights, name)]


def _terms(
    guess: Tensor, true: Tensor, logits: Tensor, teacher: Tensor, weights: Weights, top_k: int
) -> dict[str, Tensor]:
    out = {}
    if weights.states:
        out["states"] = smooth_l1(guess, true)
    if weights.distribution:
        out["distribution"] = cross_entropy(logits, teacher)
    if weights.top:
        out["top"] = top_cross_entropy(logits, teacher, top_k)
    return out
