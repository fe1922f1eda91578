"""One row under way: its request, its options, its output cut exactly where plain decoding would end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.engine.generation import RowPlan
from saccade.inputs.prompt import Prompt
from saccade.output import FinishReason, Mark, Output, Stats, Times, TreeTrace
from saccade.verify.processing import RowProcessing


@dataclass(frozen=True, slots=True)
class Request:
    """One row to generate.

    Attributes:
        prompt: for the target.
        draft_prompt: the same question as the drafter sees it; the target's prompt when None.
        seed: of this row's random generator, when sampling.
    """

    prompt: Prompt
    draft_prompt: Prompt | None = None
    seed: int = 0

    @property
    def drafted(self) -> Prompt:
        """The prompt that the drafter reads."""
        return self.draft_prompt or self.prompt


@dataclass(frozen=True, slots=True)
class RowStep:
    """Tokens that one step added to a row.

    Attributes:
        tokens, marks: alike long; empty only for a row that failed or was cancelled.
        finished: whether the row has ended.
        tree: the tree that was verified, where it is traced.
    """

    tokens: tuple[int, ...]
    marks: tuple[Mark, ...]
    finished: bool
    tree: TreeTrace | None = None


class Row:
    """A row from its request to its end.

    Args:
        device: where stopping criteria are given the ids; `generate` gives them where the model is.

    Attributes:
        request, plan, do_sample: as asked.
        ids: prompt and emitted tokens; the last one is the root of the next tree.
        output: emitted tokens.
        marks: how each came to be.
        stats: counts so far.
        error: why the row failed; None while it has not.
        slot: of the batch's caches; None before it is admitted and after it has ended.
        steps: what the steps gave, oldest first; whoever reads takes them out.
        generator: of its random numbers, on the host.
        drafter_prefilled: whether the drafter has read its prompt ahead of the target.
    """

    def __init__(self, request: Request, plan: RowPlan, do_sample: bool, device: torch.device) -> None:
        self.request, self.plan, self.do_sample = request, plan, do_sample
        self.ids = list(request.prompt.ids)
        self.output: list[int] = []
        self.marks: list[Mark] = []
        self.stats = Stats(prompt_tokens=len(self.ids))
        self.error: BaseException | None = None
        self.slot: int | None = None
        self.steps: list[RowStep] = []
        self.processing = RowProcessing(plan.processors, plan.eos)
        self.generator = torch.Generator().manual_seed(request.seed)
        self.drafter_prefilled = False
        self._device = device
        self._reason: FinishReason | None = None
        self._taken = 0
        self._asked = time.perf_counter()
        self._begun = self._ended = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def done(self) -> bool:
        """Whether the row has ended, in whatever way."""
        return self._reason is not None

    @property
    def room(self) -> int:
        """How many tokens may still come; 0 once the row has ended."""
        return 0 if self.done else self.plan.max_new_tokens - len(self.output)

    @property
    def entries(self) -> int:
        """Cache entries that prompt and answer may take."""
        return len(self.request.prompt) + self.plan.max_new_tokens

    def begin(self, slot: int) -> None:
        """Note that the row has been admitted."""
        self.slot = slot
        self._begun = time.perf_counter()

    def pop_new_tokens(self) -> list[int]:
        """Tokens emitted since the last call; the prompt's last one where the first tree is guessed before any."""
        new, self._taken = self.output[self._taken :], len(self.output)
        return new or self.ids[-1:]

    def record_pass(self, accepted: int) -> None:
        """Note one verification pass behind prefill."""
        stats = self.stats
        stats.target_passes += 1
        histogram = stats.accepted_histogram
        histogram.extend([0] * (accepted + 1 - len(histogram)))
        histogram[accepted] += 1

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Count stages of a step that the row took part in."""
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def emit(self, tokens: Sequence[int], marks: Sequence[Mark]) -> list[int]:
        """Take in a block with one mark per token; returns what plain decoding would emit of it."""
        emitted: list[int] = []
        if not self.output:
            self.stats.first_token_seconds = time.perf_counter() - self._asked
        for token, mark in zip(tokens, marks, strict=True):
            self.ids.append(token)
            self.output.append(token)
            self.marks.append(mark)
            emitted.append(token)
            self.stats.accepted_tokens += mark != "target"
            self.stats.loosened_tokens += mark in ("loose", "shifted")
            reason = self._ending(token)
            if reason is not None:
                self.end(reason)
                break
        self.stats.new_tokens = len(self.output)
        return emitted

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Note the row's end."""
        self._reason, self.error = reason, error
        self._ended = time.perf_counter()

    def _ending(self, token: int) -> FinishReason | None:
        plan = self.plan
        if token in plan.eos:
            return "eos"
        if plan.criteria:
            ids = torch.tensor([self.ids], device=self._device)
            scores: Any = None
            if any(bool(torch.as_tensor(c(ids, scores)).any()) for c in plan.criteria):
                return "stop"
        return "length" if len(self.output) >= plan.max_new_tokens else None

    def finish(self, lossless: bool = True) -> Output:
        """The output so far."""
        now = self._ended or time.perf_counter()
        begun = self._begun or now
        self.stats.queue_seconds = begun - self._asked
        self.stats.times = Times(**self._seconds, total=now - begun)
        return Output(
            tokens=self.output,
            marks=self.marks,
            finish_reason=self._reason or "interrupted",
            lossless=lossless,
            stats=self.stats,
        )
