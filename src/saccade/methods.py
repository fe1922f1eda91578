"""Methods are data: named compositions of drafter, tree policy and acceptance rule, with their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from saccade.draft.drafter import Drafter
from saccade.draft.dynamic import DynamicTree
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.policy import TreePolicy
from saccade.draft.static import Chain, StaticTree
from saccade.engine import Engine
from saccade.errors import MethodError
from saccade.target.adapter import Target
from saccade.verify.fly import FLy
from saccade.verify.lvspec import LVSpec, RandomLoosening

Needs = Literal["nothing", "draft model"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method is composed of besides its options.

    Attributes:
        target: the model whose answer is wanted.
        draft_model: a smaller one, where a method needs it.
        vocab_size: tokens that both share; the smaller vocabulary when None.
        special_ids: tokens that lossy rules never let pass.
    """

    target: Target
    draft_model: Target | None = None
    vocab_size: int | None = None
    special_ids: tuple[int, ...] = ()

    def drafter(self, policy: TreePolicy) -> ModelDrafter:
        """The draft model under a tree policy."""
        assert self.draft_model is not None
        return ModelDrafter(self.draft_model, policy, self.vocab_size or self.target.vocab_size)

    def engine(self, drafter: Drafter | None, rule: Any = None) -> Engine:
        """The composition."""
        return Engine(self.target, drafter, rule)


@dataclass(frozen=True)
class Method:
    """A named composition.

    Attributes:
        summary: one line for `saccade methods`.
        source: paper and section.
        lossless: whether its output is the target's own (distribution).
        needs: what the user has to give besides the target.
        compose: makes the engine from parts; its keyword arguments are the method's options.
    """

    summary: str
    source: str
    lossless: bool
    needs: Needs
    compose: Callable[..., Engine]

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Names and defaults that the user may override."""
        parameters = inspect.signature(self.compose).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _plain(parts: Parts) -> Engine:
    return parts.engine(None)


def _chain(parts: Parts, *, gamma: int = 5) -> Engine:
    return parts.engine(parts.drafter(Chain(gamma)))


def _static_tree(parts: Parts) -> Engine:
    return parts.engine(parts.drafter(StaticTree()))


def _dynamic_tree(parts: Parts, *, top: int = 10, max_depth: int = 6, total: int = 60) -> Engine:
    return parts.engine(parts.drafter(DynamicTree(top, max_depth, total)))


def _prompt_lookup(parts: Parts, *, gamma: int = 10, max_ngram: int = 3) -> Engine:
    return parts.engine(PromptLookup(gamma, max_ngram, torch.device(parts.target.device)))


def _lvspec(
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


def _fly(parts: Parts, *, gamma: int = 10, entropy: float = 0.2, window: int = 4) -> Engine:
    return parts.engine(parts.drafter(Chain(gamma)), FLy(entropy, window, parts.special_ids))


def _random_loosening(parts: Parts, *, gamma: int = 10, share: float = 0.7) -> Engine:
    return parts.engine(parts.drafter(Chain(gamma)), RandomLoosening(share, parts.special_ids))


METHODS: dict[str, Method] = {
    "plain": Method(
        "one target pass per token: the baseline, on the same engine",
        source="",
        lossless=True,
        needs="nothing",
        compose=_plain,
    ),
    "chain": Method(
        "a draft model guesses gamma tokens in a row",
        source="Leviathan et al. 2023, Algorithm 1",
        lossless=True,
        needs="draft model",
        compose=_chain,
    ),
    "static-tree": Method(
        "a draft model fills SpecVLM's tree of 25 nodes over 5 levels",
        source="Ji et al. 2025, SpecVLM; the tree is EAGLE's mc_sim_7b_63",
        lossless=True,
        needs="draft model",
        compose=_static_tree,
    ),
    "dynamic-tree": Method(
        "a draft model grows EAGLE-2's tree: expand the likeliest, keep the likeliest of all",
        source="Li et al. 2024, EAGLE-2, Section 4",
        lossless=True,
        needs="draft model",
        compose=_dynamic_tree,
    ),
    "prompt-lookup": Method(
        "copies what followed the same n-gram earlier; no draft model",
        source="Saxena 2023, prompt lookup decoding",
        lossless=True,
        needs="nothing",
        compose=_prompt_lookup,
    ),
    "lvspec": Method(
        "LOSSY: strict where the target speaks of what it sees, loose on the least visual share of the guesses",
        source="LVSpec, Section 3; greedy decoding only",
        lossless=False,
        needs="draft model",
        compose=_lvspec,
    ),
    "fly": Method(
        "LOSSY: forgives a mismatch where the target is unsure and the next guesses match (window=0: where unsure)",
        source="Li et al. 2025, FLy, as in LVSpec's baselines; greedy decoding only",
        lossless=False,
        needs="draft model",
        compose=_fly,
    ),
    "random-loosening": Method(
        "LOSSY: forgives a random share of the guesses; the control for LVSpec",
        source="LVSpec, Figure 7; greedy decoding only",
        lossless=False,
        needs="draft model",
        compose=_random_loosening,
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


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


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
        kind = type(method.options[option])
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise MethodError(f"Option {option} of method {name} must be {_WORDS[kind]}, not {value!r}.")


def build(name: str, parts: Parts, **options: Any) -> Engine:
    """The engine of a method.

    Args:
        options: override the method's defaults.

    Raises:
        MethodError: unknown method or option, a value out of range, or no draft model where one is needed.
    """
    method = get(name)
    check_options(name, options)
    if method.needs == "draft model" and parts.draft_model is None:
        raise MethodError(
            f"Method {name} needs a draft model; give one with drafter=... (or use prompt-lookup, which needs none)."
        )
    try:
        return method.compose(parts, **options)
    except (TypeError, ValueError) as problem:
        raise MethodError(f"Method {name} cannot be set up like that: {problem}") from problem


def special_ids(config: Any, generation_config: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Tokens that end or structure a text: of the configurations, and the tokenizer's if it is known."""
    ids: set[int] = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    for part in (config, config.get_text_config(decoder=True), generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(part, name, None)
            ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(ids))
