"""Placeholder counts and pixel sizes for images of any shape are those of transformers."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from kits import kit

from saccade.inputs.families import family_of
from saccade.inputs.families.llava import LlavaNext

SIDE = st.integers(1, 3000)


def anyres(name: str, height: int, width: int) -> int:
    family = family_of(kit(name).config)
    assert isinstance(family, LlavaNext)
    pixels = torch.empty(1, math.prod(family.tile_grid(height, width)) + 1, 3, 28, 28)
    return family.count("image", {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})


@given(SIDE, SIDE)
def test_llava_next_counts_what_is_left_of_the_tiles(height: int, width: int) -> None:
    theirs = kit("llava_next").theirs
    assert anyres("llava_next", height, width) == theirs._get_number_of_features(height, width, 28, 28) - 1


@given(SIDE, SIDE)
def test_llava_onevision_shrinks_what_is_too_much(height: int, width: int) -> None:
    theirs = kit("llava_onevision").theirs
    assert anyres("llava_onevision", height, width) == theirs._get_number_of_features(height, width, 28, 28)
