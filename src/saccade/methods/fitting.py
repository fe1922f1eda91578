"""The one check of a method against the draft model and the trained heads that are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import MethodError

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
