"""How methods are composed: functions whose keyword arguments are the options of methods.

What a method is made of is imported when it is made, so that methods can be listed without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from saccade.parts import Parts

if TYPE_CHECKING:
    from saccade.draft.policy import TreePolicy
    from saccade.draft.pruning import Pruning
    from saccade.engine import Engine


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
    position: str = "verifying",
) -> Engine:
    from saccade.draft.static import branches_of
    from saccade.verify.lvspec import LVSpec

    if branches != 1 and tree != "chain":
        raise ValueError(f"{branches} branches are chains; leave out tree={tree}, or branches.")
    rule = LVSpec(share, nearest, shift, space, parts.special_ids, position)  # type: ignore[arg-type]  # checked there
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
