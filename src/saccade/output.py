"""Results of a generation: tokens with marks, text, finish reason, counts and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "interrupted", "cancelled", "error"]
Mark = Literal["target", "draft", "loose", "shifted"]
"""Origin of a token: the target (first token, correction or bonus), or drafted and accepted; lossy rules also accept
draft tokens loosely, by their meaning or because the target's token is nearby (shifted)."""
DRAFTED: tuple[Mark, ...] = ("draft", "loose", "shifted")
"""Marks of drafted tokens, in the order of the codes of `saccade.verify.rule`."""


@dataclass(slots=True)
class Times:
    """Wall-clock seconds of a run; rows of one batch share them."""

    vision: float = 0.0  # the target's vision tower and projector
    prefill: float = 0.0  # the target's prefill without vision
    caption: float = 0.0  # captions for a drafter that reads images as words
    draft_prefill: float = 0.0  # the drafter's prefill
    draft: float = 0.0  # proposing trees
    verify: float = 0.0  # the target's forwards over draft trees, rule included
    total: float = 0.0  # from the first prompt token to the last emitted one

    @property
    def rest(self) -> float:
        """Seconds outside of the named stages."""
        return self.decode - self.draft - self.verify

    @property
    def decode(self) -> float:
        """Seconds after prefill."""
        return self.total - self.vision - self.prefill - self.caption - self.draft_prefill


@dataclass(slots=True)
class Stats:
    """Counts of one row.

    >>> stats = saccade.load("pocket", method="plain").generate("Hello", max_new_tokens=5).stats
    >>> stats.new_tokens, stats.target_passes, stats.block_efficiency
    (5, 4, 1.0)
    """

    prompt_tokens: int = 0  # of the target's prompt
    reused_tokens: int = 0  # of them, taken from an earlier turn's KV cache
    new_tokens: int = 0  # emitted, those of prefill included
    # of them, emitted by the pass that ended the prompt: the first one, and accepted draft tokens verified in that pass
    prefill_tokens: int = 0
    target_passes: int = 0  # verification passes, prefill not counted
    drafted_tokens: int = 0  # nodes that were verified
    draft_passes: int = 0  # passes that verified some, prefill's included
    accepted_tokens: int = 0  # drafted tokens that were emitted
    loosened_tokens: int = 0  # of them, those that a lossy rule accepted against the target's own token
    accepted_prediction_tokens: int = 0  # of the request's prediction: drafted from it and emitted
    rejected_prediction_tokens: int = 0  # drafted from it and verified, but not emitted
    # entry a counts the passes with a accepted draft tokens, including those after the token or text that ends the
    # output, which `block_efficiency` excludes
    accepted_histogram: list[int] = field(default_factory=list)
    queue_seconds: float = 0.0  # from the submission to the admission
    first_token_seconds: float = 0.0  # from the submission to the first token; 0 before it
    times: Times = field(default_factory=Times)  # of the run

    @property
    def accepted_length(self) -> float:
        """Block efficiency without the target's own token of each pass (LVSpec's and SAGE's tau)."""
        return self.block_efficiency - 1 if self.target_passes else 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per verification pass, the target's own included (TABED's, HiViS's and DREAM's tau).

        Prefill tokens are excluded; 0 without passes.
        """
        return self.decoded_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def decoded_tokens(self) -> int:
        """Tokens emitted after prefill."""
        return max(self.new_tokens - self.prefill_tokens, 0)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d - 1: of the passes that accepted depth d - 1, the share that accepted depth d too."""
        reached = [sum(self.accepted_histogram[d:]) for d in range(len(self.accepted_histogram))]
        return [reached[d] / reached[d - 1] for d in range(1, len(reached)) if reached[d - 1]]

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        names = [n for n in Stats.__slots__ if n != "times"]
        seconds = [*Times.__slots__, "rest", "decode"]
        return {
            **{n: getattr(self, n) for n in names},
            "accepted_length": self.accepted_length,
            "block_efficiency": self.block_efficiency,
            "acceptance_by_depth": self.acceptance_by_depth,
            "seconds": {n: round(getattr(self.times, n), 6) for n in seconds},
        }


@dataclass(slots=True)
class Output:
    """One row's answer.

    >>> output = saccade.load("pocket").generate("Hello", max_new_tokens=5)
    >>> len(output.tokens), output.marks[0], output.finish_reason, output.lossless
    (5, 'target', 'length', True)
    """

    tokens: list[int] = field(default_factory=list)  # emitted ids, an end-of-sequence token included
    marks: list[Mark] = field(default_factory=list)  # one per token
    text: str = ""  # decoded without special tokens; empty without a tokenizer
    finish_reason: FinishReason = "interrupted"  # `stop`: a stop string or stopping criterion
    lossless: bool = True  # whether the method guarantees the target's own output (distribution)
    stats: Stats = field(default_factory=Stats)  # counts and times

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        names = ("text", "finish_reason", "lossless", "tokens", "marks")
        return {**{name: getattr(self, name) for name in names}, "stats": self.stats.as_dict()}


@dataclass(frozen=True, slots=True)
class TreeTrace:
    """One row's verified draft tree of one step; node 0 is the root."""

    tokens: tuple[int, ...]  # per node
    parents: tuple[int, ...]  # per node; the root's is 0
    path: tuple[int, ...]  # accepted nodes, the root first
    # numbers that shaped it, by name: `weights` of an ensemble's views, `confidence` of SAGE
    signals: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TicketChunk:
    """The tokens of one step of one row."""

    tokens: tuple[int, ...]
    marks: tuple[Mark, ...]  # origin of each token
    finished: bool  # whether the answer has ended
    tree: TreeTrace | None = None  # the verified tree, where the batch traces
    text: str = ""  # completed characters; empty in the engine, which knows no tokenizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one step of all rows."""

    text: str  # completed characters of the first row; empty in the engine, which knows no tokenizer
    tokens: tuple[tuple[int, ...], ...]  # per row; empty for a row that had finished
    marks: tuple[tuple[Mark, ...], ...]  # per row, the origin of each token
    trees: tuple[TreeTrace | None, ...] = ()  # per row, the verified tree, None for a finished one; empty unless traced
    finished: tuple[bool, ...] = ()  # per row, True from the step on in which it ended
