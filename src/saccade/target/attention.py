"""What the words of a prompt look at, read during the target's own prefill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from saccade.inputs.batch import visual_mask
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.probe import AttentionProbe


@dataclass(slots=True)
class PromptAttention:
    """Attention that every prefill of a context is to leave here.

    Attributes:
        layers: decoder layers that count (negative ones from the end); None means all.
        queries: tokens whose attention counts: ``words`` behind the last visual token, or ``all``.
        prompt: of the last prefill.
        columns: ``[S]`` fp32 attention that each of its positions gets from these tokens, summed over those that
            were run, mean over heads and layers; None for a prompt without visual tokens.
    """

    layers: tuple[int, ...] | None = None
    queries: Literal["words", "all"] = "words"
    prompt: Prompt | None = None
    columns: Tensor | None = None

    @contextmanager
    def reading(self, target: Target, prompt: Prompt, start: int) -> Iterator[None]:
        """Read the prefill of ``prompt`` from position ``start`` on that happens while this is open."""
        self.prompt, self.columns = prompt, None
        visual = visual_mask(target.config, prompt.ids).nonzero()[:, 0].tolist()
        if not visual:
            yield
            return
        first = start if self.queries == "all" else min(max(start, visual[-1] + 1), len(prompt) - 1)
        with AttentionProbe(
            target, queries=range(first - start, len(prompt) - start), layers=self.layers
        ) as probe:
            yield
        self.columns = torch.stack([c[0].to(target.device) for c in probe.columns.values()]).mean(0)
