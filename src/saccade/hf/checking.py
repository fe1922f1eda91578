"""Which methods draft inside `generate` with what was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade import methods
from saccade.errors import MethodError


def check(method: str, values: Mapping[str, Any], has_model: bool, kind: str | None) -> None:
    """Raise `MethodError` unless a method can draft with what was given.

    Args:
        values: its options, as `methods.options` resolves them.
        has_model: whether there is a draft model.
        kind: of the trained head; None without one.
    """
    needs, drafts = methods.needs(values), values.get("draft_with")
    if values.get("views"):
        raise MethodError(
            f"Method {method} makes the draft model's prompt anew with its processor, which `generate` is not given; "
            "use saccade.load(), or choose another method."
        )
    if needs == "nothing" and (has_model or kind):
        raise MethodError(f"Method {method} takes no drafter; leave it out or choose another method.")
    if kind and kind != drafts:
        raise MethodError(
            f"The drafter is a trained {kind} head, which method {method} cannot use; choose method {kind}, or give "
            "another drafter."
        )
    if needs == "head" and not kind:
        raise MethodError(
            f"Method {method} needs a trained {drafts} head; give it, or its folder, as drafter."
        )
    if needs == "draft model" and not has_model:
        raise MethodError(
            f"Method {method} needs a draft model; give a loaded one as drafter (or use prompt-lookup, which needs "
            "none)."
        )
