"""Block efficiency of a drafter, measured by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from saccade.draft.heads.head import Head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.policy import Chain, TreePolicy
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
        rows: int = 4,
        policy: TreePolicy | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self.prompts = target, fitting(prompts, max_new_tokens, [target], say)
        self._length, self._rows, self._policy = max_new_tokens, rows, policy

    def __call__(self, head: Head) -> float:
        """Return tokens per target forward over all prompts; the head does not change."""
        mirror = deepcopy(head).to(self._target.device, self._target.dtype)
        mirror = mirror.to(draft_dtype(mirror)).eval()  # as `load_head` puts it
        policy = self._policy or Chain(min(5, mirror.reach or 5))
        engine = Engine(self._target, HeadDrafter(mirror, self._target, policy, in_training=True))
        return block_efficiency(engine, self.prompts, self._length, self._rows)


def fitting(prompts: Sequence[Prompt], room: int, models: Sequence[Target], say: Callable[[str], None]) -> list[Prompt]:
    """Return prompts that leave ``room`` tokens in the contexts of all models, and report the others."""
    contexts = [m.traits.limits.context for m in models if m.traits.limits.context is not None]
    if not contexts:
        return list(prompts)
    fit = [p for p in prompts if len(p) + room <= min(contexts)]
    if left := len(prompts) - len(fit):
        say(
            f"{left} of {len(prompts)} held-out prompts are not measured: they leave no {room} tokens for an "
            f"answer in a context of {min(contexts)}" + ("." if fit else ", so no drafter is found to be the best.")
        )
    return fit


def block_efficiency(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int, rows: int) -> float:
    """Return tokens per target forward over greedy answers to all prompts, ``rows`` at a time."""
    emitted, passes = 0, 0
    for start in range(0, len(prompts), rows):
        requests = [Request(p) for p in prompts[start : start + rows]]
        for out in engine.generate(requests, max_new_tokens=max_new_tokens, do_sample=False):
            emitted += out.stats.decoded_tokens
            passes += out.stats.target_passes
    return emitted / passes if passes else 0.0
