"""Images and videos of one row: media, and the text in place of their placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from saccade.errors import InputError, ModelError, SaccadeError
from saccade.inputs.chat import Slot
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Family, Features, Words
from saccade.inputs.families.other import Unknown
from saccade.inputs.literal import LiteralText
from saccade.inputs.media import LOCAL, MediaLimits, Video, load_image, load_video
from saccade.inputs.parts import Parts
from saccade.inputs.prompt import Medium, Prompt

_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@dataclass(frozen=True, slots=True)
class Placed:
    """Replacement of one placeholder in the text."""

    text: str  # all placeholders and wrappers
    media: tuple[Medium, ...]  # one medium; for a video that the family takes as images, one per frame


@dataclass(frozen=True, slots=True)
class Visuals:
    """Maker of the media of one row."""

    parts: Parts  # of the checkpoint
    family: Family  # bound to its configuration
    words: Words  # the family's placeholders

    def images(self, images: Sequence[Image.Image]) -> list[Placed]:
        """Make all images of the row together, because their number can change what each becomes."""
        return [self._image(f) for f in self.family.prepare_images(self._features, images)]

    def video(self, video: Video, sampling: Mapping[str, Any]) -> Placed:
        """Make one video of its sampled frames."""
        family = self.family
        settings = family.video_settings(self.parts.video_settings, sampling)
        tensors = family.video_tensors(video, settings)
        text = family.expand_video(self.words, tensors, video, settings)
        if family.frames_as_images:
            frames = enumerate(family.medium("image", t) for t in tensors)
            return Placed(text, tuple(replace(medium, frame=(i, len(tensors))) for i, medium in frames))
        return Placed(text, tuple(family.medium("video", t) for t in tensors))

    def _image(self, features: Features) -> Placed:
        tensors = {name: value for name, value in features.items() if name in self.family.visual_keys}
        return Placed(self.family.expand_image(self.words, features), (self.family.medium("image", tensors),))

    def _features(self, given: Any) -> Features:
        """Output of the image processor for images, in the nesting that the family wants."""
        try:
            return dict(self.parts.image_processor(given, return_tensors="pt", **self.family.settings()))
        except (ValueError, ZeroDivisionError, TypeError, OSError) as error:
            if isinstance(error, SaccadeError):
                raise
            sizes = ", ".join(f"{image.width}x{image.height}" for image in _flat(given))
            raise InputError(
                f"The image of {sizes} pixels cannot be prepared for {self.family.name} ({_reason(error)}); scale or "
                "crop it."
            ) from error


def load_slots(
    family: Family, parts: Parts, slots: Sequence[Slot], sampling: Mapping[str, Any], limits: MediaLimits
) -> list[Slot]:
    """Load the images of a conversation and those frames of its videos that a family uses."""
    if len(slots) > limits.media:
        raise InputError(f"The conversation has {len(slots)} images and videos; at most {limits.media} are accepted.")
    loaded = []
    pixels = 0
    for slot in slots:
        source: Image.Image | Video
        if slot.kind == "image":
            source = load_image(slot.source, limits)
            pixels += source.width * source.height
        else:
            source = sampled_video(family, parts, slot.source, sampling, limits)
            pixels += source.frames.size // 3
        if pixels > limits.total_pixels:
            raise InputError(
                f"The images and sampled frames have more than {limits.total_pixels} pixels together; send fewer or "
                "smaller ones."
            )
        loaded.append(Slot(slot.kind, source))
    return loaded


def sampled_video(
    family: Family, parts: Parts, source: Any, sampling: Mapping[str, Any], limits: MediaLimits = LOCAL
) -> Video:
    """Load a video with the frames that a family uses; all of them where its own processor samples."""
    if family.is_composite:
        return load_video(source, limits=limits)
    settings = family.video_settings(parts.video_settings, sampling)
    return load_video(source, lambda total, fps: family.sample_frames(total, fps, settings), limits)


def composite_prompt(
    parts: Parts,
    text: str,
    slots: Sequence[Slot],
    add_special_tokens: bool,
    literal: LiteralText | None = None,
) -> Prompt:
    """One row of a family outside the registry, through its own Hugging Face processor.

    All images and videos of the row become one medium; its tensors are the processor's output besides ids and masks.
    """
    family = family_of(parts.config)
    assert isinstance(family, Unknown)
    if parts.composite is None:
        raise ModelError(f"The family {family.name} is not built in; load its processor from a checkpoint.")
    media = {
        "images": [s.source for s in slots if s.kind == "image"],
        "videos": [s.source.frames for s in slots if s.kind == "video"],
    }
    try:
        processor = parts.composite
        if literal is not None and literal.character in text:
            processor = literal.through(processor)
        made = processor(
            text=[text],
            return_tensors="pt",
            add_special_tokens=add_special_tokens,
            **{kind: given for kind, given in media.items() if given},
        )
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise InputError(
            f"The processor of {family.name} refuses the prompt ({_reason(error)}); check its images."
        ) from error
    ids = tuple(made["input_ids"][0].tolist())
    tensors = {k: v for k, v in made.items() if k not in _TEXT_KEYS and hasattr(v, "shape")}
    return Prompt(ids, (family.whole_medium(ids, tensors),) if tensors else ())


def _flat(images: Any) -> list[Image.Image]:
    return [image for nested in images for image in _flat(nested)] if isinstance(images, list) else [images]


def _reason(error: Exception) -> str:
    """First line of a foreign error, without its full stop."""
    return "".join(str(error).strip().rstrip(".").splitlines()[:1])
