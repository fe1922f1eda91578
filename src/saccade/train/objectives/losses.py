"""Loss terms, and the unrolling of a head on its own outputs over a whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saccade.draft.heads.head import Head, Placement
from saccade.errors import TrainingError
from saccade.train.objectives.entries import Entries, LMHead

LOGITS = 1 << 24  # logits per chunk; bounds the memory of places times vocabulary (64 MB a copy in float32)


LK_DECAY = 3.0  # how fast LK's weight of the divergence falls with acceptance (LK losses, Samarin et al. 2026: eta)
SMOOTHING = 0.5  # confidence that D-PACE grants to every draft token (D-PACE, Wu et al. 2026: alpha)


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

    def __add__(self, other: Tally) -> Tally:
        terms = {name: value + other.terms[name] for name, value in self.terms.items()}
        counts = self.kept + other.kept, self.tried + other.tried, self.right + other.right
        return Tally(self.loss + other.loss, terms, *counts)


class Objective(Protocol):
    """Loss of one kind of head; a dataclass of its settings."""

    TERMS: ClassVar[tuple[str, ...]]  # names of its terms, each a setting, the term's weight

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """Return the loss over ``draft_steps`` draft steps."""
        ...


@dataclass(frozen=True, slots=True)
class FormedObjective:
    """Base of the objectives whose predictions can be judged in several forms."""

    FORMS: ClassVar[tuple[str, ...]] = ("kl", "lk", "dpace")

    form: str = "kl"  # of the term of the head's distribution: `kl` as it is, `lk` by acceptance, `dpace` by prefixes

    def __post_init__(self) -> None:
        if self.form not in self.FORMS:
            raise TrainingError(f"loss.form must be one of {', '.join(self.FORMS)} for this head, not {self.form!r}.")


def terms_of(objective: Any) -> dict[str, float]:
    """Weights of an objective's terms, of those above 0."""
    return {name: weight for name in objective.TERMS if (weight := getattr(objective, name))}


def draft_loss(
    head: Head,
    entries: Entries,
    lm_head: LMHead,
    draft_steps: int,
    weights: Mapping[str, float],
    *,
    top_k: int = 0,
    early_stop: bool = False,
    decay: float = 1.0,
    drafts: Iterable[Tensor] = (),
    sampled: Sequence[Tensor] = (),
    form: str = "kl",
) -> Tally:
    """Return the loss over ``draft_steps`` steps on the head's own outputs, or of the outputs ``drafts``.

    A step counts at the places ``sampled`` ``[B, A]`` alone, where given.

    Terms: ``states`` (SmoothL1 of the target's and the head's state), ``distribution`` (cross entropy of the head's
    next-token distribution under the target's) and ``top`` (the same sum over the target's K likeliest tokens).
    With ``form`` `lk` the second is `lk`; with `dpace` it is summed by `Steps` without ``decay``.
    With a vocabulary of the head's own (`Head.token_ids`) the teacher's distribution is that of these tokens alone,
    and places where its likeliest token is another have no such term, as released for EAGLE-3.
    """
    window, known = Window.of(entries.supervised), head.token_ids
    states, following = window.gather(entries.states), window.gather(entries.following)
    sums = LossSums(weights, Steps(form, window.supervised, decay), draft_steps, decay)
    divergence_of = lk if form == "lk" else cross_entropy

    def measure(guess: Tensor, true: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = (head.logits(guess, lm_head) if known is None else head.known_logits(guess)).float()  # [M, V]
        likeliest = logits.argmax(-1)
        right = (likeliest if known is None else known[likeliest]) == tokens
        kept = in_top(logits, tokens, top_k) if early_stop else torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad():
            teacher = lm_head(true[kept]).float()
            is_known = None if known is None else torch.isin(teacher.argmax(-1), known)
            sure = chance(logits[kept], tokens[kept], known) if form == "dpace" else tokens[kept]
        teacher = teacher if known is None else teacher[:, known]
        values = []
        for name in sums.weights:
            if name == "states":
                value = smooth_l1(guess[kept], true[kept])
            elif name == "distribution":
                value = divergence_of(logits[kept], teacher)
            else:
                value = top_cross_entropy(logits[kept], teacher, top_k)
            values.append(value if is_known is None or name == "states" else value * is_known)
        return kept, right, sure, *values

    alive = window.supervised
    for step, guess in enumerate(drafts or unroll(head, entries, window, draft_steps)):
        if step:
            alive = F.pad(alive, (1, -1)) & window.supervised
        if sampled:
            alive = alive & sampled[step]
        if not alive.any():
            break
        rows = guess[alive], states[alive], following[alive]
        kept, right, sure, *values = in_chunks(measure, head.config.vocab_size, *rows)
        alive = alive.masked_scatter(alive, kept)
        sums.add(step, alive, dict(zip(sums.weights, values, strict=True)), sure, right)
    return sums.tally


def in_chunks(measure: Callable[..., tuple[Tensor, ...]], vocabulary: int, *rows: Tensor) -> list[Tensor]:
    """Apply ``measure`` to rows in chunks of at most `LOGITS` logits; several chunks are recomputed for gradients.

    Shapes: rows ``[M, ...]``; returns what ``measure`` does, of all rows.
    """
    count, size = len(rows[0]), max(LOGITS // vocabulary, 1)
    if count <= size:
        return list(measure(*rows))
    chunks = []
    for start in range(0, count, size):
        part = [row[start : start + size] for row in rows]
        chunks.append(checkpoint(measure, *part, use_reentrant=False, preserve_rng_state=False))
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def smooth_l1(guess: Tensor, true: Tensor) -> Tensor:
    """``[M]`` SmoothL1, mean over the d dimensions of ``[M, d]``."""
    return F.smooth_l1_loss(guess.float(), true.float(), reduction="none").mean(-1)


def cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """``[M]`` minus the mean over the teacher of the head's log-probability, of logits ``[M, V]``."""
    return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """``[M]`` KL(teacher || head) in nats, of logits ``[M, V]``."""
    p = teacher.log_softmax(-1)
    q = logits.log_softmax(-1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def lk(logits: Tensor, teacher: Tensor) -> Tensor:
    """``[M]`` the hybrid of the LK losses, of logits ``[M, V]``, with the paper's best setting.

    A draft token is accepted with the probability a, the sum over the vocabulary of the smaller of both probabilities.
    The loss is ``w * divergence + (1 - w) * (1 - a)`` with ``w = exp(-3 a)``, without gradients of w: rejections where
    many tokens are accepted, and the divergence, whose gradients do not vanish, where few are.
    """
    accepted = torch.minimum(teacher.softmax(-1), logits.softmax(-1)).sum(-1)
    weight = (-LK_DECAY * accepted.detach()).exp()
    return weight * divergence(logits, teacher) + (1 - weight) * (1 - accepted)


def chance(logits: Tensor, tokens: Tensor, known: Tensor | None = None) -> Tensor:
    """``[M]`` probability of tokens ``[M]`` in logits over the ``known`` tokens, by default all; 0 for others."""
    if known is None:
        known = torch.arange(logits.shape[-1], device=logits.device)
    return (logits.softmax(-1) * (known == tokens[:, None])).sum(-1)


def top_cross_entropy(logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """``[M]`` the part of `cross_entropy` on the teacher's k likeliest tokens (HiViS, Eq. 4, L_topK).

    The paper writes the roles of target and drafter the other way round; the teacher is the target.
    """
    p, tokens = teacher.softmax(-1).topk(k)
    return -(p * logits.log_softmax(-1).gather(-1, tokens)).sum(-1)


def in_top(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """``[M]`` bool: the token is among the k likeliest of logits ``[M, V]``."""
    return (logits.topk(k).indices == tokens[:, None]).any(-1)


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

    def gather(self, values: Tensor) -> Tensor:
        """``[B, E]`` or ``[B, E, d]`` at the places."""
        if values.dim() == 2:
            return values.gather(1, self.places)
        places = self.places[:, :, None]
        return values.gather(1, places.expand(-1, -1, values.shape[2]))


class Steps:
    """Sums a term over the steps of drafts that are side by side in a grid: by ``decay``, or by D-PACE (`dpace`).

    D-PACE: token k of a draft counts as much as its log-probability moves the expected length of the accepted prefix:
    the sum over all j >= k of the product of the first j confidences, without gradients, each a half and half the
    head's probability of the answer's token. A step's share is the product so far times the sum of the losses so far.
    """

    def __init__(self, form: str, grid: Tensor, decay: float = 1.0, moves: int = 1) -> None:
        """A step of a draft is ``moves`` columns after the one before in ``grid`` ``[B, A]``."""
        self._by_prefix = form == "dpace"
        self._scale, self._decay, self._shift = 1.0, decay, (moves, -moves)
        self.device = grid.device
        self._reached = torch.ones_like(grid, dtype=torch.float)
        self._summed = torch.zeros_like(self._reached)

    def share(self, judged: Tensor, values: Tensor, sure: Tensor) -> Tensor:
        """The next step's share of the loss, of M tokens.

        Shapes: judged ``[B, A]`` bool; values (losses) and sure (probabilities of the answer's tokens) ``[M]``.
        """
        if not self._by_prefix:
            share = self._scale * values.sum()
            self._scale *= self._decay
            return share
        zeros = torch.zeros_like(self._reached)
        confidence = zeros.masked_scatter(judged, SMOOTHING + (1 - SMOOTHING) * sure.detach())
        self._reached = F.pad(self._reached, self._shift, value=1.0) * confidence
        self._summed = F.pad(self._summed, self._shift) + zeros.masked_scatter(judged, values)
        return (self._reached * self._summed).sum()


class LossSums:
    """An objective's terms, summed over the steps of drafts."""

    def __init__(self, weights: Mapping[str, float], drafted: Steps, draft_steps: int, decay: float = 1.0) -> None:
        """The term ``distribution`` (or ``tokens``) is summed by ``drafted``, every other one by ``decay``."""
        device = drafted.device
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self._drafted, self._decay = drafted, decay
        zeros = torch.zeros(draft_steps, dtype=torch.long, device=device)
        sums = {name: torch.zeros((), device=device) for name in self.weights}
        self.tally = Tally(torch.zeros((), device=device), sums, zeros, zeros.clone(), zeros.clone())

    def add(self, step: int, judged: Tensor, terms: Mapping[str, Tensor], sure: Tensor, right: Tensor) -> None:
        """Add the terms ``[M]`` of a step at its M places; those without a weight are left out.

        Shapes: judged ``[B, A]`` bool; sure as of `Steps.share`; right ``[N]`` bool, N >= M of them tried.
        """
        tally = self.tally
        tally.kept[step], tally.tried[step], tally.right[step] = judged.sum(), len(right), right.sum()
        for name in (name for name in terms if name in self.weights):
            is_drafted, values = name in ("distribution", "tokens"), terms[name]
            share = self._drafted.share(judged, values, sure) if is_drafted else self._decay**step * values.sum()
            tally.loss = tally.loss + self.weights[name] * share
            tally.terms[name] += values.detach().sum()


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
    guess = window.gather(step_of(head, features, entries.embeddings, at))
    yield guess
    embeddings = window.gather(entries.embeddings)
    for step in range(1, steps):
        true = positions <= (window.places - step)[:, :, None]  # [B, A, E]
        at = Placement(window.places, with_guesses(true, step), kept)
        guess = step_of(head, shifted(guess), embeddings, at, step)
        yield guess


def step_of(head: Head, features: Tensor, embeddings: Tensor, at: Placement, step: int = 0) -> Tensor:
    """Return ``head(features, embeddings, at, step)``, recomputed for the gradients where `recomputing` says so."""
    return recomputed(lambda held: head(features, embeddings, replace(at, cache=held[0]), step), [at.cache])


def shifted(guess: Tensor) -> Tensor:
    """``[B, A, d]`` of a step, at the place after each; zeros at the first."""
    return F.pad(guess, (0, 0, 1, -1))


def with_guesses(true: Tensor, step: int) -> Tensor:
    """``[B, A, K + step * A]`` bool: mask of each place over true entries, then over all predictions so far.

    Shapes: true ``[B, A, K]``.
    """
    itself = torch.eye(true.shape[1], dtype=torch.bool, device=true.device)
    drafted = torch.cat([itself.roll(-before, 1).tril() for before in reversed(range(step))], -1)
    return torch.cat([true, drafted.expand(len(true), -1, -1)], -1)


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
    for number, layer in enumerate(order):
        layer.keys.append(added[2 * number])
        layer.values.append(added[2 * number + 1])
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
