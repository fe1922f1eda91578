"""Drafting with a ViSpec head: images are compressed once, and every row is told its last one's vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.heads.vispec import Image, ViSpec, runs_of
from saccade.inputs.batch import media_spans
from saccade.inputs.prompt import Prompt
from saccade.target.cache import on_device
from saccade.target.context import Context, PromptRead


class ViSpecDraftSession(HeadDraftSession):
    """A ViSpec head at work on B rows."""

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        assert isinstance(drafter.head, ViSpec)
        self._vispec = drafter.head
        self._images: list[list[Image]] = [[] for _ in range(rows)]
        self._global = self._features[0].new_zeros(rows, self._features[0].shape[1])

    def forget(self, row: int) -> None:
        super().forget(row)
        self._images[row] = []

    def _runs(self, prompt: Prompt) -> Sequence[tuple[int, int]]:
        # A later turn may end between two images that touch: each must be compressed for itself.
        spans = media_spans(self._drafter.target.config, prompt)
        return runs_of(self._visual(prompt), [stop for _, stop in spans])

    def _entries(self, row: int, prompt: Prompt, read: PromptRead) -> tuple[Tensor, Tensor]:
        return self._vispec.entries_of(self._visual(prompt), self._runs(prompt))

    def _embedded(self, row: int, prompt: Prompt, read: PromptRead, tokens: Tensor) -> Tensor:
        start = read.start
        images = [image for image in self._images[row] if image.stop <= start]
        runs = [(first, stop) for first, stop in self._runs(prompt) if stop > start]
        if runs:
            given = self._given(read).to(self._features[0])
            images += [Image(a, b, self._vispec.adaptor(given[a - start : b - start])) for a, b in runs]
        self._images[row] = images
        self._global[row] = images[-1].vectors[-1] if images else 0
        places = tokens.to(self._device)
        words = self._words(torch.tensor(prompt.ids, device=self._device)[places])
        return self._vispec.lay(words, places, images)[None]

    def _embed(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        vectors = self._global[on_device(list(rows), self._device)]
        return torch.cat([self._words(tokens), vectors[:, None].expand(-1, tokens.shape[1], -1)], -1)
