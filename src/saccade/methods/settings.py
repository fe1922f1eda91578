"""Resolution of a method's options, and the check of a method against the drafters that are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import MethodError
from saccade.methods.groups import CHOICE_OPTIONS, CHOICES, GROUPS, RULE_OPTIONS, TREE_OPTIONS
from saccade.options import Option

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
    """Return the options by the choice that brings them, empty for those in force: name, method's default, `Option`."""
    values = _chosen(settings)
    groups = in_force(values)
    others = [g for g in GROUPS if g not in groups and (g in _WITH or g.partition("=")[0] in groups)]
    found: list[tuple[str, list[tuple[str, Any, Option]]]] = [("", [])]
    for group in (*groups, *(others if groups and values["draft_with"] != "lookup" else ())):
        rows = [(name, _default(settings, group, name, option), option) for name, option in GROUPS[group].items()]
        if group in groups:
            found[0][1].extend(rows)
        elif rows:
            found.append((_WITH.get(group, group), rows))
    return found if groups else []


def about(brings: str) -> str:
    """Return the sentence on the options that a choice brings, as `table` names it; empty for those in force."""
    group = next((name for name, choice in _WITH.items() if choice == brings), brings)
    kind, _, name = group.partition("=")
    part = {"tree": TREE_OPTIONS, "rule": RULE_OPTIONS}.get(kind, {}).get(name) or CHOICE_OPTIONS.get(group)
    return (part.__doc__ or "").strip() if part else ""


def _default(settings: Mapping[str, Any], group: str, name: str, option: Option) -> Any:
    own = settings[group] if "=" in group and group in settings else {}
    return own.get(name, settings.get(name, option.default))


def _chosen(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that decide which groups are in force."""
    names = ("draft_with", "tree", "rule", "copied", "views")
    chosen = {name: option.default for group in CHOICES.values() for name, option in group.items() if name in names}
    return chosen | {name: value for source in sources for name, value in source.items() if name in names}


def resolved(method: str, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option in force with its value."""
    given = _translated(method, given)
    is_fixed = settings.get("draft_with") == "none"
    for name in () if is_fixed else set(_chosen()) & set(given):
        next(group[name] for group in CHOICES.values() if name in group).check(name, f"method {method}", given[name])
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
        known[name].check(name, f"method {method}", value)
        values[name] = value
    return values


def _translated(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options under their names here."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in found:
            raise MethodError(f"Option {own} of method {method} is given twice; {name} is another name for it.")
        found[own] = value
    return found


def _no_option(method: str, name: str, known: Mapping[str, Option]) -> str:
    needed = [group for group, options in GROUPS.items() if name in options and "=" in group]
    if known and needed:
        groups = " or ".join(needed)
        return f"Method {method} has the option {name} with {groups} only; give that too, or leave {name} out."
    return f"Method {method} has no option {name}; its options are: {', '.join(known) or 'none'}."


Needs = Literal["nothing", "draft model", "head"]


def needs(values: Mapping[str, Any]) -> Needs:
    """Return the drafter that resolved options need besides the target."""
    drafts = values.get("draft_with")
    return "head" if drafts in HEAD_KINDS else "draft model" if drafts == "model" else "nothing"


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
    """Return the name of the head that a method drafts with; None for a method without a head.

    Of several heads of the method's kind, the default is the one named like the kind.
    """
    needed, kind = needs(values), values.get("draft_with")
    if has_drafter and needed == "nothing":
        raise MethodError(f"Method {method} takes no drafter; leave it out, or choose another method.")
    if needed != "head" and head is not None:
        raise MethodError(f"Method {method} takes no head; leave out head={head}.")
    if needed == "draft model" and not has_draft_model:
        raise MethodError(
            f"Method {method} needs a draft model{_instead(False, kinds)}; give one with drafter=... (--drafter on the "
            f"command line), or choose method {next(iter(kinds.values()), 'prompt-lookup')}."
        )
    if values.get("views") and not has_processor:
        raise MethodError(
            f"Method {method} rewrites the draft model's prompt and needs its processor; use saccade.load(), or choose "
            "another method."
        )
    if needed != "head":
        return None
    if head is not None:
        return _named(method, kind, kinds, head)
    fitting = [name for name, own in kinds.items() if own == kind]
    if not fitting:
        other = next(iter(kinds.values()), "chain" if has_draft_model else "prompt-lookup")
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


def _named(method: str, kind: Any, kinds: Mapping[str, str], head: str) -> str:
    if head not in kinds:
        raise MethodError(
            f"No head is named {head!r} (given: {_listed(kinds) or 'none'}); give its folder with "
            f"heads={{{head!r}: FOLDER}} (--head {head}=FOLDER on the command line)."
        )
    if kinds[head] != kind:
        raise MethodError(
            f"The head {head} is of the kind {kinds[head]}, which method {method} cannot use; choose method "
            f"{kinds[head]}, or another head."
        )
    return head


def _instead(has_draft_model: bool, kinds: Mapping[str, str]) -> str:
    """The drafters that are given in place of the needed one, as a clause."""
    heads = f"the head{'s' if len(kinds) > 1 else ''} {_listed(kinds)}" if kinds else ""
    given = [*["a draft model"] * has_draft_model, *[heads] * bool(heads)]
    verb = "are" if len(given) > 1 or len(kinds) > 1 else "is"
    return f", but only {' and '.join(given)} {verb} given" if given else ""


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(name if name == kind else f"{name} ({kind})" for name, kind in kinds.items())
