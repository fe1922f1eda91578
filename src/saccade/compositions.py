"""How methods are composed: functions whose keyword arguments are the options of methods.

What a method is made of is imported when it is made, so that methods can be listed without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saccade.errors import MethodError

if TYPE_CHECKING:
    from saccade.draft.drafter import Drafter
    from saccade.draft.heads.head import Head
    from saccade.draft.model import ModelDrafter
    from saccade.draft.policy import TreePolicy
    from saccade.draft.pruning import Pruning
    from saccade.engine import Engine
    from saccade.inputs.processor import InputProcessor
    from saccade.target.adapter import Target


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method is composed of besides its options.

    Attributes:
        target: the model whose answer is wanted.
        draft_model: a smaller one, where a method needs it.
        vocab_size: tokens that both share; the smaller vocabulary when None.
        special_ids: tokens that lossy rules never let pass.
        draft_processor: makes the draft model's prompts; needed by methods that rewrite them.
        head: a trained drafter head, where a method needs it.
    """

    target: Target
    draft_model: Target | None = None
    vocab_size: int | None = None
    special_ids: tuple[int, ...] = ()
    draft_processor: InputProcessor | None = None
    head: Head | None = None

    def drafter(self, policy: TreePolicy) -> ModelDrafter:
        """The draft model under a tree policy."""
        from saccade.draft.model import ModelDrafter

        assert self.draft_model is not None
        return ModelDrafter(self.draft_model, policy, self.vocab_size or self.target.vocab_size)

    def rewriting(self, method: str) -> InputProcessor:
        """The draft model's inputs, for a method that rewrites its prompt.

        Raises:
            MethodError: they are not known.
        """
        if self.draft_processor is None:
            raise MethodError(
                f"{method} rewrites the draft model's prompt, so it needs its processor; use saccade.load()."
            )
        return self.draft_processor

    def pruned(self, model: Target, policy: TreePolicy, pruning: Pruning) -> Engine:
        """A model that drafts with part of the visual tokens; the target itself for self-speculation."""
        from saccade.draft.pruned import PrunedDrafter

        vocab_size = self.vocab_size or self.target.vocab_size
        return self.engine(PrunedDrafter(model, policy, vocab_size, pruning))

    def headed(self, kind: str, policy: TreePolicy) -> Engine:
        """The head under a tree policy.

        Raises:
            MethodError: it is of another kind.
        """
        from saccade.draft.heads.session import HeadDrafter

        assert self.head is not None
        if self.head.kind != kind:
            raise MethodError(
                f"Method {kind} needs a head of the kind {kind}, but the one given is of the kind {self.head.kind}; "
                f"choose method {self.head.kind}, or give another head."
            )
        return self.engine(HeadDrafter(self.head, self.target, policy))

    def engine(self, drafter: Drafter | None, rule: Any = None) -> Engine:
        """The composition."""
        from saccade.engine import Engine

        return Engine(self.target, drafter, rule)


def plain(parts: Parts) -> Engine:
    return parts.engine(None)


def chain(parts: Parts, *, gamma: int = 5) -> Engine:
    return parts.engine(parts.drafter(policy_of("chain", gamma)))


def static_tree(parts: Parts) -> Engine:
    from saccade.draft.static import StaticTree

    return parts.engine(parts.drafter(StaticTree()))


def dynamic_tree(parts: Parts, *, top: int = 10, max_depth: int = 6, total: int = 60) -> Engine:
    from saccade.draft.dynamic import DynamicTree

    return parts.engine(parts.drafter(DynamicTree(top, max_depth, total)))


def spd(parts: Parts, *, gamma: int = 5, tree: str = "chain") -> Engine:
    from saccade.draft.ensemble import EnsembleDrafter
    from saccade.draft.views import TextOnly
    from saccade.inputs.families import visual_ids

    assert parts.draft_model is not None
    sees = visual_ids(parts.draft_model.config)  # else the prompt is the target's
    config = parts.draft_model.config if sees else parts.target.config
    blind = TextOnly(config, parts.rewriting("spd").tokenizer)
    vocab_size = parts.vocab_size or parts.target.vocab_size
    policy = policy_of(tree, gamma)
    return parts.engine(EnsembleDrafter(parts.draft_model, policy, [blind], vocab_size=vocab_size))


def prompt_lookup(parts: Parts, *, gamma: int = 10, max_ngram: int = 3) -> Engine:
    from saccade.draft.lookup import PromptLookup

    return parts.engine(PromptLookup(gamma, max_ngram, parts.target.device))


def lookup_merge(
    parts: Parts,
    *,
    gamma: int = 5,
    tree: str = "chain",
    copied: int = 10,
    max_ngram: int = 3,
    total: int = 64,
) -> Engine:
    from saccade.draft.lookup import PromptLookup
    from saccade.draft.merged import MergedDrafter

    drafter = parts.drafter(policy_of(tree, gamma))
    copies = PromptLookup(copied, max_ngram, drafter.model.device, parts.target.vocab_size)
    return parts.engine(MergedDrafter(drafter, copies, total))


def tabed(
    parts: Parts,
    *,
    views: str = "MT",
    gamma: int = 5,
    width: int = 1,
    tree: str = "chain",
    weights: str = "auto",
    distance: str = "kl",
    window: int = 0,
    carry: bool = True,
) -> Engine:
    from saccade.draft.ensemble import EnsembleDrafter
    from saccade.draft.views import by_names
    from saccade.draft.weights import by_name
    from saccade.draft.width import WidthTree

    if width != 1 and tree != "chain":
        raise ValueError(f"width {width} is a tree of its own; leave out tree={tree}, or width.")
    assert parts.draft_model is not None
    seen = by_names(views, parts.draft_model, parts.rewriting("tabed"))
    weighting = by_name(weights, len(seen), distance=distance, window=window or None)  # type: ignore[arg-type]
    policy = policy_of(tree, gamma) if width == 1 else WidthTree(width, gamma)
    vocab_size = parts.vocab_size or parts.target.vocab_size
    return parts.engine(EnsembleDrafter(parts.draft_model, policy, seen, weighting, vocab_size, carry))


def lvspec(
    parts: Parts,
    *,
    gamma: int = 10,
    branches: int = 1,
    tree: str = "chain",
    share: float = 0.7,
    nearest: int = 10,
    shift: bool = True,
    space: str = "hidden",
) -> Engine:
    from saccade.draft.static import branches_of
    from saccade.verify.lvspec import LVSpec

    if branches != 1 and tree != "chain":
        raise ValueError(f"{branches} branches are chains; leave out tree={tree}, or branches.")
    rule = LVSpec(share, nearest, shift, space, parts.special_ids)  # type: ignore[arg-type]  # checked there
    policy = policy_of(tree, gamma) if branches == 1 else branches_of(branches, gamma)
    return parts.engine(parts.drafter(policy), rule)


def fly(parts: Parts, *, gamma: int = 10, entropy: float = 0.2, window: int = 4) -> Engine:
    from saccade.verify.fly import FLy

    return parts.engine(parts.drafter(policy_of("chain", gamma)), FLy(entropy, window, parts.special_ids))


def random_loosening(parts: Parts, *, gamma: int = 10, share: float = 0.7) -> Engine:
    from saccade.verify.lvspec import RandomLoosening

    return parts.engine(parts.drafter(policy_of("chain", gamma)), RandomLoosening(share, parts.special_ids))


def specvlm(
    parts: Parts,
    *,
    select: str = "specvlm",
    images: float = 0.2,
    videos: float = 0.1,
    mass: float = 0.4,
    tree: str = "static",
    gamma: int = 5,
) -> Engine:
    assert parts.draft_model is not None
    return parts.pruned(parts.draft_model, policy_of(tree, gamma), _pruning(select, images, videos, mass))


def self_spec(
    parts: Parts,
    *,
    select: str = "specvlm",
    images: float = 0.2,
    videos: float = 0.1,
    mass: float = 0.4,
    tree: str = "static",
    gamma: int = 5,
) -> Engine:
    return parts.pruned(parts.target, policy_of(tree, gamma), _pruning(select, images, videos, mass))


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
    from saccade.draft.sage import SageTree

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


def headed(
    kind: str,
    parts: Parts,
    *,
    tree: str = "dynamic",
    top: int = 10,
    depth: int = 6,
    total: int = 60,
    gamma: int = 5,
) -> Engine:
    """Any kind of head; ``top``, ``depth`` and ``total`` are of the dynamic tree, ``gamma`` of the chain."""
    from saccade.draft.dynamic import DynamicTree

    return parts.headed(kind, DynamicTree(top, depth, total) if tree == "dynamic" else policy_of(tree, gamma))


def kangaroo(parts: Parts, *, gamma: int = 6, threshold: float = 0.6) -> Engine:
    from saccade.draft.confident import ConfidentChain

    return parts.headed("kangaroo", ConfidentChain(gamma, threshold))


def policy_of(tree: str, gamma: int) -> TreePolicy:
    """A tree policy by its name in options; ``gamma`` is the length of a chain and says nothing to the others.

    Raises:
        ValueError: unknown name, or a value out of range.
    """
    from saccade.draft.dynamic import DynamicTree
    from saccade.draft.sage import SageTree
    from saccade.draft.static import Chain, StaticTree

    policies: dict[str, Callable[[], TreePolicy]] = {
        "chain": lambda: Chain(gamma),
        "static": StaticTree,
        "dynamic": DynamicTree,
        "sage": SageTree,
    }
    if tree not in policies:
        raise ValueError(f"tree must be one of {', '.join(policies)}, not {tree!r}.")
    return policies[tree]()


def _pruning(select: str, images: float, videos: float, mass: float) -> Pruning:
    from saccade.draft.pruning import Pruning

    return Pruning(select, images, videos, mass)  # type: ignore[arg-type]  # checked there
