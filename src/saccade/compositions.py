"""How methods are composed: one function each, whose keyword arguments are the method's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from saccade.draft.drafter import Drafter
from saccade.draft.dynamic import DynamicTree
from saccade.draft.ensemble import EnsembleDrafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.policy import TreePolicy
from saccade.draft.pruned import PrunedDrafter
from saccade.draft.pruning import Pruning
from saccade.draft.sage import SageTree
from saccade.draft.static import Chain, StaticTree
from saccade.draft.views import by_names
from saccade.draft.weights import by_name
from saccade.draft.width import WidthTree
from saccade.engine import Engine
from saccade.errors import MethodError
from saccade.inputs.processor import InputProcessor
from saccade.target.adapter import Target
from saccade.verify.fly import FLy
from saccade.verify.lvspec import LVSpec, RandomLoosening


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method is composed of besides its options.

    Attributes:
        target: the model whose answer is wanted.
        draft_model: a smaller one, where a method needs it.
        vocab_size: tokens that both share; the smaller vocabulary when None.
        special_ids: tokens that lossy rules never let pass.
        draft_processor: makes the draft model's prompts; needed by methods that rewrite them.
    """

    target: Target
    draft_model: Target | None = None
    vocab_size: int | None = None
    special_ids: tuple[int, ...] = ()
    draft_processor: InputProcessor | None = None

    def drafter(self, policy: TreePolicy) -> ModelDrafter:
        """The draft model under a tree policy."""
        assert self.draft_model is not None
        return ModelDrafter(self.draft_model, policy, self.vocab_size or self.target.vocab_size)

    def pruned(self, model: Target, policy: TreePolicy, pruning: Pruning) -> Engine:
        """A model that drafts with part of the visual tokens; the target itself for self-speculation."""
        vocab_size = self.vocab_size or self.target.vocab_size
        return self.engine(PrunedDrafter(model, policy, vocab_size, pruning))

    def engine(self, drafter: Drafter | None, rule: Any = None) -> Engine:
        """The composition."""
        return Engine(self.target, drafter, rule)


def plain(parts: Parts) -> Engine:
    return parts.engine(None)


def chain(parts: Parts, *, gamma: int = 5) -> Engine:
    return parts.engine(parts.drafter(Chain(gamma)))


def static_tree(parts: Parts) -> Engine:
    return parts.engine(parts.drafter(StaticTree()))


def dynamic_tree(parts: Parts, *, top: int = 10, max_depth: int = 6, total: int = 60) -> Engine:
    return parts.engine(parts.drafter(DynamicTree(top, max_depth, total)))


def prompt_lookup(parts: Parts, *, gamma: int = 10, max_ngram: int = 3) -> Engine:
    return parts.engine(PromptLookup(gamma, max_ngram, torch.device(parts.target.device)))


def tabed(
    parts: Parts,
    *,
    views: str = "MT",
    gamma: int = 5,
    width: int = 1,
    weights: str = "auto",
    distance: str = "kl",
    window: int = 0,
    carry: bool = True,
) -> Engine:
    if parts.draft_processor is None:
        raise MethodError(
            "tabed rewrites the draft model's prompt, so it needs its processor; use saccade.load()."
        )
    assert parts.draft_model is not None
    seen = by_names(views, parts.draft_model, parts.draft_processor)
    weighting = by_name(weights, len(seen), distance=distance, window=window or None)  # type: ignore[arg-type]
    policy = Chain(gamma) if width == 1 else WidthTree(width, gamma)
    vocab_size = parts.vocab_size or parts.target.vocab_size
    return parts.engine(EnsembleDrafter(parts.draft_model, policy, seen, weighting, vocab_size, carry))


def lvspec(
    parts: Parts,
    *,
    gamma: int = 10,
    share: float = 0.7,
    nearest: int = 10,
    shift: bool = True,
    space: str = "hidden",
) -> Engine:
    rule = LVSpec(share, nearest, shift, space, parts.special_ids)  # type: ignore[arg-type]  # checked there
    return parts.engine(parts.drafter(Chain(gamma)), rule)


def fly(parts: Parts, *, gamma: int = 10, entropy: float = 0.2, window: int = 4) -> Engine:
    return parts.engine(parts.drafter(Chain(gamma)), FLy(entropy, window, parts.special_ids))


def random_loosening(parts: Parts, *, gamma: int = 10, share: float = 0.7) -> Engine:
    return parts.engine(parts.drafter(Chain(gamma)), RandomLoosening(share, parts.special_ids))


def specvlm(
    parts: Parts, *, select: str = "specvlm", images: float = 0.2, videos: float = 0.1, mass: float = 0.4
) -> Engine:
    assert parts.draft_model is not None
    return parts.pruned(parts.draft_model, StaticTree(), _pruning(select, images, videos, mass))


def self_spec(
    parts: Parts, *, select: str = "specvlm", images: float = 0.2, videos: float = 0.1, mass: float = 0.4
) -> Engine:
    return parts.pruned(parts.target, StaticTree(), _pruning(select, images, videos, mass))


def sage(
    parts: Parts,
    *,
    signal: str = "entropy",
    lookahead: bool = True,
    probability: str = "path",
    window: int = 10,
    threshold: float = 0.1,
    total: int = 64,
    select: str = "specvlm",
    images: float = 0.2,
    videos: float = 0.1,
    mass: float = 0.4,
) -> Engine:
    assert parts.draft_model is not None
    tree = SageTree(
        signal=signal,  # type: ignore[arg-type]  # checked there
        lookahead=lookahead,
        probability=probability,  # type: ignore[arg-type]
        window=window,
        threshold=threshold,
        total=total,
    )
    return parts.pruned(parts.draft_model, tree, _pruning(select, images, videos, mass))


def _pruning(select: str, images: float, videos: float, mass: float) -> Pruning:
    return Pruning(select, images, videos, mass)  # type: ignore[arg-type]  # checked there
