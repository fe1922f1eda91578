"""Comparison of a lossless method's tokens with plain decoding's, and the first difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from saccade.bench.records import Record
from saccade.errors import SaccadeError
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context


class Mismatch(SaccadeError):
    """A lossless method differs from plain decoding in float32 or exact mode."""


def first_difference(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    """Position of the first token that differs, the end of the shorter answer included; None when equal."""
    shared = min(len(ours), len(plain))
    found = next((i for i in range(shared) if ours[i] != plain[i]), None)
    return found if found is not None or len(ours) == len(plain) else shared


def compare_with_plain(record: Record, plain: Sequence[int], target: Target, prompt: Callable[[], Prompt]) -> Record:
    """Complete a record with its comparison with plain decoding."""
    position = first_difference(record.tokens, plain)
    if position is None:
        return replace(record, equal=True)
    ours = record.tokens[position] if position < len(record.tokens) else None
    theirs = plain[position] if position < len(plain) else None
    given = prompt()
    logits = logits_after(target, Prompt((*given.ids, *plain[:position]), given.media))
    difference: dict[str, Any] = {
        "position": position,
        "ours": ours,
        "plain": theirs,
        "logits": {
            name: None if token is None else float(logits[token]) for name, token in (("ours", ours), ("plain", theirs))
        },
    }
    return replace(record, equal=False, difference=difference)


def require_equal(record: Record) -> None:
    """Raise `Mismatch` when the record differs from plain decoding."""
    if record.equal is False:
        found = record.difference or {}
        raise Mismatch(
            f"Method {record.method} is lossless but differs from plain decoding on {record.prompt_id} (repeat "
            f"{record.repeat}) at token {found.get('position')}: {found.get('ours')} instead of {found.get('plain')}, "
            f"logits {found.get('logits')}; in float32 and in exact mode that is a bug in the method or its drafter's "
            "cache."
        )


def logits_after(target: Target, prompt: Prompt) -> torch.Tensor:
    """Return the target's logits `[V]` after a prompt, from a separate prefill."""
    logits = Context(target, 1).load(0, prompt).logits
    assert logits is not None
    return logits.float().cpu()
