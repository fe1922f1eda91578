"""Methods are data: named compositions of drafter, tree policy and acceptance rule, with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from saccade.draft.drafter import Drafter
from saccade.draft.dynamic import DynamicTree
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.policy import TreePolicy
from saccade.draft.static import Chain, StaticTree
from saccade.errors import MethodError
from saccade.target.adapter import Target

Needs = Literal["nothing", "draft model"]


@dataclass(frozen=True, slots=True)
class Method:
    """A named composition.

    Attributes:
        summary: one line for `saccade methods`.
        source: paper and section.
        lossless: whether its output is the target's own (distribution).
        needs: what the user has to give besides the target.
        policy: makes the tree policy from options; None where there is no tree policy.
        options: names and defaults that the user may override.
    """

    summary: str
    source: str
    lossless: bool
    needs: Needs
    policy: Callable[..., TreePolicy] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "plain": Method(
        summary="one target pass per token: the baseline, on the same engine",
        source="",
        lossless=True,
        needs="nothing",
    ),
    "chain": Method(
        summary="a draft model guesses gamma tokens in a row",
        source="Leviathan et al. 2023, Algorithm 1",
        lossless=True,
        needs="draft model",
        policy=Chain,
        options={"gamma": 5},
    ),
    "static-tree": Method(
        summary="a draft model fills SpecVLM's tree of 25 nodes over 5 levels",
        source="Ji et al. 2025, SpecVLM; the tree is EAGLE's mc_sim_7b_63",
        lossless=True,
        needs="draft model",
        policy=StaticTree,
    ),
    "dynamic-tree": Method(
        summary="a draft model grows EAGLE-2's tree: expand the likeliest, keep the likeliest of all",
        source="Li et al. 2024, EAGLE-2, Section 4",
        lossless=True,
        needs="draft model",
        policy=DynamicTree,
        options={"top": 10, "max_depth": 6, "total": 60},
    ),
    "prompt-lookup": Method(
        summary="copies what followed the same n-gram earlier; no draft model",
        source="Saxena 2023, prompt lookup decoding",
        lossless=True,
        needs="nothing",
        options={"gamma": 10, "max_ngram": 3},
    ),
}
"""Every method by name."""


def get(name: str) -> Method:
    """The method of that name.

    Raises:
        MethodError: there is none; the message lists those that exist.
    """
    if name not in METHODS:
        raise MethodError(
            f"Unknown method {name!r}; expected one of {', '.join(METHODS)} (see `saccade methods`)."
        )
    return METHODS[name]


def default(has_draft_model: bool) -> str:
    """The method for a user who names none."""
    return "chain" if has_draft_model else "prompt-lookup"


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `MethodError` for an option that the method does not have, or for a value of the wrong type."""
    method = get(name)
    unknown = set(options) - set(method.options)
    if unknown:
        known = ", ".join(method.options) or "none"
        raise MethodError(
            f"Method {name} has no option {', '.join(sorted(unknown))}; its options are: {known}."
        )
    for option, value in options.items():
        whole = isinstance(method.options[option], int)
        if whole and (not isinstance(value, int) or isinstance(value, bool)):
            raise MethodError(f"Option {option} of method {name} must be a whole number, not {value!r}.")


def build(
    name: str, target: Target, draft_model: Target | None, vocab_size: int | None = None, **options: Any
) -> Drafter | None:
    """The drafter of a method; None for plain decoding.

    Args:
        vocab_size: tokens that target and draft model share.
        options: override the method's defaults.

    Raises:
        MethodError: unknown method or option, a value out of range, or no draft model where one is needed.
    """
    method = get(name)
    check_options(name, options)
    settings = {**method.options, **options}
    if method.needs == "draft model" and draft_model is None:
        raise MethodError(
            f"Method {name} needs a draft model; give one with drafter=... (or use prompt-lookup, which needs none)."
        )
    try:
        if method.policy is not None:
            assert draft_model is not None
            return ModelDrafter(draft_model, method.policy(**settings), vocab_size or target.vocab_size)
        if name == "prompt-lookup":
            return PromptLookup(device=torch.device(target.device), **settings)
    except (TypeError, ValueError) as problem:
        raise MethodError(f"Method {name} cannot be set up like that: {problem}") from problem
    return None
