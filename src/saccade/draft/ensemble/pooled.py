"""View P: every image with a quarter of its visual tokens (TABED, Lee et al. 2026, Section 6.1)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from saccade.draft.ensemble.view import PlainView, View
from saccade.draft.model import ModelDraftSession
from saccade.draft.pruning import places_of
from saccade.errors import MethodError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import PoolPoint, side_of
from saccade.inputs.pixels import half
from saccade.inputs.prompt import Medium, Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.prefill import PrefillResult

MAX_HALVED = 16
"""Number of halved pictures cached for later turns."""


def pooled(model: Target) -> View:
    """View P for the draft model's family."""
    family = family_of(model.config)
    if family.is_resizable:
        return HalvedPictures(model.config)
    if family.pool_point is not None:
        return PooledFeatures(model, family.pool_point)
    raise MethodError(
        f"The draft model is of the family {family.name}, which takes no images or whose visual features are unknown "
        "here; leave view P out, or use a drafter of a known VLM family."
    )


class HalvedPictures(PlainView):
    """P for families that take pictures of any size (Qwen-VL, Pixtral): every picture at half its resolution.

    The number of features follows from the picture's size, so this corresponds to the paper's 2x2 averages in a form
    that the model was trained on: grid, row breaks and positions are those of a smaller picture, and the tower has a
    quarter of the work. A side with an odd number of visual tokens is rounded up; a video keeps its frames and their
    timestamps.
    """

    name = "P"

    def __init__(self, config: Any) -> None:
        self._config = config
        self._halved: dict[str, Medium] = {}  # the last `MAX_HALVED`, by the digest of the whole picture

    def read(self, prompt: Prompt) -> Prompt:
        dropped: set[int] = set()
        media = []
        for places, medium in zip(places_of(self._config, prompt), prompt.media, strict=True):
            small = self._half(medium)
            dropped.update(self._surplus(places, medium, small))
            media.append(small)
        return Prompt(tuple(t for i, t in enumerate(prompt.ids) if i not in dropped), tuple(media))

    def _half(self, medium: Medium) -> Medium:
        """The medium at half its resolution, cached because every turn of a conversation repeats its pictures."""
        small = self._halved.pop(medium.digest, None) or family_of(self._config).halved(medium)
        self._halved[medium.digest] = small
        if len(self._halved) > MAX_HALVED:
            del self._halved[next(iter(self._halved))]
        return small

    def _surplus(self, places: list[int], medium: Medium, small: Medium) -> Iterator[int]:
        """Positions of placeholders and row breaks that the smaller medium does not need."""
        before, after = (family_of(self._config).grid(m) for m in (medium, small))
        assert before is not None
        assert after is not None
        (_, rows, columns), (_, rows_left, columns_left) = before, after
        end = 0
        for number, first in enumerate(range(0, len(places), columns)):
            line = places[first : first + columns]
            if number % rows >= rows_left:
                yield from range(end, line[-1] + 1)
            else:
                yield from line[columns_left:]
            end = line[-1] + 1


class PooledFeatures(PlainView):
    """P for families whose towers take squares of one size: features averaged 2x2 just before the projector.

    A side with an odd number of features is closed by averages of fewer; a class token stays. Where the projector
    itself averages (Gemma 3), this is a second average behind its own.
    """

    name = "P"

    def __init__(self, model: Target, point: PoolPoint) -> None:
        self._model = model
        self._point = point
        self._config: Any = model.config
        self._patch: int | None = None
        if family_of(model.config).unpads:
            vision = model.config.vision_config
            side = half(side_of(vision))
            self._patch = int(vision.image_size) // side
            if int(vision.image_size) // self._patch != side:
                raise MethodError(
                    f"A grid of {vision.image_size}/{vision.patch_size} features cannot be pooled in the family "
                    f"{family_of(model.config).name}; leave view P out."
                )
            self._config = copy.deepcopy(model.config)
            self._config.vision_config.patch_size = self._patch

    def read(self, prompt: Prompt) -> Prompt:
        dropped: set[int] = set()
        media = []
        for places, medium in zip(places_of(self._config, prompt), prompt.media, strict=True):
            grid, left = self._sizes(medium)
            dropped.update(place for n, place in enumerate(places) if n % grid >= left)
            media.append(replace(medium, n_tokens=medium.n_tokens // grid * left))
        return Prompt(tuple(t for i, t in enumerate(prompt.ids) if i not in dropped), tuple(media))

    def load(
        self, own: ModelDraftSession, row: int, prompt: Prompt, target: Context, prefill: PrefillResult | None
    ) -> None:
        with self._pooling():
            own.load(row, prompt, prefill)

    def _sizes(self, medium: Medium) -> tuple[int, int]:
        """Number of placeholders of one grid of a medium, and of those that remain."""
        family = family_of(self._config)
        if self._patch is not None:
            return medium.n_tokens, family.count(medium.kind, medium.tensors)
        tiles = family.tiles(medium)
        side, others = _square(medium.n_tokens // tiles)
        return medium.n_tokens // tiles, half(side) ** 2 + others

    @contextmanager
    def _pooling(self) -> Iterator[None]:
        """Average the model's features inside this context."""
        base: Any = getattr(self._model.model, "base_model", self._model.model)
        module = base.get_submodule(self._point.module)
        if self._point.at_output:
            hook = module.register_forward_hook(lambda m, i, out: _averaged(out))
        else:
            hook = module.register_forward_pre_hook(_pool_first)
        vision = self._model.config.vision_config
        patch = vision.patch_size
        try:
            if self._patch is not None:
                vision.patch_size = self._patch
            yield
        finally:
            vision.patch_size = patch
            hook.remove()


def pool(features: Tensor) -> Tensor:
    """Average features of n square grids 2x2.

    Shapes: features ``[n, s * s, C]``; returns ``[n, s' * s', C]``.
    """
    side, others = _square(features.shape[1])
    grid = features[:, others:].transpose(1, 2).unflatten(2, (side, side))
    return torch.cat([features[:, :others], _averaged(grid).flatten(2).transpose(1, 2)], 1)


def _averaged(grid: Tensor) -> Tensor:
    """``[n, C, h, w]`` to ``[n, C, h', w']``; an average over an odd edge counts only what is there."""
    return functional.avg_pool2d(grid, 2, ceil_mode=True, count_include_pad=False)


def _pool_first(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (pool(args[0]), *args[1:])


def _square(tokens: int) -> tuple[int, int]:
    """Side of a square grid of visual tokens, and how many class tokens are before it: none or one."""
    side = math.isqrt(tokens)
    others = tokens - side * side
    if others > 1:
        raise MethodError(f"An image of {tokens} visual tokens is not on a square grid; leave view P out.")
    return side, others
