"""Options of every choice that a method makes, and the groups of them that each choice brings.

Drafter, tree, rule and pruning are chosen independently of each other. Each choice has options of its own (a group), so
that every accepted option has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.draft.heads.registry import HEAD_KINDS
from saccade.options import (
    BranchesOptions,
    ChainOptions,
    ConfidentOptions,
    DynamicOptions,
    ExactOptions,
    FLyOptions,
    LVSpecOptions,
    Option,
    PacedOptions,
    RandomOptions,
    SageOptions,
    StaticOptions,
    WidthOptions,
    option,
    options_of,
)

LOSSLESS_RULE = "exact"


def _makes_captions(value: Any) -> bool:
    return callable(value) or isinstance(value, Mapping)


TREE_OPTIONS: dict[str, type] = {
    "chain": ChainOptions,
    "branches": BranchesOptions,
    "confident": ConfidentOptions,
    "static": StaticOptions,
    "dynamic": DynamicOptions,
    "width": WidthOptions,
    "sage": SageOptions,
    "paced": PacedOptions,
}
RULE_OPTIONS: dict[str, type] = {
    LOSSLESS_RULE: ExactOptions,
    "lvspec": LVSpecOptions,
    "fly": FLyOptions,
    "random": RandomOptions,
}


@dataclass(frozen=True)
class DrafterChoice:
    """The drafter."""

    draft_with: str = option(
        "model",
        "drafter: the draft model, the target itself, prompt lookup, or a head of a kind",
        choices=("model", "self", "lookup", *HEAD_KINDS),
    )


@dataclass(frozen=True)
class Lookup:
    """Prompt lookup as the drafter."""

    gamma: int = option(10, "most tokens copied per step", 1)
    max_ngram: int = option(3, "longest n-gram that prompt lookup searches for", 1)


@dataclass(frozen=True)
class TreeChoice:
    """The tree policy."""

    tree: str = option("chain", "tree policy", choices=tuple(TREE_OPTIONS))


@dataclass(frozen=True)
class RuleChoice:
    """The acceptance rule."""

    rule: str = option(LOSSLESS_RULE, "acceptance rule; all but exact are LOSSY", choices=tuple(RULE_OPTIONS))


@dataclass(frozen=True)
class Copies:
    """Prompt lookup beside another drafter."""

    copied: int = option(0, "tokens that prompt lookup copies into the tree; 0: no prompt lookup", 0)


@dataclass(frozen=True)
class Merging:
    """The tree of a drafter's tokens and of copies."""

    max_ngram: int = option(3, "longest n-gram that prompt lookup searches for", 1)
    merged_total: int = option(64, "nodes of the merged tree, without the root", 1)


@dataclass(frozen=True)
class VisualPruning:
    """The share of the visual tokens that the drafter keeps (SpecVLM)."""

    keep_images: float = option(1.0, "share of an image's visual tokens that the drafter keeps", 0, 1, beyond_low=True)
    keep_videos: float = option(1.0, "share of a video's visual tokens that the drafter keeps", 0, 1, beyond_low=True)
    select: str = option("specvlm", "selection of the kept visual tokens", choices=("specvlm", "attention", "uniform"))
    mass: float = option(0.4, "share of the attention covered by the first stage of specvlm", 0, 1)


@dataclass(frozen=True)
class Views:
    """The views of one draft model (TABED)."""

    views: str = option("", "views of the draft model: letters of MTCPR; empty: the prompt as it is")


@dataclass(frozen=True)
class Ensemble:
    """The mixture of several views (TABED, Section 4)."""

    weights: str = option(
        "auto",
        "weights of the views; auto: a grid for two, inverse errors for more",
        choices=("auto", "grid", "best", "inverse-error", "adaboost", "random", "static"),
    )
    distance: str = option("kl", "distance that the grid minimises", choices=("kl", "tv", "match"))
    history: int = option(0, "verified positions in the weights' history; 0: all", 0)
    carry: bool = option(True, "keep the history from one turn to the next")
    captioner: Any = option(  # noqa: RUF009 (it returns a dataclass field)
        "",
        "of view C: checkpoint of an image-to-text model or VLM; in Python also a function of a PIL image or "
        "texts by media digest; empty: the draft model itself",
        takes=_makes_captions,
    )


CHOICE_OPTIONS: dict[str, type] = {
    "drafter": DrafterChoice,
    "lookup": Lookup,
    "tree": TreeChoice,
    "rule": RuleChoice,
    "copies": Copies,
    "merging": Merging,
    "pruning": VisualPruning,
    "views": Views,
    "ensemble": Ensemble,
}
TREES = {name: options_of(group) for name, group in TREE_OPTIONS.items()}
"""Tree policy -> its options."""
RULES = {name: options_of(group) for name, group in RULE_OPTIONS.items()}
"""Acceptance rule -> its options; every rule but ``exact`` is lossy."""
CHOICES = {name: options_of(group) for name, group in CHOICE_OPTIONS.items()}
GROUPS: dict[str, dict[str, Option]] = {
    **CHOICES,
    **{f"tree={name}": options for name, options in TREES.items()},
    **{f"rule={name}": options for name, options in RULES.items()},
}
"""Group -> its options. A group is in force when the choice in its name is made."""
