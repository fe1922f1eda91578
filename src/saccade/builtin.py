"""The built-in models by name: what `pocket` stands for when models are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade import drafters, methods
from saccade.drafters import AnyHead

NAME = "pocket"


def is_meant(given: Any) -> bool:
    """Whether a name is the built-in one; a folder that is called like it is a folder."""
    return isinstance(given, str) and given == NAME and not Path(given).is_dir()


def resolved(
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
        heads: all that the user gives, by name; see `drafters.named`.

    Raises:
        MethodError: unknown method or option.
        ModelError: the head that the method needs is not shipped, or a folder that is given holds no head.
    """
    from saccade.pocket.folders import draft_path, head_path, head_paths, target_path

    found = dict(heads)
    if is_meant(target):
        target = str(target_path())
        values = None if method is None else methods.options(method, options)
        needs = None if values is None else methods.needs(values)
        if values is None:
            taken = {*heads, *drafters.kinds_of(heads).values()}
            found |= {kind: folder for kind, folder in head_paths().items() if kind not in taken}
        elif needs == "head" and drafter is None and not heads:
            found[values["draft_with"]] = head_path(values["draft_with"])
        if drafter is None and needs in (None, "draft model"):
            drafter = NAME
    return target, str(draft_path()) if is_meant(drafter) else drafter, found
