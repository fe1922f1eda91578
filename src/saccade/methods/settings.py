"""Options of the one composition behind every method: names, defaults, ranges and meanings, as data.

Drafter, tree, rule and pruning are chosen independently of each other. Each choice has options of its own (a group), so
that every accepted option has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import MethodError

LOSSLESS_RULE = "exact"


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        default: its type is the option's.
        meaning: one line.
        low, high: of a number, inclusive; None where there is no bound.
        beyond_low: the lowest value itself is out of range.
        choices: of a word.
        takes: predicate of values of other types that are accepted too.
    """

    default: Any
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    takes: Callable[[Any], bool] | None = None
    beyond_low: bool = False

    @property
    def range(self) -> str:
        """The accepted values as text; empty for any value of the type."""
        if self.choices:
            return " | ".join(self.choices)
        if self.high is not None:
            return f"{'above ' * self.beyond_low}{self.low:g} to {self.high:g}"
        return "" if self.low is None else f"{self.low:g} or more"

    def check(self, name: str, method: str, value: Any) -> None:
        """Raise `MethodError` unless a value is of the right type and in range."""
        if self.takes is not None and self.takes(value):
            return
        kind = type(self.default)
        if not (type(value) is kind or (kind is float and type(value) is int)):
            raise MethodError(f"Option {name} of method {method} must be {_WORDS[kind]}, not {value!r}.")
        if self.choices and value not in self.choices:
            raise MethodError(
                f"Option {name} of method {method} must be one of {', '.join(self.choices)}, not {value!r}."
            )
        is_low = self.low is not None and (value < self.low or (self.beyond_low and value == self.low))
        if is_low or not (self.high is None or value <= self.high):
            words = f"in the range {self.range}" if self.high is not None else f"at least {self.low:g}"
            raise MethodError(f"Option {name} of method {method} must be {words}, not {value!r}.")


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


def _makes_captions(value: Any) -> bool:
    return callable(value) or isinstance(value, Mapping)


_GAMMA = Option(5, "tokens of a chain", 1)
_SHARE = Option(0.7, "share of the draft tokens that are accepted loosely (LVSpec's lambda)", 0, 1)

TREES: dict[str, dict[str, Option]] = {
    "chain": {"gamma": _GAMMA},
    "branches": {"branches": Option(2, "chains that branch at the root", 1), "gamma": _GAMMA},
    "confident": {
        "gamma": _GAMMA,
        "confidence": Option(
            0.6, "least draft probability at which drafting continues; 0 never stops early", 0, 1
        ),
    },
    "static": {},
    "dynamic": {
        "top": Option(10, "children of a node, and nodes expanded per level", 1),
        "max_depth": Option(6, "levels", 1),
        "total": Option(60, "verified nodes, without the root", 1),
    },
    "width": {
        "width": Option(2, "nodes per depth, those of the likeliest paths", 1),
        "max_depth": Option(5, "levels", 1),
    },
    "sage": {
        "d_min": Option(3, "levels at confidence 0", 1),
        "d_max": Option(8, "levels at confidence 1, where the history starts", 1),
        "ceiling": Option(12, "largest d_max that the history may reach", 1),
        "w_min": Option(2, "children of the root at confidence 1", 1),
        "w_max": Option(10, "children of the root at confidence 0", 1),
        "total": Option(64, "verified nodes, without the root", 1),
        "k": Option(10, "tokens whose entropy counts", 2),
        "threshold": Option(0.1, "a node of level l needs a probability above threshold * l / D", 0),
        "probability": Option("path", "of a node: of its path, or its own", choices=("path", "own")),
        "signal": Option("entropy", "confidence from entropy or the top token", choices=("entropy", "top")),
        "alpha_of": Option(
            "root",
            "draft distribution of the confidence: after the step's root or its last accepted node",
            choices=("root", "accepted"),
        ),
        "lookahead": Option(True, "a step's confidence shapes the next step's tree; false: its own"),
        "window": Option(10, "steps over which accepted lengths are averaged; 0: d_max never moves", 0),
        "low": Option(2.0, "an average below it lowers d_max by one", 0),
        "high": Option(3.0, "an average above it raises d_max by one", 0),
    },
}
"""Tree policy -> its options."""

RULES: dict[str, dict[str, Option]] = {
    LOSSLESS_RULE: {},
    "lvspec": {
        "share": _SHARE,
        "nearest": Option(10, "number of most similar visual tokens that are averaged (N)", 1),
        "shift": Option(True, "accept a token if the target's token occurs elsewhere in the draft"),
        "space": Option("hidden", "compared states", choices=("hidden", "embedding")),
        "position": Option(
            "verifying",
            "state that represents a draft token: its parent's or its own",
            choices=("verifying", "own"),
        ),
    },
    "fly": {
        "entropy": Option(
            0.2, "least entropy of the target at a forgiven mismatch, as a share of the largest", 0, 1
        ),
        "deferred": Option(4, "following draft tokens that must match (FLy's window W)", 0),
    },
    "random": {"share": _SHARE},
}
"""Acceptance rule -> its options; every rule but ``exact`` is lossy."""

_NGRAM = Option(3, "longest n-gram that prompt lookup searches for", 1)
_CHOICES: dict[str, dict[str, Option]] = {
    "drafter": {
        "draft_with": Option(
            "model",
            "drafter: the draft model, the target itself, prompt lookup, or a head of a kind",
            choices=("model", "self", "lookup", *HEAD_KINDS),
        )
    },
    "lookup": {"gamma": Option(10, "most tokens copied per step", 1), "max_ngram": _NGRAM},
    "tree": {"tree": Option("chain", "tree policy", choices=tuple(TREES))},
    "rule": {"rule": Option(LOSSLESS_RULE, "acceptance rule; all but exact are LOSSY", choices=tuple(RULES))},
    "copies": {"copied": Option(0, "tokens that prompt lookup copies into the tree; 0: no prompt lookup", 0)},
    "merging": {
        "max_ngram": _NGRAM,
        "merged_total": Option(64, "nodes of the merged tree, without the root", 1),
    },
    "pruning": {
        "keep_images": Option(
            1.0, "share of an image's visual tokens that the drafter keeps", 0, 1, beyond_low=True
        ),
        "keep_videos": Option(
            1.0, "share of a video's visual tokens that the drafter keeps", 0, 1, beyond_low=True
        ),
        "select": Option(
            "specvlm", "selection of the kept visual tokens", choices=("specvlm", "attention", "uniform")
        ),
        "mass": Option(0.4, "share of the attention covered by the first stage of specvlm", 0, 1),
    },
    "views": {
        "views": Option("", "views of the draft model: letters of MTCPR; empty: the prompt as it is"),
    },
    "ensemble": {
        "weights": Option(
            "auto",
            "weights of the views; auto: a grid for two, inverse errors for more",
            choices=("auto", "grid", "best", "inverse-error", "adaboost", "random", "static"),
        ),
        "distance": Option("kl", "distance that the grid minimises", choices=("kl", "tv", "match")),
        "history": Option(0, "verified positions in the weights' history; 0: all", 0),
        "carry": Option(True, "keep the history from one turn to the next"),
        "captioner": Option(
            "",
            "of view C: checkpoint of an image-to-text model or VLM; in Python also a function of a PIL image or "
            "texts by media digest; empty: the draft model itself",
            takes=_makes_captions,
        ),
    },
}

GROUPS: dict[str, dict[str, Option]] = {
    **_CHOICES,
    **{f"tree={name}": options for name, options in TREES.items()},
    **{f"rule={name}": options for name, options in RULES.items()},
}
"""Group -> its options. A group is in force when the choice in its name is made."""

RENAMED: dict[str, tuple[str, ...]] = {
    "images": ("keep_images",),
    "videos": ("keep_videos",),
    "depth": ("max_depth",),
    "window": ("deferred", "history"),
    "threshold": ("confidence",),
    "total": ("merged_total",),
}
"""Names of earlier versions -> present names, where the old name has no other meaning."""


ALIASES = {
    "num_assistant_tokens": "gamma",
    "num_speculative_tokens": "gamma",
    "assistant_confidence_threshold": "confidence",
    "max_matching_ngram_size": "max_ngram",
}
"""Names of the same options in Hugging Face and vLLM -> names here."""


def in_force(values: Mapping[str, Any]) -> list[str]:
    """Return the groups in force for a choice of drafter, tree, rule, views and copies."""
    drafts = values["draft_with"]
    rule = ["rule", f"rule={values['rule']}"]
    if drafts == "none":
        return []
    if drafts == "lookup":
        return ["drafter", "lookup", *rule]
    found = [
        "drafter",
        "tree",
        f"tree={values['tree']}",
        *rule,
        "copies",
        *["merging"] * bool(values["copied"]),
    ]
    if drafts == "self" or (drafts == "model" and (not values["views"] or "R" in values["views"])):
        found.append("pruning")
    if drafts == "model":
        found += ["views", *["ensemble"] * bool(values["views"])]
    return found


_WITH = {
    "merging": "copied=10",
    "pruning": "draft_with=model or self (views: R among them)",
    "views": "draft_with=model",
    "ensemble": "views=MT",
}
"""Group -> the choice that brings it, where its name does not say."""


def table(settings: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any, Option]]]]:
    """Return the options by the choice that brings them, empty for those in force: name, method's default, `Option`.

    Args:
        settings: as for `resolved`.
    """
    values = _chosen(settings)
    groups = in_force(values)
    others = [g for g in GROUPS if g not in groups and (g in _WITH or g.partition("=")[0] in groups)]
    found: list[tuple[str, list[tuple[str, Any, Option]]]] = [("", [])]
    for group in (*groups, *(others if groups and values["draft_with"] != "lookup" else ())):
        rows = [
            (name, _default(settings, group, name, option), option) for name, option in GROUPS[group].items()
        ]
        if group in groups:
            found[0][1].extend(rows)
        elif rows:
            found.append((_WITH.get(group, group), rows))
    return found if groups else []


def _default(settings: Mapping[str, Any], group: str, name: str, option: Option) -> Any:
    own = settings[group] if "=" in group and group in settings else {}
    return own.get(name, settings.get(name, option.default))


def _chosen(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that decide which groups are in force."""
    names = ("draft_with", "tree", "rule", "copied", "views")
    chosen = {
        name: option.default for group in _CHOICES.values() for name, option in group.items() if name in names
    }
    return chosen | {name: value for source in sources for name, value in source.items() if name in names}


def resolved(method: str, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option in force with its value.

    Args:
        settings: of the method; a mapping under the name of a group applies to that group alone.
        given: by the user.

    Raises:
        MethodError: an option that is not in force or does not exist, or a value of the wrong type or out of range.
    """
    given = _translated(method, given)
    is_fixed = settings.get("draft_with") == "none"
    for name in () if is_fixed else set(_chosen()) & set(given):
        next(group[name] for group in _CHOICES.values() if name in group).check(name, method, given[name])
    groups = in_force(_chosen(settings) if is_fixed else _chosen(settings, given))
    known: dict[str, Option] = {}
    values: dict[str, Any] = {}
    for group in groups:
        for name, option in GROUPS[group].items():
            known[name] = option
            values[name] = _default(settings, group, name, option)
    for name, value in given.items():
        if name not in known:
            raise MethodError(_no_option(method, name, known))
        known[name].check(name, method, value)
        values[name] = value
    return values


def _translated(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options under their names here."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in found:
            raise MethodError(
                f"Option {own} of method {method} is given twice; {name} is another name for it."
            )
        found[own] = value
    return found


def _no_option(method: str, name: str, known: Mapping[str, Option]) -> str:
    now = next((new for new in RENAMED.get(name, ()) if new in known), None)
    if now is not None:
        return f"Option {name} is called {now} now (method {method}); give {now} instead."
    needed = [group for group, options in GROUPS.items() if name in options and "=" in group]
    if known and needed:
        groups = " or ".join(needed)
        return (
            f"Method {method} has the option {name} with {groups} only; give that too, or leave {name} out."
        )
    return f"Method {method} has no option {name}; its options are: {', '.join(known) or 'none'}."
