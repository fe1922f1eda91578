"""One row's output as it grows, cut exactly where plain decoding would end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.generation import RowPlan
from saccade.output import FinishReason, Mark, Output, Stats, Times


class Row:
    """A row under way.

    Args:
        device: where stopping criteria are given the ids; `generate` gives them where the model is.

    Attributes:
        ids: prompt and emitted tokens; the last one is the root of the next tree.
        output: emitted tokens.
        marks: how each came to be.
        stats: counts so far.
    """

    def __init__(self, ids: list[int], plan: RowPlan, device: torch.device) -> None:
        self.ids = ids
        self.output: list[int] = []
        self.marks: list[Mark] = []
        self.stats = Stats(prompt_tokens=len(ids))
        self._plan = plan
        self._device = device
        self._reason: FinishReason | None = None
        self._taken = 0

    @property
    def done(self) -> bool:
        """Whether the row has ended."""
        return self._reason is not None

    @property
    def room(self) -> int:
        """How many tokens may still come; 0 once the row has ended."""
        return 0 if self.done else self._plan.max_new_tokens - len(self.output)

    def take_new(self) -> list[int]:
        """Tokens emitted since the last call; none once the row has ended."""
        if self.done:
            return []
        new, self._taken = self.output[self._taken :], len(self.output)
        return new

    def count_pass(self, accepted: int, drafted: int) -> None:
        """Note one verification pass."""
        stats = self.stats
        stats.target_passes += 1
        stats.drafted_tokens += drafted
        histogram = stats.accepted_histogram
        histogram.extend([0] * (accepted + 1 - len(histogram)))
        histogram[accepted] += 1

    def emit(self, tokens: Sequence[int], marks: Sequence[Mark]) -> list[int]:
        """Take in a block with one mark per token; returns what plain decoding would emit of it."""
        emitted: list[int] = []
        for token, mark in zip(tokens, marks, strict=True):
            self.ids.append(token)
            self.output.append(token)
            self.marks.append(mark)
            emitted.append(token)
            self.stats.accepted_tokens += mark != "target"
            self.stats.loosened_tokens += mark in ("loose", "shifted")
            self._reason = self._ending(token)
            if self._reason is not None:
                break
        self.stats.new_tokens = len(self.output)
        return emitted

    def _ending(self, token: int) -> FinishReason | None:
        plan = self._plan
        if token in plan.eos:
            return "eos"
        if plan.criteria:
            ids = torch.tensor([self.ids], device=self._device)
            if any(bool(torch.as_tensor(c(ids, None)).any()) for c in plan.criteria):
                return "stop"
        return "length" if len(self.output) >= plan.max_new_tokens else None

    def finish(self, seconds: dict[str, float], total: float, lossless: bool = True) -> Output:
        """The output so far."""
        self.stats.times = Times(**seconds, total=total)
        return Output(
            tokens=self.output,
            marks=self.marks,
            finish_reason=self._reason or "interrupted",
            lossless=lossless,
            stats=self.stats,
        )
