"""View P of families that take pictures of any size: every picture at half its resolution."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from checkpoints import picture
from families import FAMILIES, VISUAL_FAMILIES
from harness import prompts_of, target
from saccade.draft.ensemble.views import HalvedPictures
from saccade.errors import InputError
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Medium, Prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "inputs"))
from kits import kit

RESIZED = [name for name in VISUAL_FAMILIES if family_of(target(name).config).is_resizable]


def read(name: str, prompt: Prompt) -> Prompt:
    return HalvedPictures(target(name).config).rewrite(prompt)


@pytest.mark.parametrize("name", [n for n in RESIZED if not n.startswith("mistral3")])
def test_even_sides_leave_a_quarter_of_the_visual_tokens(name: str) -> None:
    (prompt,) = [p for p in prompts_of(name) if p.media[0].n_tokens == 4]  # the third picture, 2 x 2 tokens
    seen = read(name, prompt)
    assert seen.media[0].n_tokens == 1
    assert read(name, seen) == seen  # a single visual token cannot be halved


def test_a_picture_is_kept_whole_where_the_model_fails_on_a_single_visual_token() -> None:
    *_, prompt = prompts_of("mistral3")
    assert read("mistral3", prompt) == prompt


UNITS = {"pixtral": 8, "mistral3": 16, "qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels along the side of a visual token."""
SIZES = {name: [(4, 4), (6, 4), (4, 6), (5, 4), (8, 2)] for name in UNITS} | {
    "mistral3": [(4, 4), (4, 2), (2, 4), (3, 4)]
}
"""Columns and rows of visual tokens, such that the processor leaves picture and halved picture at their sizes."""


def smaller(image: Image.Image, columns: int, rows: int, unit: int) -> Image.Image:
    return image.resize(((columns + 1) // 2 * unit, (rows + 1) // 2 * unit), Image.Resampling.BICUBIC)


def assert_same(seen: Prompt, expected: Prompt) -> None:
    assert seen.ids == expected.ids
    for ours, theirs in zip(seen.media, expected.media, strict=True):
        assert ours.n_tokens == theirs.n_tokens
        for key, value in theirs.tensors.items():
            assert torch.allclose(ours.tensors[key].float(), value.float(), atol=0.03)  # theirs are of 8 bits


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in UNITS for size in SIZES[name]])
def test_it_is_the_processor_s_prompt_for_a_smaller_picture(name: str, size: tuple[int, int]) -> None:
    processor, unit = kit(name).ours, UNITS[name]
    large = picture(3, (size[0] * unit, size[1] * unit))
    original, expected = (processor.prompt("What is it?", images=[p]) for p in (large, smaller(large, *size, unit)))
    assert original.media[0].n_tokens == size[0] * size[1]
    assert_same(HalvedPictures(processor.config).rewrite(original), expected)


@pytest.mark.parametrize("name", UNITS)
def test_a_sharp_edge_stays_between_black_and_white(name: str) -> None:
    """As in the processor, whose 8 bits cannot overshoot."""
    processor, unit = kit(name).ours, UNITS[name]
    black = Image.new("RGB", (4 * unit, 4 * unit))
    black.paste((255, 255, 255), (2 * unit + 1, 0, 4 * unit, 4 * unit))
    original, expected = (processor.prompt("?", images=[p]) for p in (black, smaller(black, 4, 4, unit)))
    assert_same(HalvedPictures(processor.config).rewrite(original), expected)


@pytest.mark.parametrize(("name", "size"), [("qwen2_vl", (8, 4)), ("qwen2_5_vl", (8, 4)), ("qwen3_vl", (4, 2))])
def test_a_halved_video_keeps_its_frames_and_their_times(name: str, size: tuple[int, int]) -> None:
    processor, unit = kit(name).ours, UNITS[name]
    frames = [picture(shade, (size[0] * unit, size[1] * unit)) for shade in range(4)]
    original, expected = (
        processor.prompt("What happens?", videos=[f])
        for f in (frames, [smaller(frame, *size, unit) for frame in frames])
    )
    assert original.media[0].n_tokens == 2 * size[0] * size[1]  # two frames in a patch
    assert_same(HalvedPictures(processor.config).rewrite(original), expected)


@pytest.mark.parametrize("name", RESIZED)
def test_a_longer_conversation_begins_with_the_same_reading(name: str) -> None:
    """Or nothing of the row's cache could be kept for the next turn."""
    case = FAMILIES[name]
    (first,) = split(target(name).config, case.row_inputs("image", 1))
    (longer,) = split(target(name).config, case.continued("image", 1, [20, 30]))
    once, again = read(name, first), read(name, longer)
    assert again.ids[: len(once)] == once.ids
    assert again.media[0].digest == once.media[0].digest != again.media[1].digest


def test_pictures_of_one_size_cannot_be_halved() -> None:
    (prompt,) = prompts_of("llava", rows=1)
    with pytest.raises(InputError, match="have a fixed size"):
        family_of(target("llava").config).halved(prompt.media[0])


def test_half_precision_pictures_stay_so() -> None:
    (prompt,) = prompts_of("mistral3", rows=1)
    (medium,) = prompt.media
    rough = {**medium.tensors, "pixel_values": medium.tensors["pixel_values"].bfloat16()}
    small = family_of(target("mistral3").config).halved(Medium("image", rough, medium.n_tokens, "")).tensors
    assert small["pixel_values"].dtype == torch.bfloat16
    exact = family_of(target("mistral3").config).halved(medium).tensors["pixel_values"]
    assert torch.allclose(small["pixel_values"].float(), exact, atol=0.05)
