"""One row: its request, its options, and its output, which ends exactly where plain decoding ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from saccade.engine.costs import Trials
from saccade.engine.generation import RowPlan
from saccade.inputs.prompt import Prompt
from saccade.output import FinishReason, Mark, Output, Stats, Times, TreeTrace
from saccade.verify.rule import RowProcessing


@dataclass(frozen=True, slots=True)
class Request:
    """Request of one row."""

    prompt: Prompt  # the target's prompt
    draft_prompt: Prompt | None = None  # the drafter's; the target's prompt when None
    seed: int = 0  # of the row's random generator, when sampling
    salt: str = ""  # what caches hold is reused by requests of the same salt alone; see `salted`

    def salted(self, salt: str) -> Request:
        """The same request with a salt, which keeps its prefixes and the features of its media apart."""
        draft_prompt = self.draft_prompt and self.draft_prompt.salted(salt)
        return replace(self, prompt=self.prompt.salted(salt), draft_prompt=draft_prompt, salt=salt)

    @property
    def drafter_prompt(self) -> Prompt:
        """The drafter's prompt."""
        return self.draft_prompt or self.prompt


@dataclass(frozen=True, slots=True)
class RowStep:
    """Tokens that one step added to a row."""

    tokens: tuple[int, ...]
    marks: tuple[Mark, ...]
    finished: bool  # whether the row has ended
    tree: TreeTrace | None = None  # the verified tree, where traced


class Row:
    """A row from its request to its end."""

    def __init__(self, request: Request, plan: RowPlan, do_sample: bool, device: torch.device) -> None:
        self.request, self.plan, self.do_sample = request, plan, do_sample
        self.ids = list(request.prompt.ids)  # prompt and emitted tokens; the last one is the root of the next tree
        self.output: list[int] = []  # emitted tokens
        self.marks: list[Mark] = []  # origin of each
        self.stats = Stats(prompt_tokens=len(self.ids))  # counts so far
        self.error: BaseException | None = None  # cause of the row's failure; None without one
        self.slot: int | None = None  # of the batch's caches; None before admission and after the row's end
        self.steps: list[RowStep] = []  # unread steps, oldest first; readers remove them
        self.processing = RowProcessing(plan.processors, plan.eos)
        self.generator = torch.Generator().manual_seed(request.seed)  # random generator, on the host
        self.drafter_prefilled = False  # whether the drafter has cached its prompt ahead of the target
        self.drafter_begun = False  # whether it has cached a part of it
        self.drafter_seconds = 0.0  # that this took
        self.drafter_lacks_end = False  # whether the drafter has cached its prompt without the last token
        self.drafts: bool | None = None  # whether the drafter drafts for the row at all; None until that is decided
        self.trials = Trials()  # acceptance of the row's draft tokens, where a pacer chooses their number
        self._device = device
        self._reason: FinishReason | None = None
        self._num_proposed = 0
        self.submitted = time.perf_counter()
        self._begun = self._ended = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def done(self) -> bool:
        """Whether the row has ended, for any reason."""
        return self._reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted; 0 once the row has ended."""
        return 0 if self.done else self.plan.max_new_tokens - len(self.output)

    @property
    def max_entries(self) -> int:
        """Upper bound of the cache entries of prompt and answer."""
        return len(self.request.prompt) + self.plan.max_new_tokens

    def begin(self, slot: int) -> None:
        """Record the row's admission."""
        self.slot = slot
        self._begun = time.perf_counter()

    def pop_new_tokens(self) -> list[int]:
        """Return the tokens that the drafter lacks: emitted since the last call, behind the prompt's last one."""
        new, self._num_proposed = self.output[self._num_proposed :], len(self.output)
        if self.drafter_lacks_end:
            self.drafter_lacks_end = False
            return [self.request.prompt.ids[-1], *new]
        return new

    def record_pass(self, accepted: int) -> None:
        """Record one verification pass after prefill."""
        stats = self.stats
        stats.target_passes += 1
        histogram = stats.accepted_histogram
        histogram.extend([0] * (accepted + 1 - len(histogram)))
        histogram[accepted] += 1

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add stage times of a step in which the row took part."""
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def emit(self, tokens: Sequence[int], marks: Sequence[Mark]) -> list[int]:
        """Append tokens with their marks up to the row's end; return those that plain decoding would emit."""
        emitted: list[int] = []
        if not self.output:
            self.stats.first_token_seconds = time.perf_counter() - self.submitted
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
        """Record the row's end."""
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
        """Return the output so far."""
        now = self._ended or time.perf_counter()
        begun = self._begun or now
        self.stats.queue_seconds = begun - self.submitted
        self.stats.times = Times(**self._seconds, total=now - begun)
        return Output(
            tokens=self.output,
            marks=self.marks,
            finish_reason=self._reason or "interrupted",
            lossless=lossless,
            stats=self.stats,
        )
