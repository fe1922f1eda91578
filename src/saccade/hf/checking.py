"""Which methods draft inside `generate` with what was given."""

from __future__ import annotations

from saccade import methods
from saccade.errors import MethodError

REWRITING = ("spd", "tabed")
"""Methods that make the draft model's prompt anew, which takes its processor; `generate` has none."""


def check(method: str, has_model: bool, kind: str | None) -> None:
    """Raise `MethodError` unless a method can draft with what was given.

    Args:
        has_model: whether there is a draft model.
        kind: of the trained head; None without one.
    """
    needs = methods.get(method).needs
    if method in REWRITING:
        raise MethodError(
            f"Method {method} makes the draft model's prompt anew with its processor, which `generate` is not given; "
            "use saccade.load(), or choose another method."
        )
    if needs == "nothing" and (has_model or kind):
        raise MethodError(f"Method {method} takes no drafter; leave it out or choose another method.")
    if kind and kind != method:
        raise MethodError(
            f"The drafter is a trained {kind} head, which method {method} cannot use; choose method {kind}, or give "
            "another drafter."
        )
    if needs == "head" and not kind:
        raise MethodError(
            f"Method {method} needs a trained {method} head; give it, or its folder, as drafter."
        )
    if needs == "draft model" and not has_model:
        raise MethodError(
            f"Method {method} needs a draft model; give a loaded one as drafter (or use prompt-lookup, which needs "
            "none)."
        )
