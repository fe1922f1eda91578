"""Lines below an answer: its tokens, its drafts, and the time they saved over plain decoding, which is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from saccade.cli import screen
from saccade.errors import SaccadeError
from saccade.output import Output, Stats, Times
from saccade.wording import count

if TYPE_CHECKING:
    from saccade.vlm import VLM

PASSES, CONTEXT = 7, 64
"""Passes of plain decoding that are timed, and tokens of an answer that they continue."""


def plain_pass(vlm: VLM, options: dict[str, Any], output: Output) -> float | None:
    """Time plain decoding after a shown answer; return a pass's seconds, None without drafts and after Ctrl-C."""
    from saccade.inputs.families.family import Prompt

    if not output.stats.drafted_tokens or output.finish_reason == "interrupted":
        return None
    tokens = {"max_new_tokens": PASSES + 1, "min_new_tokens": PASSES + 1, "stop_strings": None}
    ends = list[float]()
    with suppress(KeyboardInterrupt, SaccadeError), screen.waiting("Timing plain decoding"):
        for _ in vlm.using("plain").stream(Prompt(tuple(output.tokens[-CONTEXT:])), **{**options, **tokens}):
            ends.append(time.perf_counter())
    return median(end - start for start, end in pairwise(ends)) if len(ends) > PASSES else None


def account(outputs: Sequence[Output], method: str, plain: float | None) -> str:
    """Return a line about one or several answers, and one about their drafts; ``plain``: seconds of a plain pass."""
    each, empty = [output.stats for output in outputs], Stats()
    names = [name for name in Stats.__slots__ if isinstance(getattr(empty, name), int)]
    times = Times(*(sum(getattr(stats.times, name) for stats in each) for name in Times.__slots__))
    total = Stats(**{name: sum(getattr(stats, name) for stats in each) for name in names}, times=times)
    parts = [f"{count(total.new_tokens, 'token')} in {times.total:.2f} s"]
    if total.reused_tokens:
        parts.append(f"{total.reused_tokens} of {total.prompt_tokens} prompt tokens reused")
    if total.target_passes and times.decode > 0:
        parts.append(f"{total.decoded_tokens / times.decode:.0f} tokens/s after prefill")
    parts.append(f"method {method}" + ("" if all(output.lossless for output in outputs) else " (lossy)"))
    parts.append(screen.ENDS[outputs[0].finish_reason] if len(outputs) == 1 else f"{len(outputs)} answers")
    if total.drafted_tokens:
        share, drafted = total.accepted_tokens / total.drafted_tokens, count(total.drafted_tokens, "draft token")
        parts[-1] += f"\n{total.accepted_tokens} of {drafted} accepted ({share:.0%})"
        if total.loosened_tokens:
            parts[-1] += f", {total.loosened_tokens} of them loosely"
        copied = total.accepted_prediction_tokens
        if verified := copied + total.rejected_prediction_tokens:
            parts.append(f"{copied} of {count(verified, 'token')} copied from the prediction accepted")
        if total.target_passes:
            parts.append(f"{total.block_efficiency:.1f} tokens per pass of the target")
    if total.drafted_tokens and plain is not None:
        ours = times.decode + times.draft_prefill + times.caption
        theirs = plain * (total.new_tokens - len(outputs))  # the first token of each comes with prefill
        words = f"about {abs(theirs - ours):.2f} s {'saved' if theirs >= ours else 'lost'}"
        parts.append(f"{words}, {theirs / ours:.1f} times plain decoding's speed ({PASSES} passes of it timed)")
    return " · ".join(parts)
