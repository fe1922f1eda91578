"""Heads, tree policies and rules of one's own, which every method, command and report then knows by their names."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from saccade.draft.heads.registry import HEAD_KINDS, HeadKind
from saccade.errors import MethodError
from saccade.methods.registry import METHODS, of_head
from saccade.methods.settings import CHOICES, GROUPS, RULES, TREES, MethodPart
from saccade.options import Option


def add_head(name: str, parts: HeadKind) -> None:
    """Add a kind of head, and the method that drafts with it.

    Raises:
        MethodError: there is a method or a drafter of the name.
    """
    taken = {*METHODS, *CHOICES["drafter"]["draft_with"].choices}
    is_new = name not in taken or HEAD_KINDS.get(name) == parts
    _add_choice("drafter", "draft_with", name, is_new)
    HEAD_KINDS[name] = parts
    METHODS[name] = of_head(name, parts)


def add_tree(name: str, policy: type[Any]) -> None:
    """Add a tree policy, ``tree=name``, a class as of `saccade.draft.trees.policy.TreePolicy`.

    The fields of a dataclass are its options: whole numbers, numbers, words or truths, with defaults.

    Raises:
        MethodError: there is a tree policy of the name, or the class has no `open`.
    """
    _add("tree", name, policy, TREES)


def add_rule(name: str, rule: type[Any]) -> None:
    """Add an acceptance rule, ``rule=name``, a class as of `saccade.verify.rule.Rule`; options as of `add_tree`.

    It counts as LOSSY unless the class says ``lossless = True``. A field ``special_ids`` gets the tokens that are never
    to be accepted loosely.

    Raises:
        MethodError: there is a rule of the name, or the class has no `open`.
    """
    _add("rule", name, rule, RULES)


def _add(choice: str, name: str, added: type[Any], known: dict[str, MethodPart]) -> None:
    if not callable(getattr(added, "open", None)):
        raise MethodError(f"{choice}={name} must be a class with a method `open`, not {added!r}.")
    options = _options_of(added)
    _add_choice(choice, choice, name, is_new=name not in known or known[name].maker is added)
    known[name] = MethodPart(added, added.__doc__ or "", options, getattr(added, "lossless", False))
    GROUPS[f"{choice}={name}"] = options


def _add_choice(group: str, option: str, name: str, is_new: bool) -> None:
    known = CHOICES[group][option]
    if not is_new:
        raise MethodError(f"There is {option}={name} already; choose another name.")
    choices = dict.fromkeys([*known.choices, name])
    CHOICES[group][option] = replace(known, choices=tuple(choices))


def _options_of(added: type[Any]) -> dict[str, Option]:
    """Options of a class by name."""
    found: dict[str, Option] = {}
    for entry in fields(added) if is_dataclass(added) else ():
        if entry.name == "special_ids" or not entry.init:
            continue
        if entry.default is MISSING or not isinstance(entry.default, (bool, int, float, str)):
            raise MethodError(
                f"{added.__name__}.{entry.name} must have a number, a word or a truth as its default, "
                "since it is an option."
            )
        option = Option(entry.default, f"of {added.__name__}")
        found[entry.name] = entry.metadata.get("option", option)
    return found
