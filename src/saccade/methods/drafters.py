"""Drafters of a VLM by name: draft model, trained heads, and the built-in pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from saccade import methods
from saccade.draft.heads.head import Head
from saccade.draft.heads.store import kind_at, kind_in, load_head
from saccade.errors import MethodError
from saccade.loading import check_dtype, name_of, path_of
from saccade.methods.settings import HEAD_KINDS
from saccade.target.adapter import Target

POCKET = "pocket"


def is_pocket(given: Any) -> bool:
    """Whether a name is the built-in one; a folder that is called like it is a folder."""
    return isinstance(given, str) and given == POCKET and not Path(given).is_dir()


def with_builtin(
    target: Any,
    drafter: Any,
    method: str | None,
    options: Mapping[str, Any],
    heads: Mapping[str, AnyHead],
) -> tuple[Any, Any, dict[str, AnyHead]]:
    """Target, drafter and heads with folders in place of `pocket`, and with what comes beside the built-in target.

    With a method that is what the method needs; without one it is the draft model and every shipped head, so that
    all of them can be chosen from. What the user gives is never replaced: a shipped head stays away where one of its
    name or of its kind is given, and comes with a method only when no drafter and no head is given.

    Args:
        options: of the method, as given.
        heads: all that the user gives, by name; see `named`.

    Raises:
        MethodError: unknown method or option.
        ModelError: the head that the method needs is not shipped, or a folder that is given holds no head.
    """
    from saccade.pocket import draft_path, head_path, head_paths, target_path

    found = dict(heads)
    if is_pocket(target):
        target = str(target_path())
        values = None if method is None else methods.options(method, options)
        needs = None if values is None else methods.needs(values)
        if values is None:
            taken = {*heads, *kinds_of(heads).values()}
            found |= {kind: folder for kind, folder in head_paths().items() if kind not in taken}
        elif needs == "head" and drafter is None and not heads:
            found[values["draft_with"]] = head_path(values["draft_with"])
        if drafter is None and needs in (None, "draft model"):
            drafter = POCKET
    return target, str(draft_path()) if is_pocket(drafter) else drafter, found


AnyHead = str | Path | Head
"""A loaded head, or its folder or hub id."""
Heads = AnyHead | Sequence[AnyHead] | Mapping[str, AnyHead]


def is_head(drafter: Any) -> bool:
    """Whether it is a head, or the folder of one."""
    return isinstance(drafter, Head) or kind_in(drafter) is not None


def named(drafter: Any, heads: Heads) -> dict[str, AnyHead]:
    """All heads by name: a drafter that is one goes by its kind, a folder by its own name unless it was given another.

    Raises:
        ModelError: a folder holds no head.
        MethodError: two heads have the same name.
    """
    found: dict[str, AnyHead] = {}
    if is_head(drafter):
        found[kind_of(drafter)] = drafter
    if isinstance(heads, Mapping):
        given = list(heads.items())
    else:
        several = [heads] if isinstance(heads, (str, Path, Head)) else heads
        given = [(_own_name(head), head) for head in several]
    for name, head in given:
        if name in found:
            raise MethodError(
                f"Two heads are called {name!r}; give one of them another name with heads={{NAME: FOLDER}} "
                "(--head NAME=FOLDER on the command line)."
            )
        found[name] = head
    return found


def kind_of(head: AnyHead) -> str:
    """The kind of a head, or of the one in a folder.

    Raises:
        ModelError: the folder holds no head.
    """
    return head.kind if isinstance(head, Head) else kind_at(path_of(head))


def kinds_of(heads: Mapping[str, AnyHead]) -> dict[str, str]:
    """Name -> kind."""
    return {name: kind_of(head) for name, head in heads.items()}


def read_heads(
    heads: Mapping[str, AnyHead], target: Target, dtype: str | torch.dtype | None
) -> dict[str, Head]:
    """All heads by name, every folder read once.

    Args:
        dtype: of heads that are read; see `load_head`.
    """
    found, read = check_dtype(dtype or "auto"), dict[str, Head]()
    kind = found if isinstance(found, torch.dtype) else None
    loaded: dict[str, Head] = {}
    for name, head in heads.items():
        if isinstance(head, Head):
            loaded[name] = head
            continue
        path = path_of(head)
        folder = str(Path(path).resolve()) if Path(path).exists() else path
        if folder not in read:
            read[folder] = load_head(folder, target, kind)
        loaded[name] = read[folder]
    return loaded


def choose(method: str, drafts: str | None, kinds: Mapping[str, str], name: str | None = None) -> str | None:
    """Which head a method drafts with: the named one, or that of its kind.

    Of several of its kind it is the one that is called like the kind.

    Args:
        drafts: what the method drafts with (its option ``draft_with``).
        kinds: name -> kind of every head that there is.
        name: of the head that is wanted.

    Returns:
        Its name; None for a method that needs no head.

    Raises:
        MethodError: there is none, it is of another kind, or it is not clear which one is meant.
    """
    if drafts not in HEAD_KINDS:
        if name is not None:
            raise MethodError(f"Method {method} takes no head; leave out head={name}.")
        return None
    there = ", ".join(n if n == k else f"{n} ({k})" for n, k in kinds.items())
    if name is not None and name not in kinds:
        raise MethodError(
            f"There is no head called {name!r} (there: {there or 'none'}); give its folder with "
            f"heads={{{name!r}: FOLDER}} (--head {name}=FOLDER on the command line)."
        )
    if name is not None and kinds[name] != drafts:
        raise MethodError(
            f"The head {name} is of the kind {kinds[name]}, which method {method} cannot use; choose method "
            f"{kinds[name]}, or another head."
        )
    if name is not None:
        return name
    fitting = [n for n, kind in kinds.items() if kind == drafts]
    if not kinds:
        raise MethodError(
            f"Method {method} needs a trained head; give its folder with drafter=..., or with heads=... beside a draft "
            "model (--drafter, --head on the command line)."
        )
    if not fitting:
        raise MethodError(
            f"Method {method} needs a trained {drafts} head, but there is none (there: {there}); choose another "
            "method, or give the folder of one."
        )
    if len(fitting) > 1 and drafts not in fitting:
        raise MethodError(
            f"There are several {drafts} heads ({', '.join(fitting)}); say which one with head=NAME, or call one of "
            f"them {drafts}."
        )
    return drafts if drafts in fitting else fitting[0]


def default_method(drafter: Any, kinds: Mapping[str, str], head: str | None = None) -> str:
    """The method for a user who names none: that of the head, if there is one and no draft model."""
    if head is not None and head in kinds:
        return kinds[head]
    if is_head(drafter):
        return kind_of(drafter)
    if drafter is None and kinds:
        return next(iter(kinds.values()))
    return methods.default(drafter is not None)


def check(
    method: str, values: Mapping[str, Any], drafter: Any, kinds: Mapping[str, str], head: str | None = None
) -> None:
    """Raise `MethodError` unless what was given is what a method needs with these options (see `methods.options`)."""
    needs = methods.needs(values)
    headed = is_head(drafter)
    if drafter is not None and needs == "nothing":
        raise MethodError(f"Method {method} takes no drafter; leave it out or choose another method.")
    if drafter is None and needs == "draft model":
        raise MethodError(
            f"Method {method} needs a drafter; give one with drafter=... (--drafter on the command line)."
        )
    if headed and needs == "draft model":
        kind = kind_of(drafter)
        raise MethodError(
            f"The drafter {name_of(drafter)} is a trained {kind} head, which method {method} cannot use; choose "
            f"method {kind}, or another drafter."
        )
    if drafter is not None and needs == "head" and not kinds:
        raise MethodError(
            f"Method {method} needs a trained head, which {name_of(drafter)} is not; give the folder of one, or choose "
            "another method."
        )
    choose(method, values.get("draft_with"), kinds, head)


def _own_name(head: AnyHead) -> str:
    return head.kind if isinstance(head, Head) else Path(path_of(head)).resolve().name
