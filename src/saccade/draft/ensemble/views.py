"""Views that are made of a prompt's pictures: captions, and a quarter of the visual tokens.

TABED, Lee et al. 2026, Sections 4.1, 6.1 and I.2.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from saccade.draft.ensemble.ensemble import Multimodal, Pruned, TextOnly, View
from saccade.draft.model import ModelDraftSession
from saccade.draft.pruning import Pruning, places_of
from saccade.errors import InputError, MethodError, ModelError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Medium, PoolPoint, Prompt, half, side_of
from saccade.inputs.processor import InputProcessor
from saccade.loading import adapt, check_checkpoint, load_model, load_processor
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context


def make_views(
    names: str,
    model: Target,
    processor: InputProcessor,
    captioner: Captioner | None = None,
    pruning: Pruning | None = None,
    config: Any = None,
) -> list[View]:
    """Make the views of one draft model from their letters, as in ``MTCP``."""
    config, tokenizer = config or processor.config, processor.tokenizer
    makers: dict[str, Callable[[], View]] = {
        "M": Multimodal,
        "T": lambda: TextOnly(config, tokenizer),
        "C": lambda: Caption(config, tokenizer, captioner or OwnCaptions(model, processor), model.device),
        "P": lambda: pooled(model),
        "R": lambda: Pruned(pruning or Pruning()),
    }
    if not names or len(set(names)) < len(names) or not set(names) <= set(makers):
        raise MethodError(f"The views {names!r} must be one or more letters of {''.join(makers)}, each at most once.")
    return [makers[name]() for name in names]


# -- captions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptMedium:
    """An image or a video in a prompt."""

    media: tuple[Medium, ...]  # one; of a video that the family takes as images, all its frames
    ids: tuple[int, ...]  # placeholders, with the tokens between and around them

    @property
    def kind(self) -> Literal["image", "video"]:
        return "video" if self.medium.is_of_video else "image"

    @property
    def medium(self) -> Medium:
        """The only one, or the middle frame."""
        return self.media[len(self.media) // 2]

    @property
    def digest(self) -> str:
        return " ".join(medium.digest for medium in self.media)


Captioner = Callable[[PromptMedium], str]  # short caption of an image or a video
CAPTION_TOKENS = 32  # most tokens of a caption that a model generates
QUESTION = "Describe the {kind} in one sentence."


class Caption(View):
    """C: ``image: `` and a caption in the place of every image (``video: `` for a video)."""

    def __init__(self, config: Any, tokenizer: Any, captioner: Captioner, device: torch.device | None = None) -> None:
        self._family, self._tokenizer = family_of(config), tokenizer
        self._captioner, self._device = captioner, device
        self.captions: dict[str, str] = {}  # by the digest of the image or video

    def rewrite(self, prompt: Prompt) -> Prompt:
        if not prompt.media:
            return prompt
        spans = iter(self._family.spans_with_wrappers(self._tokenizer, prompt))
        ids: list[int] = []
        end = 0
        for media in prompt.sources:
            places = [next(spans) for _ in media]
            start, stop = places[0][0], places[-1][1]
            shown = PromptMedium(media, prompt.ids[start:stop])
            words = f"{shown.kind}: {self._caption(shown)}"
            ids += [*prompt.ids[end:start], *self._tokenizer.encode(words, add_special_tokens=False)]
            end = stop
        return Prompt((*ids, *prompt.ids[end:]))

    def _caption(self, shown: PromptMedium) -> str:
        digest = shown.digest
        if digest not in self.captions:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            self.captions[digest] = " ".join(self._captioner(shown).split())
            self.seconds += time.perf_counter() - started
        return self.captions[digest]


class OwnCaptions:
    """Greedy captions by a VLM that Saccade runs, such as the draft model itself."""

    def __init__(self, model: Target, processor: InputProcessor) -> None:
        self._model, self._processor = model, processor

    def prompt(self, shown: PromptMedium) -> Prompt:
        """The caption's prompt: that of an empty picture, with the media in its place."""
        if shown.kind == "image":
            blank = Image.new("RGB", (32, 32))
            empty = self._processor.prompt(QUESTION.format(kind="image"), images=[blank])
        else:
            count = len(shown.media) if shown.medium.frame else 4
            frames = np.zeros((count, 32, 32, 3), np.uint8)
            empty = self._processor.prompt(QUESTION.format(kind="video"), videos=[frames])
        spans = family_of(self._processor.config).spans_with_wrappers(self._processor.tokenizer, empty)
        start, stop = spans[0][0], spans[-1][1]
        return Prompt((*empty.ids[:start], *shown.ids, *empty.ids[stop:]), shown.media)

    def __call__(self, shown: PromptMedium) -> str:
        return self._answer(self.prompt(shown))

    def of_picture(self, image: Image.Image) -> str:
        """The caption of a picture, which this VLM's own processor prepares."""
        return self._answer(self._processor.prompt(QUESTION.format(kind="image"), images=[image]))

    @torch.inference_mode()
    def _answer(self, prompt: Prompt) -> str:
        context = Context(self._model, 1)
        context.cache.reserve(0, len(prompt) + CAPTION_TOKENS)
        logits = context.load(0, prompt).logits
        assert logits is not None
        token = int(logits.argmax())
        answer: list[int] = []
        while token not in self._processor.eos_token_ids and len(answer) < CAPTION_TOKENS:
            answer.append(token)
            output = context.forward([0], torch.tensor([[token]], device=self._model.device))
            context.commit([0], [[0]], [[token]])
            token = int(output.logits.argmax())
        return self._processor.decode(answer)


def of_pictures(processor: InputProcessor, caption: Callable[[Image.Image], str]) -> Captioner:
    """Captions by any function of a PIL image."""
    return lambda shown: caption(picture(processor, shown.medium))


def from_texts(texts: Mapping[str, str]) -> Captioner:
    """Captions that the user wrote, by media digest."""

    def caption(shown: PromptMedium) -> str:
        digest = " ".join(part.partition("/")[0] for part in shown.digest.split())  # without salts
        if digest not in texts:
            raise InputError(
                f"The option captioner has no caption for the {shown.kind} with the digest {digest}; add it, or let a "
                "checkpoint or the draft model caption."
            )
        return texts[digest]

    return caption


@lru_cache(maxsize=1)
def from_checkpoint(path: str, device: torch.device) -> Callable[[Image.Image], str]:
    """Captions by a VLM of a known family, or any image-to-text model of transformers (BLIP, GIT, Florence-2).

    The last one stays loaded.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    config = check_checkpoint(path)
    text = family_of(config).caption_prompt
    is_vlm = text is None and bool(family_of(config).visual_ids)
    if not is_vlm and type(config) not in AutoModelForImageTextToText._model_mapping:
        raise ModelError(
            f"The captioner {path} is a language model, which takes no images; give an image-to-text model."
        )
    model = load_model(path, device_map=None if device.type == "cpu" else device)
    if is_vlm:
        return OwnCaptions(adapt(model), load_processor(path)).of_picture
    try:
        processor: Any = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as problem:
        raise ModelError(f"The captioner {path} has no usable processor: {problem}") from problem

    @torch.inference_mode()
    def caption(image: Image.Image) -> str:
        inputs = processor(images=image, return_tensors="pt", **({} if text is None else {"text": text}))
        for name, value in inputs.items():
            dtype = model.dtype if value.is_floating_point() else None
            inputs[name] = value.to(device=model.device, dtype=dtype)
        ids = model.generate(**inputs, max_new_tokens=CAPTION_TOKENS, do_sample=False, num_beams=1)
        return str(processor.batch_decode(ids, skip_special_tokens=True)[0])

    return caption


def picture(processor: InputProcessor, medium: Medium) -> Image.Image:
    """The picture of a medium's tensors: the whole image even if it also has tiles, the middle frame of a video."""
    pixels = family_of(processor.config).picture(medium)
    mean, std = (torch.tensor(v)[:, None, None] for v in processor.colour_scale(medium.kind))
    values = (pixels.detach().float().cpu() * std + mean).clamp(0, 1) * 255
    return Image.fromarray(values.round().to(torch.uint8).permute(1, 2, 0).numpy())


# -- pooled visual tokens ----------------------------------------------------------------------------------


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


class _FewerTokens(View):
    """P: a prompt whose media have fewer visual tokens."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def rewrite(self, prompt: Prompt) -> Prompt:
        dropped: set[int] = set()
        media = []
        for places, medium in zip(places_of(family_of(self._config), prompt), prompt.media, strict=True):
            small, surplus = self._smaller(places, medium)
            dropped.update(surplus)
            media.append(small)
        return Prompt(tuple(t for i, t in enumerate(prompt.ids) if i not in dropped), tuple(media))

    def _smaller(self, places: list[int], medium: Medium) -> tuple[Medium, Iterator[int]]:
        """The smaller form of a medium, and the positions that it does not need."""
        raise NotImplementedError  # every smaller view defines it


class HalvedPictures(_FewerTokens):
    """P for families that take pictures of any size (Qwen-VL, Pixtral): every picture at half its resolution.

    The number of features follows from the picture's size, so this corresponds to the paper's 2x2 averages in a form
    that the model was trained on: grid, row breaks and positions are those of a smaller picture, and the tower has a
    quarter of the work. A side with an odd number of visual tokens is rounded up; a video keeps its frames and their
    timestamps.
    """

    def _smaller(self, places: list[int], medium: Medium) -> tuple[Medium, Iterator[int]]:
        small = family_of(self._config).halved(medium)
        return small, self._surplus(places, medium, small)

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


class PooledFeatures(_FewerTokens):
    """P for families whose towers take squares of one size: features averaged 2x2 just before the projector.

    A side with an odd number of features is closed by averages of fewer; a class token stays. Where the projector
    itself averages (Gemma 3), this is a second average after its own.
    """

    def __init__(self, model: Target, point: PoolPoint) -> None:
        super().__init__(model.config)
        self._model, self._point = model, point
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

    def load(self, session: ModelDraftSession, *arguments: Any) -> None:
        with self._pooling():
            super().load(session, *arguments)

    def _smaller(self, places: list[int], medium: Medium) -> tuple[Medium, Iterator[int]]:
        family = family_of(self._config)
        grid = medium.n_tokens  # placeholders of one grid, and those that remain
        if self._patch is not None:
            left = family.count(medium.kind, medium.tensors)
        else:
            grid //= family.tiles(medium)
            side, others = _square(grid)
            left = half(side) ** 2 + others
        small = replace(medium, n_tokens=medium.n_tokens // grid * left)
        return small, (place for number, place in enumerate(places) if number % grid >= left)

    @contextmanager
    def _pooling(self) -> Iterator[None]:
        """Average the model's features inside this context."""
        base: Any = getattr(self._model.model, "base_model", self._model.model)
        module = base.get_submodule(self._point.module)
        if self._point.at_output:
            hook = module.register_forward_hook(lambda m, i, out: _averaged(out))
        else:
            hook = module.register_forward_pre_hook(lambda m, args: (pool(args[0]), *args[1:]))
        vision = self._model.config.vision_config
        patch = getattr(vision, "patch_size", None)
        try:
            if self._patch is not None:
                vision.patch_size = self._patch
            yield
        finally:
            if self._patch is not None:
                vision.patch_size = patch
            hook.remove()


def pool(features: Tensor) -> Tensor:
    """Average features ``[n, s * s, C]`` of n square grids 2x2, to ``[n, s' * s', C]``."""
    side, others = _square(features.shape[1])
    grid = features[:, others:].transpose(1, 2).unflatten(2, (side, side))
    averages = _averaged(grid).flatten(2).transpose(1, 2)
    return torch.cat([features[:, :others], averages], 1)


def _averaged(grid: Tensor) -> Tensor:
    """``[n, C, h, w]`` to ``[n, C, h', w']``; an average over an odd edge counts only what is there."""
    return functional.avg_pool2d(grid, 2, ceil_mode=True, count_include_pad=False)


def _square(tokens: int) -> tuple[int, int]:
    """Side of a square grid of visual tokens, and how many class tokens are before it: none or one."""
    side = math.isqrt(tokens)
    others = tokens - side * side
    if others > 1:
        raise MethodError(f"An image of {tokens} visual tokens is not on a square grid; leave view P out.")
    return side, others
