"""View C: a caption in place of every image (TABED, Lee et al. 2026, Section 6.1, Appendices E and I.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from saccade.draft.ensemble.view import PlainView
from saccade.errors import InputError, ModelError
from saccade.inputs.families import family_of, visual_ids
from saccade.inputs.placeholders import spans_with_wrappers
from saccade.inputs.processor import InputProcessor
from saccade.inputs.prompt import Medium, Prompt
from saccade.loading import adapt, check_checkpoint, load_model
from saccade.target.adapter import Target
from saccade.target.context import Context


@dataclass(frozen=True, slots=True)
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


Captioner = Callable[[PromptMedium], str]
"""Short caption of an image or a video."""


class Caption(PlainView):
    """C: ``image: `` and a caption in the place of every image (``video: `` for a video)."""

    name = "C"

    def __init__(self, config: Any, tokenizer: Any, captioner: Captioner, device: torch.device | None = None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._captioner = captioner
        self._device = device
        self.captions: dict[str, str] = {}  # by the digest of the image or video
        self.seconds = 0.0  # spent on captions so far

    def read(self, prompt: Prompt) -> Prompt:
        if not prompt.media:
            return prompt
        spans = iter(spans_with_wrappers(self._config, self._tokenizer, prompt))
        ids: list[int] = []
        end = 0
        for media in prompt.given:
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

    def __init__(
        self,
        model: Target,
        processor: InputProcessor,
        max_new_tokens: int = 32,
        question: str = "Describe the {kind} in one sentence.",
    ) -> None:
        self._model = model
        self._processor = processor
        self._max_new_tokens = max_new_tokens
        self._question = question

    def prompt(self, shown: PromptMedium) -> Prompt:
        """The caption's prompt: that of an empty picture, with the media in its place."""
        question = self._question.format(kind=shown.kind)
        if shown.kind == "image":
            empty = self._processor.prompt(question, images=[Image.new("RGB", (32, 32))])
        else:
            count = len(shown.media) if shown.medium.frame else 4
            empty = self._processor.prompt(question, videos=[np.zeros((count, 32, 32, 3), np.uint8)])
        spans = spans_with_wrappers(self._processor.config, self._processor.tokenizer, empty)
        start, stop = spans[0][0], spans[-1][1]
        return Prompt((*empty.ids[:start], *shown.ids, *empty.ids[stop:]), shown.media)

    def __call__(self, shown: PromptMedium) -> str:
        return self._answer(self.prompt(shown))

    def of_picture(self, image: Image.Image) -> str:
        """The caption of a picture, which this VLM's own processor prepares."""
        return self._answer(self._processor.prompt(self._question.format(kind="image"), images=[image]))

    @torch.inference_mode()
    def _answer(self, prompt: Prompt) -> str:
        context = Context(self._model, 1)
        context.cache.reserve(0, len(prompt) + self._max_new_tokens)
        logits = context.load(0, prompt).logits
        assert logits is not None
        token = int(logits.argmax())
        answer: list[int] = []
        while token not in self._processor.eos_token_ids and len(answer) < self._max_new_tokens:
            answer.append(token)
            output = context.forward([0], torch.tensor([[token]], device=self._model.device))
            context.commit([0], [[0]], [[token]])
            token = int(output.logits.argmax())
        return self._processor.decode(answer)


class PictureCaptions:
    """Captions by any function of a PIL image: BLIP, Florence-2, or one's own."""

    def __init__(self, processor: InputProcessor, caption: Callable[[Image.Image], str]) -> None:
        self._processor = processor
        self._caption = caption

    def __call__(self, shown: PromptMedium) -> str:
        return self._caption(picture(self._processor, shown.medium))


class GivenCaptions:
    """Captions given in advance."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def __call__(self, shown: PromptMedium) -> str:
        digest = " ".join(part.partition("/")[0] for part in shown.digest.split())  # without salts
        if digest not in self._texts:
            raise InputError(
                f"No caption was given for the {shown.kind} with the digest {digest}; add it to captioner, or "
                "let a checkpoint or the draft model caption."
            )
        return self._texts[digest]


@lru_cache(maxsize=1)
def from_checkpoint(path: str, device: torch.device) -> Callable[[Image.Image], str]:
    """A function from pictures to captions: a VLM of a known family, or any image-to-text model of transformers.

    The last one stays loaded.
    """
    from transformers import AutoModelForImageTextToText

    config = check_checkpoint(path)
    if visual_ids(config):
        model = load_model(path, device_map=None if device.type == "cpu" else device)
        return OwnCaptions(adapt(model), InputProcessor.load(path)).of_picture
    if type(config) not in AutoModelForImageTextToText._model_mapping:
        raise ModelError(
            f"The captioner {path} is a language model, which takes no images; give an image-to-text model."
        )
    return CheckpointCaptions(path, device=device)


class CheckpointCaptions:
    """A captioning checkpoint of transformers (BLIP, BLIP-2, GIT, Florence-2) as a function from images to words."""

    def __init__(self, path: str, max_new_tokens: int = 32, device: str | torch.device | None = None) -> None:
        from transformers import AutoProcessor

        self._model = load_model(path, device_map=device).eval()
        try:
            self._processor: Any = AutoProcessor.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as problem:
            raise ModelError(f"The captioner {path} has no usable processor: {problem}") from problem
        self._max_new_tokens = max_new_tokens

    @torch.inference_mode()
    def __call__(self, image: Image.Image) -> str:
        text = family_of(self._model.config).caption_prompt
        task = {} if text is None else {"text": text}
        inputs = self._processor(images=image, return_tensors="pt", **task)
        for name, value in inputs.items():
            dtype = self._model.dtype if value.is_floating_point() else None
            inputs[name] = value.to(device=self._model.device, dtype=dtype)
        ids = self._model.generate(**inputs, max_new_tokens=self._max_new_tokens, do_sample=False, num_beams=1)
        return str(self._processor.batch_decode(ids, skip_special_tokens=True)[0])


def picture(processor: InputProcessor, medium: Medium) -> Image.Image:
    """The picture of a medium's tensors: the whole image even if it also has tiles, the middle frame of a video."""
    pixels = family_of(processor.config).picture(medium)
    mean, std = (torch.tensor(v)[:, None, None] for v in processor.colour_scale(medium.kind))
    values = (pixels.detach().float().cpu() * std + mean).clamp(0, 1) * 255
    return Image.fromarray(values.round().to(torch.uint8).permute(1, 2, 0).numpy())
