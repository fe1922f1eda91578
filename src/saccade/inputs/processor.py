"""From messages, images and videos to a :class:`~saccade.inputs.prompt.Prompt` for one model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from saccade.errors import InputError, ModelError, SaccadeError
from saccade.inputs.batch import media_spans
from saccade.inputs.chat import Message, Slot, as_text, normalise, render
from saccade.inputs.counting import count
from saccade.inputs.cutting import VISUAL_KEYS
from saccade.inputs.expanding import Words, expand_image, expand_video
from saccade.inputs.families import Family, family_of, kind_of
from saccade.inputs.loading import Parts, load_parts, read_eos
from saccade.inputs.media import digest, load_image
from saccade.inputs.patches import grid_patches, smolvlm_frames, square_frames
from saccade.inputs.prompt import Medium, Prompt
from saccade.inputs.unknown import composite_prompt
from saccade.inputs.video import Video, load_video


@dataclass(frozen=True, slots=True)
class _Placed:
    """The media that one place in the text became, and the text that stands for them."""

    text: str
    media: tuple[Medium, ...]


class InputProcessor:
    """Makes prompts for one model, token for token as its Hugging Face processor does, without torchvision.

    Attributes:
        config: the model's Hugging Face configuration.
        tokenizer: the model's tokenizer.
        eos_token_ids: ids that end an answer.
    """

    def __init__(self, parts: Parts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.eos_token_ids: tuple[int, ...] = read_eos(parts)
        self._parts = parts
        self._family = family_of(parts.config)
        self._words = Words.of(parts.config, parts.tokenizer)

    @classmethod
    def load(cls, path: str) -> InputProcessor:
        """Read tokenizer, image and video settings and chat template of a checkpoint.

        Args:
            path: a local directory, or a model id of the Hugging Face hub.

        Raises:
            ModelError: the checkpoint lacks a part, or cannot be reached.
        """
        return cls(load_parts(path))

    @classmethod
    def from_parts(
        cls,
        config: Any,
        tokenizer: Any,
        image_processor: Any = None,
        video_settings: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> InputProcessor:
        """Build from loaded parts.

        Args:
            config: the model's Hugging Face configuration.
            tokenizer: a Hugging Face tokenizer.
            image_processor: a Hugging Face image processor; not needed for language models.
            video_settings: content of ``video_preprocessor_config.json``, over the family's defaults.
            chat_template: Jinja source; the tokenizer's own when None.
            eos_token_ids: ids that end an answer; those of the configuration or the tokenizer when None.
        """
        eos = None if eos_token_ids is None else tuple(eos_token_ids)
        return cls(Parts(config, tokenizer, image_processor, dict(video_settings or {}), chat_template, eos))

    def prompt(
        self,
        text_or_messages: str | Sequence[Message],
        images: Iterable[Any] = (),
        videos: Iterable[Any] = (),
        *,
        add_generation_prompt: bool = True,
        num_frames: int | None = None,
        fps: float | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Make one row's prompt.

        Args:
            text_or_messages: chat messages in Hugging Face or OpenAI form; or a string, which becomes one
                user message, images first, then videos, then the text. A string for a model without chat
                template is taken as it is, the placeholders in front.
            images: for the places of messages that carry no image themselves, in order; see
                :func:`~saccade.inputs.media.load_image` for what each can be.
            videos: likewise; see :func:`~saccade.inputs.video.load_video`.
            add_generation_prompt: whether the model answers next.
            num_frames: frames taken of a video file, in place of the checkpoint's own setting.
            fps: frames a second taken of a video file, likewise.
            template_options: further variables of the chat template.

        Returns:
            ids with every placeholder expanded, and the media in the order of their placeholders. Families
            that see a video as images (InternVL, SmolVLM) get one medium of kind "image" per frame.

        Raises:
            InputError: messages, images or videos cannot be used, do not match in number, or are not for
                this model.
        """
        if num_frames is not None and fps is not None:
            raise InputError("Both num_frames and fps are given; give one of them.")
        images, videos = list(images), list(videos)
        messages, slots = self._conversation(text_or_messages, len(images), len(videos))
        slots = _fill(slots, images, videos)
        self._refuse(slots)
        template = self._parts.chat_template or getattr(self.tokenizer, "chat_template", None)
        if self._family is None:
            return composite_prompt(self._parts, messages, slots, add_generation_prompt, template_options or {})
        if template is None:
            text = self._bare(text_or_messages, slots)
        else:
            if self._words is None:
                messages = as_text(messages)
            if kind_of(self.config) == "smolvlm" and any(s.kind == "video" for s in slots):
                template = _smolvlm_video_template()
            text = render(self.tokenizer, template, messages, add_generation_prompt, template_options or {})
        sampling = {k: v for k, v in (("num_frames", num_frames), ("fps", fps)) if v is not None}
        text, media = self._expand(text, slots, sampling)
        return self._tokenized(text, media, templated=template is not None)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Text of answer ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def text_only(self, prompt: Prompt) -> Prompt:
        """The prompt as a drafter without eyes reads it: one newline for every image or video.

        A medium's placeholders go with what is between and around them: row breaks, tile tags, timestamps,
        start and end tokens (the T view of TABED).
        """
        newline = self.tokenizer.encode("\n", add_special_tokens=False)[-1]
        ids: list[int] = []
        end = 0
        for start, stop in self._wrapped_spans(prompt):
            ids += [*prompt.ids[end:start], newline]
            end = stop
        return Prompt((*ids, *prompt.ids[end:]))

    def _conversation(
        self, given: str | Sequence[Message], images: int, videos: int
    ) -> tuple[list[dict[str, Any]], list[Slot]]:
        if not isinstance(given, str):
            return normalise(given)
        parts = [{"type": "image"}] * images + [{"type": "video"}] * videos
        if self._words is None and self._family is not None:
            slots = [Slot("image", None)] * images + [Slot("video", None)] * videos
            return [{"role": "user", "content": given}], slots
        return normalise([{"role": "user", "content": [*parts, {"type": "text", "text": given}]}])

    def _refuse(self, slots: Sequence[Slot]) -> None:
        """Media that this model does not take."""
        family, name = self._family, kind_of(self.config)
        if family is None:
            return
        if slots and family.layout == "text":
            raise InputError(f"The model {name} reads text only; leave out the {slots[0].kind}s or load a VLM.")
        if family.video is None and any(s.kind == "video" for s in slots):
            raise InputError(f"The model {name} takes images but no videos; give single frames as images.")
        if self._parts.image_processor is None and any(s.kind == "image" for s in slots):
            raise ModelError(f"The checkpoint has no image processor; load {name} from a complete checkpoint.")

    def _bare(self, given: str | Sequence[Message], slots: Sequence[Slot]) -> str:
        """A string for a model without chat template."""
        if not isinstance(given, str):
            raise InputError(
                "The checkpoint has no chat template, so messages cannot be rendered; give the prompt as a string."
            )
        if self._family is None or self._words is None:
            return given
        words = {"image": self._words.slot, "video": self._words.video or ""}
        return "".join(self._family.raw.format(words[s.kind]) for s in slots) + given

    def _expand(self, text: str, slots: Sequence[Slot], sampling: Mapping[str, Any]) -> tuple[str, list[Medium]]:
        """Put every medium's tokens in the place of its placeholder."""
        if self._words is None:
            return text, []
        names = {self._words.slot: "image"}
        if self._words.video:
            names[self._words.video] = "video"
        pieces = re.split("(" + "|".join(re.escape(name) for name in names) + ")", text)
        found = [names[piece] for piece in pieces[1::2]]
        wanted = [slot.kind for slot in slots]
        if sorted(found) != sorted(wanted):
            raise _miscounted(found, wanted, names)
        queues = {
            "image": iter(self._images([s.source for s in slots if s.kind == "image"])),
            "video": (self._video(s.source, sampling) for s in slots if s.kind == "video"),
        }
        media: list[Medium] = []
        for i, kind in enumerate(found):
            placed = next(queues[kind])
            pieces[2 * i + 1] = placed.text
            media += placed.media
        return "".join(pieces), media

    def _images(self, sources: Sequence[Any]) -> list[_Placed]:
        """All images of the row; LLaVA-OneVision treats several otherwise than one."""
        assert self._words is not None
        images = [load_image(source) for source in sources]
        together = kind_of(self.config) == "llava_onevision" and len(images) > 1
        out = []
        for image in images:
            features = self._features([[image, image]] if together else [image], image)
            if together:
                features = {
                    "pixel_values": features["pixel_values"][:1],
                    "image_sizes": features["image_sizes"][:1],
                    "batch_num_images": torch.tensor([len(images)]),
                }
            tensors = {k: v for k, v in features.items() if k in VISUAL_KEYS}
            medium = Medium("image", tensors, count(self.config, "image", tensors), digest(tensors))
            out.append(_Placed(expand_image(self.config, self._words, features), (medium,)))
        return out

    def _features(self, images: Any, image: Image.Image) -> dict[str, Any]:
        family = self._family
        assert family is not None
        options = dict(family.image_options)
        if family.layout == "pixtral":
            merge = int(getattr(self.config, "spatial_merge_size", 1))
            options["patch_size"] = int(self.config.vision_config.patch_size) * merge
        try:
            return dict(self._parts.image_processor(images, return_tensors="pt", **options))
        except (ValueError, ZeroDivisionError, TypeError, OSError) as error:
            if isinstance(error, SaccadeError):
                raise
            reason = str(error).strip().rstrip(".").splitlines()[:1]
            raise InputError(
                f"The image of {image.width}x{image.height} pixels cannot be prepared for {kind_of(self.config)} "
                f"({''.join(reason)}); scale or crop it."
            ) from error

    def _video(self, source: Any, sampling: Mapping[str, Any]) -> _Placed:
        assert self._family is not None and self._family.video is not None and self._words is not None
        rules = self._family.video
        settings = {**rules.settings, **self._parts.video_settings}
        if sampling:
            settings = {**settings, "num_frames": None, "fps": None, **sampling}
            settings = {**settings, **{k: v for k, v in rules.fallback.items() if settings.get(k) is None and len(rules.fallback) > 1}}
        elif not settings.get("num_frames") and not settings.get("fps"):
            settings.update(rules.fallback)
        video = load_video(source, lambda total, rate: rules.sample(total, rate, settings))
        step = int(settings.get("temporal_patch_size", 1))
        tensors = self._video_tensors(self._family, video, settings)
        text = expand_video(self.config, self._words, tensors, video, step)
        kind = "image" if rules.form == "frames" else "video"
        media = tuple(Medium(kind, t, count(self.config, kind, t), digest(t)) for t in tensors)  # type: ignore[arg-type]
        return _Placed(text, media)

    def _video_tensors(self, family: Family, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        name = kind_of(self.config)
        if name == "llava_onevision":
            return [{"pixel_values_videos": square_frames(video.frames, settings)[None]}]
        if name == "internvl":
            return [{"pixel_values": frame[None]} for frame in square_frames(video.frames, settings)]
        if name == "smolvlm":
            frames = smolvlm_frames(video.frames, settings)
            mask = torch.ones(1, 1, *frames.shape[-2:], dtype=torch.long)
            return [{"pixel_values": frame[None, None], "pixel_attention_mask": mask} for frame in frames]
        patches, grid = grid_patches(video.frames, settings, budget_over_time=family.stamps_video)
        tensors = {"pixel_values_videos": patches, "video_grid_thw": grid}
        if family.times_video:
            tensors["second_per_grid_ts"] = torch.tensor([settings["temporal_patch_size"] / video.sampled_fps])
        return [tensors]

    def _tokenized(self, text: str, media: list[Medium], *, templated: bool) -> Prompt:
        """Ids as the composite processors make them: special tokens only where the template wrote none."""
        bos = getattr(self.tokenizer, "bos_token", None)
        written = templated and (self._words is None or (bos is not None and text.startswith(bos)))
        ids = self.tokenizer(text, add_special_tokens=not written)["input_ids"]
        prompt = Prompt(tuple(ids), tuple(media))
        if self._words is not None:
            media_spans(self.config, prompt)  # every medium has found its tokens
        return prompt

    def _wrapped_spans(self, prompt: Prompt) -> list[tuple[int, int]]:
        """Spans of media with their wrapper tokens, in order and apart."""
        if self._family is None or self._words is None:
            return media_spans(self.config, prompt)
        openers, closers = self._wrapper_ids()
        ids = prompt.ids
        spans = sorted(media_spans(self.config, prompt))
        out: list[tuple[int, int]] = []
        for n, (start, stop) in enumerate(spans):
            floor = out[-1][1] if out else 0
            ceiling = spans[n + 1][0] if n + 1 < len(spans) else len(ids)
            while start > floor and ids[start - 1] in openers:
                start -= 1
            while stop < ceiling and ids[stop] in closers:
                stop += 1
            if self._family.stamps_video:  # a timed video has one more pair of wrappers around its timestamps
                opened = sum(i in openers for i in ids[start:stop])
                closed = sum(i in closers for i in ids[start:stop])
                while opened < closed and start > floor:
                    start -= 1
                    opened += ids[start] in openers
            out.append((start, stop))
        return out

    def _wrapper_ids(self) -> tuple[set[int], set[int]]:
        assert self._family is not None and self._words is not None
        openers, closers = {self._words.opener, *self._family.openers}, {self._words.closer, *self._family.closers}
        if self._family.layout == "tiles":
            openers |= {f"<row_{r}_col_{c}>" for r in range(1, 20) for c in range(1, 20)}
        vocabulary = self.tokenizer.get_vocab()
        return {vocabulary[w] for w in openers if w in vocabulary}, {vocabulary[w] for w in closers if w in vocabulary}


def _fill(slots: Sequence[Slot], images: list[Any], videos: list[Any]) -> list[Slot]:
    """Give the places without a source of their own what the caller listed."""
    given = {"image": iter(images), "video": iter(videos)}
    missing = object()
    out = []
    for slot in slots:
        source = slot.source if slot.source is not None else next(given[slot.kind], missing)
        if source is missing:
            raise InputError(
                f"The messages have a place for {'an image' if slot.kind == 'image' else 'a video'} that none was "
                f"given for; pass as many {slot.kind}s as there are places."
            )
        out.append(Slot(slot.kind, source))
    for kind, rest in given.items():
        if left := len(list(rest)):
            raise InputError(
                f"{left} {kind}s were given beyond the places in the messages; add a part of type {kind} for each."
            )
    return out


def _miscounted(found: Sequence[str], wanted: Sequence[str], names: Mapping[str, str]) -> InputError:
    counts = ", ".join(f"{wanted.count(kind)} {kind}s but {found.count(kind)} of {word}" for word, kind in names.items())
    return InputError(
        f"The rendered prompt does not match what was given: {counts}; take placeholders out of the text, or "
        "check that the chat template writes one for every image and video."
    )


def _smolvlm_video_template() -> str:
    """The template that SmolVLM's processor puts in place of the checkpoint's own as soon as there is a video."""
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    return str(DEFAULT_CHAT_TEMPLATE)
