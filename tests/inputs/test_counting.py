"""Placeholder counts and pixel sizes for images of any shape are those of transformers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import kit
from torchvision_free import VIDEO_PROCESSORS
from transformers.models.qwen3_vl import video_processing_qwen3_vl

from saccade.errors import InputError
from saccade.inputs.families import family_of
from saccade.inputs.families.llava import LlavaNext
from saccade.inputs.families.qwen_vl import Qwen3VL

SIDE = st.integers(1, 3000)


def anyres(name: str, height: int, width: int) -> int:
    family = family_of(kit(name).config)
    assert isinstance(family, LlavaNext)
    pixels = torch.empty(1, family.tile_count(height, width), 3, 28, 28)
    return family.count("image", {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})


@given(SIDE, SIDE)
def test_llava_next_counts_what_is_left_of_the_tiles(height: int, width: int) -> None:
    theirs = kit("llava_next").theirs
    assert anyres("llava_next", height, width) == theirs._get_number_of_features(height, width, 28, 28) - 1


@given(SIDE, SIDE)
def test_llava_onevision_shrinks_what_is_too_much(height: int, width: int) -> None:
    theirs = kit("llava_onevision").theirs
    assert anyres("llava_onevision", height, width) == theirs._get_number_of_features(height, width, 28, 28)


@settings(deadline=None)
@given(st.integers(2, 40), SIDE, SIDE, st.booleans())
def test_qwen3_videos_have_the_sizes_of_their_processor(frames: int, height: int, width: int, cap: bool) -> None:
    chosen = {
        **Qwen3VL.video_defaults,
        "size": {"shortest_edge": 4096, "longest_edge": 2_000_000},
        "cap_pixels_per_frame": cap,
    }
    processor = VIDEO_PROCESSORS["Qwen3VLVideoProcessor"](size=chosen["size"])
    bounds = {"min_pixels": 4096, "max_pixels": 2_000_000}
    if cap:
        share = max(min(processor.max_video_tokens * 32 * 32, 2_000_000 // frames), int(4096 * 1.05))
        bounds["max_pixels"] = share * frames
    try:
        expected = video_processing_qwen3_vl.smart_resize(frames, height, width, 2, 32, **bounds)
    except ValueError:
        expected = None
    try:
        made = Qwen3VL.frame_size((frames, height, width, 3), chosen)
    except InputError:
        made = None
    assert made == expected
