"""Ways in which one draft model reads one prompt (TABED, Lee et al. 2026, Sections 4.1 and 6.1, Appendix I.2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from saccade.draft.captions import Caption, Captioner, OwnCaptions
from saccade.draft.model import ModelDraftSession
from saccade.draft.pruning import Pruning
from saccade.draft.view import PlainView, View
from saccade.errors import MethodError, ModelError
from saccade.inputs.blind import without_media
from saccade.inputs.counting import count
from saccade.inputs.families import family_of, kind_of, visual_ids
from saccade.inputs.processor import InputProcessor
from saccade.inputs.prompt import Medium, Prompt
from saccade.target.adapter import Target
from saccade.target.attention import PromptAttention
from saccade.target.context import Context

POOLABLE = (
    "llava",
    "llava_next",
    "llava_onevision",
    "idefics3",
    "smolvlm",
    "gemma3",
    "internvl",
)
"""Families whose visual features lie on a square grid when they reach the projector."""


def by_names(
    names: str, model: Target, processor: InputProcessor, captioner: Captioner | None = None
) -> list[View]:
    """The views of one draft model by their letters, as in ``MTCP``.

    Args:
        names: letters M, T, C, P and R, each once.
        model: the adapter of the draft model.
        processor: its inputs.
        captioner: for C; the draft model itself when None.

    Raises:
        MethodError: a letter is unknown or repeated, there is none, or the draft model cannot have that view.
    """
    config, tokenizer = processor.config, processor.tokenizer
    makers: dict[str, Callable[[], View]] = {
        "M": Multimodal,
        "T": lambda: TextOnly(config, tokenizer),
        "C": lambda: Caption(config, tokenizer, captioner or OwnCaptions(model, processor)),
        "P": lambda: Pooled(model),
        "R": Pruned,
    }
    if not names or len(set(names)) < len(names) or not set(names) <= set(makers):
        raise MethodError(f"The views {names!r} are not letters of {''.join(makers)}, each at most once.")
    return [makers[name]() for name in names]


class Multimodal(PlainView):
    """M: the prompt as the draft model always reads it."""

    name = "M"

    def read(self, prompt: Prompt) -> Prompt:
        return prompt


class TextOnly(PlainView):
    """T: one newline in the place of every image or video (Gagrani et al. 2024).

    Args:
        config: the draft model's Hugging Face configuration.
        tokenizer: its tokenizer.
    """

    name = "T"

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def read(self, prompt: Prompt) -> Prompt:
        if not prompt.media:
            return prompt
        return without_media(self._config, self._tokenizer, prompt)


class Pooled(PlainView):
    """P: visual features averaged 2x2 on their grid just before the projector, a quarter of the visual tokens.

    A side with an odd number of features is closed by averages of fewer. Where the projector itself averages
    (Gemma 3), this is a second average behind its own.

    Args:
        model: the adapter of the draft model.

    Raises:
        MethodError: the model's family has no square grid before its projector.
    """

    name = "P"

    def __init__(self, model: Target) -> None:
        kind = kind_of(model.config)
        if kind not in POOLABLE:
            raise MethodError(
                f"The draft model is of the family {kind}, whose visual features are not on a square grid before the "
                f"projector; leave view P out, or use a drafter of one of {', '.join(POOLABLE)}."
            )
        self._model = model
        self._kind = kind
        self._config: Any = model.config
        self._patch: int | None = None
        if kind in (
            "llava_next",
            "llava_onevision",
        ):  # they cut padding away on a grid that they compute themselves
            vision = model.config.vision_config
            side = _half(int(vision.image_size) // int(vision.patch_size))
            self._patch = int(vision.image_size) // side
            if int(vision.image_size) // self._patch != side:
                raise MethodError(
                    f"A grid of {vision.image_size}/{vision.patch_size} features cannot be pooled in the family "
                    f"{kind}; leave view P out."
                )
            self._config = copy.deepcopy(model.config)
            self._config.vision_config.patch_size = self._patch

    def read(self, prompt: Prompt) -> Prompt:
        if not prompt.media:
            return prompt
        tokens = visual_ids(self._config)
        places = {kind: [i for i, t in enumerate(prompt.ids) if t == token] for kind, token in tokens.items()}
        dropped: set[int] = set()
        media = []
        for medium in prompt.media:
            mine, places[medium.kind] = (
                places[medium.kind][: medium.n_tokens],
                places[medium.kind][medium.n_tokens :],
            )
            grid, left = self._sizes(medium)
            dropped.update(place for n, place in enumerate(mine) if n % grid >= left)
            media.append(replace(medium, n_tokens=medium.n_tokens // grid * left))
        return Prompt(tuple(t for i, t in enumerate(prompt.ids) if i not in dropped), tuple(media))

    def load(self, session: ModelDraftSession, row: int, prompt: Prompt, target: Context) -> None:
        with self._pooling():
            session.load(row, prompt)

    def _sizes(self, medium: Medium) -> tuple[int, int]:
        """Placeholders of one grid of a medium, and how many are left of them."""
        if self._patch is not None:
            return medium.n_tokens, count(self._config, medium.kind, medium.tensors)
        pixels = medium.tensors["pixel_values"]
        family = family_of(self._config)
        tiles = pixels.shape[1] if family is not None and family.layout == "tiles" else pixels.shape[0]
        grid = medium.n_tokens // tiles
        return grid, _half(_side(grid)) ** 2

    @contextmanager
    def _pooling(self) -> Iterator[None]:
        """The model pools while this is open."""
        base: Any = getattr(self._model.model, "base_model", self._model.model)
        if self._kind == "gemma3":
            hook = base.multi_modal_projector.avg_pool.register_forward_hook(lambda m, i, out: _averaged(out))
        elif self._kind in ("idefics3", "smolvlm"):
            hook = base.connector.modality_projection.register_forward_pre_hook(_pool_first)
        else:
            hook = base.multi_modal_projector.register_forward_pre_hook(_pool_first)
        vision = self._model.config.vision_config
        patch = vision.patch_size
        try:
            if self._patch is not None:
                vision.patch_size = self._patch
            yield
        finally:
            vision.patch_size = patch
            hook.remove()


class Pruned:
    """R: only the visual tokens that the target's words look at most, at their own positions (SpecVLM, Ji et al. 2025).

    Args:
        pruning: which visual tokens stay.
    """

    name = "R"

    def __init__(self, pruning: Pruning | None = None) -> None:
        self._pruning = pruning or Pruning()

    def open(self, target: Context) -> None:
        if not self._pruning.needs_attention:
            return
        target.attention = target.attention or PromptAttention(self._pruning.layers)
        if target.attention.layers != self._pruning.layers:
            raise ModelError(
                f"The target's attention is read in layers {target.attention.layers} already, not in "
                f"{self._pruning.layers}; choose the same layers for all that read it."
            )

    def read(self, prompt: Prompt) -> Prompt:
        return prompt

    def load(self, session: ModelDraftSession, row: int, prompt: Prompt, target: Context) -> None:
        config, attention = session.context.target.config, target.attention
        seen, columns = (attention.prompt, attention.columns) if attention is not None else (None, None)
        dropped = self._pruning.dropped(config, prompt, seen, columns, target.target.config)
        session.read(row, prompt, dropped)


def pool(features: Tensor) -> Tensor:
    """``[n, s * s, C]`` features of n square grids to ``[n, s' * s', C]``, s' = ceil(s / 2), by 2x2 averages."""
    side = _side(features.shape[1])
    grid = features.transpose(1, 2).unflatten(2, (side, side))
    return _averaged(grid).flatten(2).transpose(1, 2)


def _averaged(grid: Tensor) -> Tensor:
    """``[n, C, h, w]`` to ``[n, C, h', w']``; an average over an odd edge counts only what is there."""
    return functional.avg_pool2d(grid, 2, ceil_mode=True, count_include_pad=False)


def _pool_first(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (pool(args[0]), *args[1:])


def _half(side: int) -> int:
    return -(-side // 2)


def _side(count: int) -> int:
    side = math.isqrt(count)
    if side * side != count:
        raise MethodError(
            f"An image of {count} visual tokens is not a square grid (a class token may be among them); leave view P "
            "out for this drafter."
        )
    return side
