"""Loss terms, and the unrolling of a head on its own outputs over a whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saccade.draft.heads.block import Placement
from saccade.draft.heads.head import Head
from saccade.train.objectives.entries import Entries, LMHead

LOGITS = 1 << 24
"""Logits per chunk; bounds the memory of places times vocabulary (64 MB a copy in float32)."""


@dataclass(slots=True)
class Tally:
    """Sums over examples, so that those of several batches and processes add up to the same mean.

    An example is one supervised place in one draft step.
    """

    loss: Tensor  # sum of the weighted terms, with gradients
    terms: dict[str, Tensor]  # each term's sum without its weight, without gradients
    kept: Tensor  # `[steps]` examples in the loss
    tried: Tensor  # `[steps]` examples before the filter of the top K
    right: Tensor  # `[steps]` of those tried, with the answer's token as the head's likeliest


class Objective(Protocol):
    """Loss of one kind of head; a dataclass of its settings."""

    TERMS: ClassVar[tuple[str, ...]]  # names of its terms, each a setting, the term's weight

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """Return the loss over ``draft_steps`` draft steps."""
        ...


def terms_of(objective: Any) -> list[str]:
    """Names of an objective's terms with a weight above 0."""
    return [name for name in objective.TERMS if getattr(objective, name)]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the loss terms."""

    TERMS: ClassVar[tuple[str, ...]] = ("states", "distribution", "top")

    states: float = 1.0  # SmoothL1 between the target's state and the head's
    distribution: float = 0.1  # cross entropy of the head's next-token distribution under the target's
    top: float = 0.0  # the same sum over the target's K likeliest tokens alone


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
    """Return the loss over ``draft_steps`` steps on the head's own outputs.

    With a vocabulary of the head's own (`Head.known_tokens`) the teacher's distribution is that of these tokens alone,
    and places where its likeliest token is another have no such term, as released for EAGLE-3.
    """
    window = Window.of(entries.supervised)
    states, following = window.take(entries.states), window.take(entries.following)
    device = states.device
    sums = {name: torch.zeros((), device=device) for name in terms_of(weights)}
    counts = torch.zeros(3, draft_steps, dtype=torch.long, device=device)
    loss = states.new_zeros(())
    alive = window.supervised
    for step, guess in enumerate(unroll(head, entries, window, draft_steps)):
        if step:
            alive = torch.cat([torch.zeros_like(alive[:, :1]), alive[:, :-1]], 1) & window.supervised
        if not alive.any():
            break

        def measure_known(guess: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            known = head.known_tokens
            assert known is not None
            logits = head.known_logits(guess).float()  # [M, N]
            right = (known[logits.argmax(-1)] == tokens).sum()
            with torch.no_grad():
                teacher = lm_head(true).float()
                counts = torch.isin(teacher.argmax(-1), known)
            found = _terms(guess, true, logits, teacher[:, known], weights, top_k)
            sums_here = ((found[name] * counts if name != "states" else found[name]).sum() for name in sums)
            return torch.ones_like(tokens, dtype=torch.bool), right, *sums_here

        def measure(guess: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
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
            measure if head.known_tokens is None else measure_known,
            head.config.vocab_size,
            guess[alive],
            states[alive],
            following[alive],
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
    measure: Callable[..., tuple[Tensor, ...]], vocabulary: int, *rows: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Apply ``measure`` to rows in chunks of at most `LOGITS` logits; several chunks are recomputed for gradients.

    Shapes: rows ``[M, ...]``.
    """
    count, size = len(rows[0]), max(LOGITS // vocabulary, 1)
    if count <= size:
        yield measure(*rows)
        return
    for start in range(0, count, size):
        part = [row[start : start + size] for row in rows]
        yield checkpoint(measure, *part, use_reentrant=False, preserve_rng_state=False)


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


@dataclass(slots=True)
class Window:
    """The supervised entries of every row side by side: place c of row b is entry ``first[b] + c``."""

    places: Tensor  # `[B, A]` entry numbers; those past a row's end repeat its last entry
    supervised: Tensor  # `[B, A]` bool; False for repeated places

    @classmethod
    def of(cls, supervised: Tensor) -> Window:
        """From ``[B, E]`` bool, at most one stretch per row."""
        count = supervised.sum(1, keepdim=True)
        first = supervised.to(torch.uint8).argmax(1, keepdim=True)
        steps = torch.arange(int(count.max()), device=supervised.device)
        places = (first + steps).clamp(max=supervised.shape[1] - 1)
        return cls(places, steps < count)

    def take(self, values: Tensor) -> Tensor:
        """``[B, E]`` or ``[B, E, d]`` at the places."""
        if values.dim() == 2:
            return values.gather(1, self.places)
        return values.gather(1, self.places[:, :, None].expand(-1, -1, values.shape[2]))


def unroll(head: Head, entries: Entries, window: Window, steps: int) -> Iterator[Tensor]:
    """Predict the states at the window's places, 0, 1, ... draft tokens after the last true feature.

    In step s the entry at place c is the s-th draft token of a draft that starts s places before. As in drafting, its
    feature is the output of the previous step at the previous place, and it attends to the entries with true features
    up to the draft's start, one entry of every step since, and itself (HASS, Section 3.2; HiViS, Eq. 2). Embeddings are
    always those of the answer. Gradients flow through all steps.
    Shapes: returns ``[B, A, d]``.
    """
    kept = Kept(head.blocks)
    count, device = entries.supervised.shape[1], entries.supervised.device
    causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    positions = torch.arange(count, device=device)
    batch = len(entries.supervised)
    features = head.fuse(entries.features)
    at = Placement(positions[None], causal.expand(batch, -1, -1), kept)
    guess = window.take(step_of(head, features, entries.embeddings, at))
    yield guess
    embeddings = window.take(entries.embeddings)
    for step in range(1, steps):
        true = positions <= (window.places - step)[:, :, None]  # [B, A, E]
        at = Placement(window.places, with_guesses(true, step), kept)
        guess = step_of(head, shifted(guess), embeddings, at, step)
        yield guess


def step_of(head: Head, features: Tensor, embeddings: Tensor, at: Placement, step: int = 0) -> Tensor:
    """Return ``head(features, embeddings, at, step)``, recomputed for the gradients where `recomputing` says so."""
    return recomputed(lambda held: head(features, embeddings, replace(at, cache=held[0]), step), [at.cache])


def shifted(guess: Tensor) -> Tensor:
    """``[B, A, d]`` of a step, at the place behind each; zeros at the first."""
    return torch.cat([torch.zeros_like(guess[:, :1]), guess[:, :-1]], 1)


def with_guesses(true: Tensor, step: int) -> Tensor:
    """``[B, A, K + step * A]`` bool: mask of each place over true entries, then over all predictions so far.

    Shapes: true ``[B, A, K]``.
    """
    own = torch.eye(true.shape[1], dtype=torch.bool, device=true.device)
    drafts = [_behind(own, step - earlier).expand(len(true), -1, -1) for earlier in range(1, step + 1)]
    return torch.cat([true, *drafts], -1)


def _behind(own: Tensor, distance: int) -> Tensor:
    """``[A, A]`` bool: place c sees place c - distance."""
    return own.roll(-distance, 1).tril() if distance else own


_ON: ContextVar[bool] = ContextVar("recomputing", default=False)


@dataclass(slots=True)
class _Layer:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


class Kept:
    """Keys and values of the steps so far, differentiable; a `RowCache` is written in place."""

    def __init__(self, blocks: int) -> None:
        self.layers = [_Layer() for _ in range(blocks)]

    def copy(self) -> Kept:
        """Return the same entries, to which others can be added."""
        out = Kept(0)
        out.layers = [_Layer(list(layer.keys), list(layer.values)) for layer in self.layers]
        return out


@contextmanager
def recomputing(on: bool) -> Iterator[None]:
    """Let `recomputed` keep no activations while the context is open, if ``on``."""
    before = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(before)


def recomputed(work: Callable[[Sequence[Kept]], Tensor], held: Sequence[Kept] = ()) -> Tensor:
    """Run a part of a loss; within `recomputing` it runs again in the backward pass, with the same bits."""
    if not _ON.get():
        return work(held)
    before, order = [kept.copy() for kept in held], list[_Layer]()

    def pure() -> tuple[Tensor, ...]:
        copies, added = [kept.copy() for kept in before], list[Tensor]()
        out = work(copies)
        order.clear()
        for kept, old, new in zip(held, before, copies, strict=True):
            for layer, less, more in zip(kept.layers, old.layers, new.layers, strict=True):
                for place in range(len(less.keys), len(more.keys)):
                    order.append(layer)
                    added += [more.keys[place], more.values[place]]
        return out, *added

    out: Tensor
    out, *added = checkpoint(pure, use_reentrant=False, preserve_rng_state=False)
    for layer, key, value in zip(order, added[::2], added[1::2], strict=True):
        layer.keys.append(key)
        layer.values.append(value)
    return out


def recompute_layers(layers: nn.ModuleList) -> None:
    """Let the decoder layers of a model of transformers keep no activations, in training and in nothing else."""
    for layer in layers:
        switched: Any = layer
        switched.gradient_checkpointing = True
        switched._gradient_checkpointing_func = _run_again
        switched.training = True  # of the layer alone: its parts stay without dropout


def _run_again(work: Callable[..., Any], *given: Any) -> Any:
    return checkpoint(work, *given, use_reentrant=False, preserve_rng_state=False)
