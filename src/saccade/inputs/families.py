"""What differs between model families on the way in: data, not code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from saccade.inputs import video

Layout = Literal["text", "squares", "runs", "pixtral", "anyres", "grid", "tiles"]
"""How the tensors of several media lie in one batch:

- squares: ``pixel_values [n, 3, H, W]``, one per image (LLaVA, Gemma 3)
- runs: ``pixel_values [n, 3, H, W]``, several per image, side by side in the prompt (InternVL)
- pixtral: ``pixel_values [n, 3, H, W]`` padded to the largest, true sizes in ``image_sizes``
- anyres: ``pixel_values [n, patches, 3, H, W]`` padded to the most patches (LLaVA-NeXT, LLaVA-OneVision)
- grid: ``pixel_values [patches, values]`` of all images, cut by ``image_grid_thw`` (Qwen-VL)
- tiles: ``pixel_values [rows, tiles, 3, H, W]``, padded with empty tiles (Idefics3, SmolVLM)
"""

_CLIP = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}
_STANDARD = {"image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD}
_BICUBIC, _LANCZOS = 3, 1


@dataclass(frozen=True, slots=True)
class VideoRules:
    """How a family looks at videos.

    Attributes:
        form: what a video becomes: patches of a space-time grid (Qwen-VL), one stack of frames
            (LLaVA-OneVision), or one image per frame (InternVL, SmolVLM).
        sample: which frames are kept.
        settings: the video processor's defaults, under the names of ``video_preprocessor_config.json``.
        fallback: sampling for files when a checkpoint names neither ``num_frames`` nor ``fps``; transformers
            itself would then take every frame.
    """

    form: Literal["grid", "stack", "frames"]
    sample: video.Sampler
    settings: Mapping[str, Any]
    fallback: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family takes images and videos.

    Attributes:
        layout: how tensors of several media lie in one batch.
        openers: wrapper tokens in front of a medium's placeholders.
        closers: wrapper tokens behind them.
        types: forward argument that tells image tokens from text, where the model needs it.
        raw: how an image stands in a prompt without chat template; ``{}`` is the placeholder.
        image_options: keyword arguments that the composite processor gives its image processor.
        video: how videos are taken; None where the family takes none.
        times_video: whether the model takes ``second_per_grid_ts``.
        stamps_video: whether every temporal patch follows a text timestamp.
    """

    layout: Layout
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    types: Literal["mm_token_type_ids", "token_type_ids"] | None = None
    raw: str = "{}"
    image_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    video: VideoRules | None = None
    times_video: bool = False
    stamps_video: bool = False


def _qwen(pixels: Mapping[str, Any], sample: video.Sampler, **differs: Any) -> Family:
    settings = {
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_frames": 4,
        "max_frames": 768,
        "resample": _BICUBIC,
    }
    return Family(
        layout="grid",
        openers=("<|vision_start|>",),
        closers=("<|vision_end|>",),
        types="mm_token_type_ids",
        raw="<|vision_start|>{}<|vision_end|>",
        video=VideoRules("grid", sample, {**settings, **pixels}, {"fps": 2}),
        **differs,
    )


_QWEN2_VIDEO = {
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "patch_size": 14,
    **_CLIP,
}
_QWEN3_VIDEO = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "patch_size": 16,
    "fps": 2,
    "max_video_tokens": 768,
    **_STANDARD,
}
_SQUARE_VIDEO = {"size": {"height": 384, "width": 384}, "resample": _BICUBIC, **_CLIP}
_SMOLVLM_VIDEO = {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "resample": _LANCZOS,
    **_STANDARD,
}
_PIXTRAL = Family("pixtral", closers=("[IMG_END]",))
_IDEFICS3 = {
    "openers": ("<fake_token_around_image>", "<global-img>"),
    "closers": ("<fake_token_around_image>",),
    "image_options": MappingProxyType({"return_row_col_info": True}),
}
_TEXT = Family("text")
_QWEN3_VL = _qwen(_QWEN3_VIDEO, video.qwen3_vl, stamps_video=True)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _TEXT,
        "mistral": _TEXT,
        "qwen2": _TEXT,
        "qwen3": _TEXT,
        "llava": Family("squares"),
        "pixtral": _PIXTRAL,
        "mistral3": _PIXTRAL,
        "llava_next": Family("anyres", image_options=MappingProxyType({"do_pad": True})),
        "llava_onevision": Family(
            "anyres", video=VideoRules("stack", video.uniform, _SQUARE_VIDEO, {"num_frames": 32})
        ),
        "qwen2_vl": _qwen({**_QWEN2_VIDEO, "max_video_tokens": 128_000}, video.qwen2_vl),
        "qwen2_5_vl": _qwen({**_QWEN2_VIDEO, "max_video_tokens": 128_000}, video.qwen2_vl, times_video=True),
        "qwen3_vl": _QWEN3_VL,
        "qwen3_vl_moe": _QWEN3_VL,
        "idefics3": Family("tiles", **_IDEFICS3),  # type: ignore[arg-type]
        "smolvlm": Family(
            "tiles",
            video=VideoRules("frames", video.smolvlm, _SMOLVLM_VIDEO, {"num_frames": 64, "fps": 1}),
            **_IDEFICS3,  # type: ignore[arg-type]
        ),
        "gemma3": Family(
            "squares",
            openers=("<start_of_image>",),
            closers=("<end_of_image>",),
            types="token_type_ids",
            image_options=MappingProxyType({"do_convert_rgb": True, "do_pan_and_scan": False}),
        ),
        "internvl": Family(
            "runs",
            openers=("<img>",),
            closers=("</img>",),
            image_options=MappingProxyType({"crop_to_patches": True}),
            video=VideoRules("frames", video.internvl, _SQUARE_VIDEO, {"num_frames": 8}),
        ),
    }
)
"""``model_type`` -> family; ``pixtral`` stands for ``llava`` with a Pixtral vision tower."""


def kind_of(config: Any) -> str:
    """The key of ``FAMILIES`` for a Hugging Face configuration or a ``model_type``; it may be unknown there."""
    if isinstance(config, str):
        return config
    name: str = config.model_type
    if name == "llava" and config.vision_config.model_type == "pixtral":
        return "pixtral"
    return name


def family_of(config: Any) -> Family | None:
    """The family of a Hugging Face configuration or a ``model_type``; None when it is not in the table.

    A configuration without vision tower is a text family.
    """
    family = FAMILIES.get(kind_of(config))
    if family is None and not isinstance(config, str) and getattr(config, "vision_config", None) is None:
        return _TEXT
    return family


def visual_ids(config: Any) -> dict[Literal["image", "video"], int]:
    """The ids of a configuration's image and video placeholders, those that it has."""
    found: dict[Literal["image", "video"], int] = {}
    family = family_of(config)
    if family is not None and family.layout == "text":
        return found
    image = getattr(config, "image_token_id", None)
    video = getattr(config, "video_token_id", None)
    if image is not None:
        found["image"] = int(image)
    if video is not None and video != image:
        found["video"] = int(video)
    return found
