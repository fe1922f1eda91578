"""One image or video as its user gave it, made into media and into the text that stands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from saccade.errors import InputError, SaccadeError
from saccade.inputs.counting import count
from saccade.inputs.cutting import VISUAL_KEYS
from saccade.inputs.expanding import Words, expand_image, expand_video
from saccade.inputs.families import Family, VideoRules, family_of, kind_of
from saccade.inputs.media import digest, load_image
from saccade.inputs.parts import Parts
from saccade.inputs.patches import grid_patches, smolvlm_frames, square_frames
from saccade.inputs.prompt import Medium
from saccade.inputs.video import Video, load_video


@dataclass(frozen=True, slots=True)
class Placed:
    """What one place in the text became.

    Attributes:
        text: all placeholders and wrappers.
        media: one medium; for a video that the family sees as images, one per frame.
    """

    text: str
    media: tuple[Medium, ...]


@dataclass(frozen=True, slots=True)
class Visuals:
    """Makes the media of one row.

    Attributes:
        parts: of the checkpoint.
        words: the family's placeholders.
    """

    parts: Parts
    words: Words

    def images(self, sources: Sequence[Any]) -> list[Placed]:
        """Make all images of the row; they come together, because LLaVA-OneVision does not tile several.

        Raises:
            InputError: an image cannot be read or has a shape that the family does not take.
        """
        images = [load_image(source) for source in sources]
        if kind_of(self.parts.config) == "llava_onevision" and len(images) > 1:
            row = self._features([images], images)
            sizes = zip(row["pixel_values"], row["image_sizes"], strict=True)
            together = torch.tensor([len(images)])
            features = [
                {"pixel_values": p[None], "image_sizes": s[None], "batch_num_images": together}
                for p, s in sizes
            ]
        else:
            features = [self._features([image], [image]) for image in images]
        return [self._image(f) for f in features]

    def video(self, source: Any, sampling: Mapping[str, Any]) -> Placed:
        """Make one video.

        Args:
            source: what :func:`~saccade.inputs.video.load_video` takes.
            sampling: ``num_frames`` or ``fps``, in place of the checkpoint's.

        Raises:
            InputError: the video cannot be read.
        """
        config = self.parts.config
        family = family_of(config)
        assert family is not None
        assert family.video is not None
        settings = video_settings(family.video, self.parts, sampling)
        sample = family.video.sample
        video = load_video(source, lambda total, fps: sample(total, fps, settings))
        tensors = _video_tensors(kind_of(config), family, video, settings)
        text = expand_video(config, self.words, tensors, video, int(settings.get("temporal_patch_size", 1)))
        if family.video.form == "frames":
            frames = enumerate(self._medium("image", t) for t in tensors)
            return Placed(text, tuple(replace(medium, frame=(i, len(tensors))) for i, medium in frames))
        return Placed(text, tuple(self._medium("video", t) for t in tensors))

    def _image(self, features: Mapping[str, Any]) -> Placed:
        tensors = {name: value for name, value in features.items() if name in VISUAL_KEYS}
        return Placed(
            expand_image(self.parts.config, self.words, features), (self._medium("image", tensors),)
        )

    def _medium(self, kind: Any, tensors: dict[str, Tensor]) -> Medium:
        return Medium(kind, tensors, count(self.parts.config, kind, tensors), digest(tensors))

    def _features(self, given: Any, images: Sequence[Image.Image]) -> dict[str, Any]:
        """What the family's image processor makes of images, in the nesting that it wants."""
        config = self.parts.config
        family = family_of(config)
        assert family is not None
        options = dict(family.image_options)
        if family.layout == "pixtral":
            merge = int(getattr(config, "spatial_merge_size", 1))
            options["patch_size"] = int(config.vision_config.patch_size) * merge
        try:
            return dict(self.parts.image_processor(given, return_tensors="pt", **options))
        except (ValueError, ZeroDivisionError, TypeError, OSError) as error:
            if isinstance(error, SaccadeError):
                raise
            reason = "".join(str(error).strip().rstrip(".").splitlines()[:1])
            sizes = ", ".join(f"{image.width}x{image.height}" for image in images)
            raise InputError(
                f"The image of {sizes} pixels cannot be prepared for {kind_of(config)} ({reason}); scale or crop it."
            ) from error


def video_settings(rules: VideoRules, parts: Parts, given: Mapping[str, Any]) -> dict[str, Any]:
    """The family's defaults, under the checkpoint's settings, under what the caller wants."""
    settings = {**rules.settings, **parts.video_settings}
    named = {name: settings.pop(name) for name in ("num_frames", "fps") if settings.get(name)}
    if len(rules.fallback) > 1:  # the family samples by both at once
        return {**settings, **rules.fallback, **named, **given}
    return {**settings, **(given or named or rules.fallback)}


def _video_tensors(
    name: str, family: Family, video: Video, settings: Mapping[str, Any]
) -> list[dict[str, Tensor]]:
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
