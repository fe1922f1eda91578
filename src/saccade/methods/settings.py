"""Options of every choice that a method makes, in groups, and the check of a method against loaded drafters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from saccade import options as groups
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import MethodError
from saccade.options import Option, options_of
from saccade.wording import meant

LOSSLESS_RULE, WITHOUT_DRAFTER = "exact", "suffix"  # the second: default method of a target alone


@dataclass(frozen=True, slots=True)
class MethodPart:
    """A tree policy or an acceptance rule: what makes it, the sentence on it, and its options."""

    maker: str | Callable[..., Any]  # imported from within `saccade` when it is first used
    meaning: str
    options: Mapping[str, Option]
    lossless: bool = False  # of a rule

    @classmethod
    def of(cls, maker: str, group: type, lossless: bool = False) -> MethodPart:
        """Return a part with the options of a group."""
        return cls(maker, group.__doc__ or "", options_of(group), lossless)

    def make(self, values: Mapping[str, Any], **more: Any) -> Any:
        """Return the part with its options of some values, and with what else its class has a field for."""
        maker: Any = self.maker
        if isinstance(maker, str):
            module, _, name = f"saccade.{maker}".rpartition(".")
            maker = getattr(import_module(module), name)
        known = getattr(maker, "__dataclass_fields__", {})
        options = {name: values[name] for name in self.options}
        return maker(**options, **{name: value for name, value in more.items() if name in known})


TREES: dict[str, MethodPart] = {
    "chain": MethodPart.of("draft.trees.policy.Chain", groups.ChainOptions),
    "branches": MethodPart.of("draft.trees.policy.branches_of", groups.BranchesOptions),
    "confident": MethodPart.of("draft.trees.policy.ConfidentChain", groups.ConfidentOptions),
    "static": MethodPart.of("draft.trees.policy.StaticTree", groups.NoOptions),
    "dynamic": MethodPart.of("draft.trees.dynamic.DynamicTree", groups.DynamicOptions),
    "width": MethodPart.of("draft.trees.dynamic.WidthTree", groups.WidthOptions),
    "oneshot": MethodPart.of("draft.trees.oneshot.OneShotTree", groups.OneShotOptions),
    "sage": MethodPart.of("draft.trees.sage.SageTree", groups.SageOptions),
    "paced": MethodPart.of("draft.trees.policy.Chain", groups.PacedOptions),
}
RULES: dict[str, MethodPart] = {
    LOSSLESS_RULE: MethodPart.of("", groups.NoOptions, lossless=True),  # of the decoding: greedy, or sampling
    "lvspec": MethodPart.of("verify.loose.LVSpec", groups.LVSpecOptions),
    "fly": MethodPart.of("verify.loose.FLy", groups.FLyOptions),
    "random": MethodPart.of("verify.loose.RandomLoosening", groups.RandomOptions),
}

_MAX_NGRAM = Option(3, "longest n-gram that prompt lookup searches for", 1)
CHOICES: dict[str, dict[str, Option]] = {
    "drafter": {
        "draft_with": Option(
            "model",
            "drafter: the draft model, token by token or in one pass (pard), the target itself, prompt lookup, suffix "
            "decoding, a request's own grammar or prediction alone, its own MTP layer, or a head of a kind",
            choices=("model", "pard", "self", "lookup", "suffix", "grammar", "mtp", *HEAD_KINDS),
        )
    },
    "lookup": {"gamma": Option(10, "most tokens copied per step", 1), "max_ngram": _MAX_NGRAM},
    "suffix": {
        **options_of(groups.SuffixOptions),
        "store_mib": Option(32, "memory of earlier answers, in MiB; the oldest go first", 0),
        "store": Option("", "file that keeps earlier answers across restarts; empty: none"),
    },
    "tree": {"tree": Option("chain", "tree policy", choices=tuple(TREES))},
    "rule": {"rule": Option(LOSSLESS_RULE, "acceptance rule; all but exact are LOSSY", choices=tuple(RULES))},
    "copies": {"lookup_tokens": Option(0, "tokens that prompt lookup copies into the tree; 0: no prompt lookup", 0)},
    "merging": {
        "max_ngram": _MAX_NGRAM,
        "merged_total": Option(64, "nodes of the merged tree, without the root", 1),
    },
    "pruning": options_of(groups.PruningOptions),
    "views": {"views": Option("", "views of the draft model: letters of MTCPR; empty: the prompt as it is")},
    "ensemble": {
        "weights": Option(
            "auto",
            "weights of the views; auto: a grid for two, inverse errors for more",
            choices=("auto", "grid", "best", "inverse-error", "adaboost", "random", "static"),
        ),
        "distance": Option("kl", "distance that the grid minimises", choices=("kl", "tv", "match")),
        "history": Option(0, "verified positions in the weights' history; 0: all", 0),
        "keep_history": Option(True, "keep the history from one turn to the next, unless the row samples"),
        "captioner": Option(
            "",
            "of view C: checkpoint of an image-to-text model or VLM; in Python also a function of a PIL image or "
            "texts by media digest; empty: the draft model itself",
            takes=lambda value: callable(value) or isinstance(value, Mapping),
        ),
    },
}
GROUPS: dict[str, Mapping[str, Option]] = {
    **CHOICES,
    **{f"tree={name}": part.options for name, part in TREES.items()},
    **{f"rule={name}": part.options for name, part in RULES.items()},
}
"""Group -> its options. A group is in force when the choice in its name is made."""
ALONE = ("lookup", "suffix", "grammar")  # drafters that have no tree policy
ALIASES = {
    "num_assistant_tokens": "gamma",
    "num_speculative_tokens": "gamma",
    "assistant_confidence_threshold": "confidence",
    "max_matching_ngram_size": "max_ngram",
    "suffix_decoding_max_tree_depth": "gamma",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}
"""Names of the same options in Hugging Face and vLLM -> names here."""
RENAMED = {
    "carry": "keep_history",
    "copied": "lookup_tokens",
    "factor": "max_spec_factor",
    "free": "loose_probability_ratio",
    "least": "min_token_prob",
    "mass": "attention_mass",
    "odds": "min_probability_ratio",
    "select": "keep_by",
    "share": "loose_share",
}
"""Names that options had in earlier releases, which are refused -> names now."""


def in_force(values: Mapping[str, Any]) -> list[str]:
    """Return the groups in force for a choice of drafter, tree, rule, views and copies."""
    drafts = values["draft_with"]
    rule = ["rule", f"rule={values['rule']}"]
    if drafts == "none":
        return []
    if drafts in ALONE:
        return ["drafter", *([drafts] if drafts in CHOICES else []), *rule]
    groups = ["drafter", "tree", f"tree={values['tree']}", *rule, "copies"]
    if values["lookup_tokens"]:
        groups.append("merging")
    if drafts == "self" or (drafts == "model" and (not values["views"] or "R" in values["views"])):
        groups.append("pruning")
    if drafts == "model":
        groups.append("views")
    if drafts == "model" and values["views"]:
        groups.append("ensemble")
    return groups


_WITH = {
    "merging": ("lookup_tokens=10", "The tree of a drafter's tokens and of copies."),
    "pruning": ("draft_with=model or self (views: R among them)", groups.PruningOptions.__doc__ or ""),
    "views": ("draft_with=model", "The views of one draft model (TABED)."),
    "ensemble": ("views=MT", "The mixture of several views (TABED, Section 4)."),
}
"""Group -> the choice that brings it, where its name does not say, and a sentence on it."""


def table(settings: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any, Option]]]]:
    """Return the options by the choice that brings them, empty for those in force: name, method's default, `Option`."""
    values = _chosen(settings)
    groups = in_force(values)
    others = [g for g in GROUPS if g not in groups and (g in _WITH or g.partition("=")[0] in groups)]
    blocks: list[tuple[str, list[tuple[str, Any, Option]]]] = [("", [])]
    for group in (*groups, *(others if groups and values["draft_with"] not in ALONE else ())):
        rows = [(name, _default(settings, group, name, option), option) for name, option in GROUPS[group].items()]
        if group in groups:
            blocks[0][1].extend(rows)
        elif rows:
            blocks.append((_WITH[group][0] if group in _WITH else group, rows))
    return blocks if groups else []


def about(brings: str) -> str:
    """Return the sentence on the options that a choice brings, as `table` names it; empty for those in force."""
    for choice, sentence in _WITH.values():
        if choice == brings:
            return sentence
    kind, _, name = brings.partition("=")
    part = {"tree": TREES, "rule": RULES}.get(kind, {}).get(name)
    return part.meaning.strip() if part else ""


def _default(settings: Mapping[str, Any], group: str, name: str, option: Option) -> Any:
    of_group = settings[group] if "=" in group and group in settings else {}
    return of_group.get(name, settings.get(name, option.default))


def _chosen(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that decide which groups are in force."""
    names = ("draft_with", "tree", "rule", "lookup_tokens", "views")
    chosen = {name: option.default for group in CHOICES.values() for name, option in group.items() if name in names}
    return chosen | {name: value for source in sources for name, value in source.items() if name in names}


def resolved(method: str, settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option in force with its value."""
    usual_names: dict[str, Any] = {}
    for name, value in chosen.items():
        usual = ALIASES.get(name, name)
        if usual in usual_names:
            raise MethodError(f"Option {usual} of method {method} is given twice; {name} is another name for it.")
        usual_names[usual] = value
    chosen = usual_names
    is_fixed = settings.get("draft_with") == "none"
    for name in () if is_fixed else set(_chosen()) & set(chosen):
        next(group[name] for group in CHOICES.values() if name in group).check(name, f"method {method}", chosen[name])
    groups = in_force(_chosen(settings) if is_fixed else _chosen(settings, chosen))
    known: dict[str, Option] = {}
    values: dict[str, Any] = {}
    for group in groups:
        known |= GROUPS[group]
        values |= {name: _default(settings, group, name, each) for name, each in GROUPS[group].items()}
    for name, value in chosen.items():
        if name not in known:
            raise MethodError(_no_option(method, name, known))
        known[name].check(name, f"method {method}", value)
        values[name] = value
    return values


def _no_option(method: str, name: str, known: Mapping[str, Option]) -> str:
    if name in RENAMED:
        return renamed(name)
    needed = [group for group, options in GROUPS.items() if name in options and "=" in group]
    needed += [f"draft_with={group}" for group in ("lookup", "suffix") if name in GROUPS[group]]
    if known and needed:
        groups = " or ".join(needed)
        return f"Method {method} has the option {name} with {groups} only; give that too, or leave {name} out."
    return f"Method {method} has no option {name}{meant(name, known)}; its options are: {', '.join(known) or 'none'}."


def renamed(name: str) -> str:
    """Return the refusal of an option's earlier name."""
    return f"The option {name} is called {RENAMED[name]} now; use that name."


def known_options() -> set[str]:
    """Return the names of the options of all methods."""
    return set(ALIASES).union(*GROUPS.values())


def as_setting(option: str, arguments: Sequence[str]) -> str:
    """How an option of a method is given that was given as one of a command; empty for others."""
    name = option.lstrip("-").replace("-", "_")
    if name not in known_options():
        return ""
    given = re.search(rf"{option}[ =](\S+)", " ".join(arguments))
    return f"; options of methods are given with --set, such as --set {name}={given[1] if given else 'VALUE'}"


Needs = Literal["nothing", "draft model", "head"]


def needs(values: Mapping[str, Any]) -> Needs:
    """Return the drafter that resolved options need besides the target."""
    drafts = values.get("draft_with")
    return "head" if drafts in HEAD_KINDS else "draft model" if drafts in ("model", "pard") else "nothing"


def fit(
    method: str,
    values: Mapping[str, Any],
    has_draft_model: bool,
    kinds: Mapping[str, str],
    head: str | None = None,
    *,
    has_drafter: bool = False,
    has_processor: bool = True,
) -> str | None:
    """Return the name of the head that a method drafts with, by default the one named like its kind; None for none."""
    needed, kind = needs(values), values.get("draft_with")
    if has_drafter and needed == "nothing":
        raise MethodError(f"Method {method} takes no drafter; leave it out, or choose another method.")
    if needed != "head" and head is not None:
        raise MethodError(f"Method {method} takes no head; leave out head={head}.")
    if needed == "draft model" and not has_draft_model:
        raise MethodError(
            f"Method {method} needs a draft model{_instead(False, kinds)}; give one with drafter=... (--drafter on the "
            f"command line), or choose method {next(iter(kinds.values()), WITHOUT_DRAFTER)}."
        )
    if values.get("views") and not has_processor:
        raise MethodError(
            f"Method {method} rewrites the draft model's prompt and needs its processor; use saccade.load(), or choose "
            "another method."
        )
    if needed != "head":
        return None
    if head is not None and head not in kinds:
        raise MethodError(
            f"No head is named {head!r} (given: {_listed(kinds) or 'none'}); give its folder with "
            f"heads={{{head!r}: FOLDER}} (--head {head}=FOLDER on the command line)."
        )
    if head is not None and kinds[head] != kind:
        raise MethodError(
            f"The head {head} is of the kind {kinds[head]}, which method {method} cannot use; choose method "
            f"{kinds[head]}, or another head."
        )
    if head is not None:
        return head
    fitting = [name for name, other in kinds.items() if other == kind]
    if not fitting:
        other = next(iter(kinds.values()), "chain" if has_draft_model else WITHOUT_DRAFTER)
        raise MethodError(
            f"Method {method} needs a trained {kind} head{_instead(has_draft_model, kinds)}; give its folder with "
            f"drafter=... or heads=... (--drafter or --head on the command line), or choose method {other}."
        )
    if len(fitting) > 1 and kind not in fitting:
        raise MethodError(
            f"Method {method} can use several heads ({', '.join(fitting)}); choose one with head=NAME, or name one of "
            f"them {kind}."
        )
    return kind if kind in fitting else fitting[0]


def _instead(has_draft_model: bool, kinds: Mapping[str, str]) -> str:
    """The drafters that are given in place of the needed one, as a clause."""
    heads = f"the head{'s' if len(kinds) > 1 else ''} {_listed(kinds)}" if kinds else ""
    drafters = [name for name in ("a draft model" if has_draft_model else "", heads) if name]
    verb = "are" if len(drafters) > 1 or len(kinds) > 1 else "is"
    return f", but only {' and '.join(drafters)} {verb} given" if drafters else ""


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(name if name == kind else f"{name} ({kind})" for name, kind in kinds.items())
