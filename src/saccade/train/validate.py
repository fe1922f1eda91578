"""Block efficiency of a drafter, measured by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from saccade.draft.drafter import Drafter
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.loading import draft_dtype
from saccade.target_model.adapter import Target

Measure = Callable[[Any], float]
"""A drafter's module -> its block efficiency; the best of a run is the one with the largest."""


class EngineMeasure:
    """Block efficiency over greedy answers to held-out prompts."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        rows: int = 4,  # answered at once
        drafter: Callable[[Any], Drafter] | None = None,  # of a module; by default that of a head
        draft: Target | None = None,  # a model in whose context prompts and answers must fit, too
        ahead: int = 0,  # tokens beyond an answer that it may draft
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self._length, self._rows = target, max_new_tokens, rows
        self._drafter = drafter or self._of_head
        contexts = [m.traits.limits.context for m in (target, draft) if m is not None]
        self.prompts = fitting(prompts, max_new_tokens + ahead, [c for c in contexts if c is not None], say)

    def __call__(self, module: Any) -> float:
        """Return tokens per target forward over all prompts; the module does not change."""
        mirror = deepcopy(module).to(self._target.device, self._target.dtype).requires_grad_(False)
        mirror = mirror.to(draft_dtype(mirror)).eval()  # as `saccade.load` has it
        engine = Engine(self._target, self._drafter(mirror))
        emitted, passes = 0, 0
        for start in range(0, len(self.prompts), self._rows):
            requests = [Request(p) for p in self.prompts[start : start + self._rows]]
            for out in engine.generate(requests, max_new_tokens=self._length, do_sample=False):
                emitted += out.stats.decoded_tokens
                passes += out.stats.target_passes
        return emitted / passes if passes else 0.0

    def _of_head(self, head: Any) -> Drafter:
        return HeadDrafter(head, self._target, Chain(min(5, head.reach or 5)), in_training=True)


def fitting(prompts: Sequence[Prompt], room: int, contexts: Sequence[int], say: Callable[[str], None]) -> list[Prompt]:
    """Return prompts that leave ``room`` tokens in all contexts, and report the others."""
    fit = [p for p in prompts if all(len(p) + room <= context for context in contexts)]
    if left := len(prompts) - len(fit):
        say(
            f"{left} of {len(prompts)} held-out prompts are not measured: they leave no {room} tokens for an "
            f"answer in a context of {min(contexts)}" + ("." if fit else ", so no drafter is found to be the best.")
        )
    return fit
