"""Attention that a prompt's tokens pay, read while the target prefills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from saccade.inputs.batch import visual_mask
from saccade.target.probe import AttentionProbe

if TYPE_CHECKING:
    from saccade.target.context import Context, PromptReader


@contextmanager
def reading_attention(context: Context, reader: PromptReader, stop: int) -> Iterator[None]:
    """Read the attention of a prompt's asking tokens in the pass up to ``stop`` that happens while this is open.

    What is read is added to ``reader.result.columns``; `Needs` says which layers and whose attention count.
    """
    needs, prompt, at = context.needs, reader.prompt, reader.at
    visual = visual_mask(context.target.config, prompt.ids).nonzero()[:, 0].tolist()
    first = at
    if needs.queries == "words":
        first = max(at, min(visual[-1] + 1, len(prompt) - 1)) if visual else stop
    if not visual or first >= stop:
        yield
        return
    layers = needs.attention or None
    with AttentionProbe(context.target, queries=range(first - at, stop - at), layers=layers) as probe:
        yield
    columns = torch.stack([c[0].to(context.target.device) for c in probe.columns.values()]).mean(0)
    columns = pad(columns, (0, len(prompt) - columns.shape[0]))
    known = reader.result.columns
    reader.result.columns = columns if known is None else known + columns
