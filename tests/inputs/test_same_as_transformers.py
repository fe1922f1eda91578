"""Ids and tensors are those of the family's own Hugging Face processor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from kits import VIDEO, VISUAL, Kit, kit
from PIL import Image
from torchvision_free import patches_merge
from transformers.video_utils import VideoMetadata

from saccade.inputs.families import check, family_of, split
from saccade.inputs.families.family import Prompt
from saccade.inputs.families.gemma import Gemma4Unified
from saccade.inputs.families.llava import LlavaNext
from saccade.inputs.media import Video
from saccade.inputs.processor import InputProcessor
from versions import OPACITY

PIXELS = 2e-6
"""Float tolerance: both sides resize with Pillow and normalise in float32, in a different order."""

TYPES = ("mm_token_type_ids", "token_type_ids")


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA").convert(mode)


def clip(frames: int, width: int, height: int, fps: float, total: int | None = None) -> Video:
    noise = np.random.default_rng(7).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    total = total or frames
    return Video(noise, times=[i * total // frames / fps for i in range(frames)], duration=total / fps)


def user(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


def theirs(kit: Kit, rows: list[list[dict[str, Any]]], images: list[list[Image.Image]]) -> dict[str, torch.Tensor]:
    """What the composite processor makes of several conversations, padded on the left."""
    text = [kit.theirs.apply_chat_template(row, add_generation_prompt=True) for row in rows]
    written = kit.ours.tokenizer.bos_token is not None and text[0].startswith(kit.ours.tokenizer.bos_token)
    return kit.theirs(
        text=text,
        images=images if any(images) else None,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=not written,
    )


def assert_same_row(kit: Kit, prompt: Prompt, batch: dict[str, torch.Tensor]) -> None:
    assert list(prompt.ids) == batch["input_ids"][0].tolist()
    expected = {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask", *TYPES)}
    made = family_of(kit.config).join(prompt.media)
    assert made.keys() == expected.keys() - {"num_crops", "rows", "cols"}
    for name, value in made.items():
        torch.testing.assert_close(value, torch.as_tensor(expected[name]), atol=PIXELS, rtol=0)
    for name, value in family_of(kit.config).type_ids(prompt.ids).items():
        assert value.tolist() == batch[name].tolist()
    check(kit.config, batch)


def assert_same_prompt(a: Prompt, b: Prompt) -> None:
    assert a.ids == b.ids
    assert [(m.kind, m.n_tokens, m.digest) for m in a.media] == [(m.kind, m.n_tokens, m.digest) for m in b.media]


SHAPES = [(40, 30), (1, 1), (17, 99), (99, 17), (28, 28), (230, 60), (400, 500)]


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("name", VISUAL)
def test_one_image_gives_the_processors_ids_and_tensors(name: str, size: tuple[int, int]) -> None:
    k, image = kit(name), picture(*size)
    messages = user({"type": "image"}, "What is\n\nthis?")
    assert_same_row(k, k.ours.prompt(messages, [image]), theirs(k, [messages], [[image]]))


@pytest.mark.parametrize("mode", ["L", *(pytest.param(m, marks=OPACITY) for m in ("RGBA", "LA")), "P", "1", "CMYK"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "idefics3", "gemma3"])
def test_grey_transparent_and_palette_images_look_as_the_processor_sees_them(name: str, mode: str) -> None:
    k, image = kit(name), picture(50, 40, mode=mode)
    messages = user({"type": "image"}, "?")
    assert_same_row(k, k.ours.prompt(messages, [image]), theirs(k, [messages], [[image]]))


@pytest.mark.parametrize("name", VISUAL)
def test_several_images_in_one_row_keep_their_order(name: str) -> None:
    k = kit(name)
    images = [picture(40, 30, 1), picture(64, 130, 2), picture(28, 28, 3)]
    messages = user("Compare", {"type": "image"}, "with", {"type": "image"}, {"type": "image"}, "now.")
    prompt = k.ours.prompt(messages, images)
    assert len(prompt.media) == 3
    assert_same_row(k, prompt, theirs(k, [messages], [images]))


@pytest.mark.parametrize("name", VISUAL)
def test_a_split_batch_gives_the_prompts_that_each_row_alone_gives(name: str) -> None:
    k = kit(name)
    images = [[picture(40, 30, 1)], [picture(64, 130, 2), picture(28, 28, 3)], [], [picture(400, 200, 4)]]
    rows = [user(*[{"type": "image"}] * len(row), f"Row {i}" * (i + 1)) for i, row in enumerate(images)]
    if name == "llava_onevision" or name in ("idefics3", "smolvlm", "gemma3", "gemma3n", "gemma4"):
        given = images
    else:
        given = [row for row in images if row]
    batch = theirs(k, rows, given)
    prompts = split(k.config, batch)
    for prompt, row, own in zip(prompts, rows, images, strict=True):
        assert_same_prompt(prompt, k.ours.prompt(row, own))


@pytest.mark.parametrize("name", VISUAL)
def test_a_string_is_one_user_message_with_its_images_first(name: str) -> None:
    k, image = kit(name), picture(40, 30)
    assert_same_prompt(k.ours.prompt("Hello?", [image]), k.ours.prompt(user({"type": "image"}, "Hello?"), [image]))


@pytest.mark.parametrize("size", [(40, 30), (17, 99)], ids=str)
def test_pictures_of_gemma_4_unified_are_gemma_4s_with_their_patches_merged(size: tuple[int, int]) -> None:
    k = kit("gemma4")
    unified = Gemma4Unified(hf.Gemma4UnifiedConfig(vision_config={"patch_size": 2}), "gemma4_unified")
    (made,) = unified.prepare_images(k.ours._features, [picture(*size)])
    patches, places = (k.ours._features([picture(*size)])[name] for name in ("pixel_values", "image_position_ids"))
    count = unified.count("image", made)
    merged, at = patches_merge(patches[:, : count * 9], places[:, : count * 9], count)
    assert torch.equal(made["pixel_values"], torch.nn.functional.pad(merged, (0, 0, 0, 70 - count)))
    assert torch.equal(made["image_position_ids"], torch.nn.functional.pad(at, (0, 0, 0, 70 - count), value=-1))


@pytest.mark.parametrize("fps", [None, 3.0, 29.97])
@pytest.mark.parametrize("frames", [4, 5, 8])
@pytest.mark.parametrize("name", VIDEO)
@pytest.mark.filterwarnings("ignore::saccade.errors.SaccadeWarning")  # of the assumed rate
def test_a_video_gives_the_processors_ids_and_tensors(name: str, frames: int, fps: float | None) -> None:
    total = frames if fps is None else frames * 5
    k, video = kit(name), clip(frames, 60, 45, fps or 24.0, total)
    messages = user({"type": "video"}, "What happens?")
    text = k.theirs.apply_chat_template(messages, add_generation_prompt=True)
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=fps,
        duration=None if fps is None else total / fps,
        frames_indices=[i * total // frames for i in range(frames)],
    )
    if name == "smolvlm" and fps is None:
        metadata.duration = video.duration  # their processor would name the last frame's second instead
    batch = k.theirs(
        text=[text],
        videos=[[torch.from_numpy(video.frames)]] if name == "smolvlm" else [torch.from_numpy(video.frames)],
        video_metadata=[metadata],
        return_tensors="pt",
        do_sample_frames=False,
    )
    prompt = k.ours.prompt(messages, videos=[video if fps else video.frames])
    assert_same_row(k, prompt, batch)
    (again,) = split(k.config, batch)
    assert [(m.kind, m.n_tokens) for m in again.media] == [(m.kind, m.n_tokens) for m in prompt.media]


@pytest.mark.parametrize("size", [(60, 45), (300, 20), (8, 8), (500, 400)], ids=str)
@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_qwen_video_patches_have_the_video_processors_sizes(name: str, cap: bool, size: tuple[int, int]) -> None:
    k, video = kit(name), clip(6, *size, fps=2.0)
    processor = k.theirs.video_processor
    expected = processor(
        torch.from_numpy(video.frames), cap_pixels_per_frame=cap, do_sample_frames=False, return_tensors="pt"
    )
    settings = {**k.ours.video_settings, "cap_pixels_per_frame": cap}
    ours = InputProcessor(k.config, k.ours.tokenizer, None, settings, k.ours.chat_template)
    made = ours.prompt("?", videos=[video]).media[0].tensors
    assert made["video_grid_thw"].tolist() == expected["video_grid_thw"].tolist()
    torch.testing.assert_close(made["pixel_values_videos"], expected["pixel_values_videos"], atol=PIXELS, rtol=0)


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_images_and_videos_of_one_row_stay_in_prompt_order(name: str) -> None:
    k = kit(name)
    video, image = clip(4, 60, 45, 2.0), picture(40, 30)
    parts: list[dict[str, Any] | str] = [{"type": "video"}, "and", {"type": "image"}, "?"]
    alone = [k.ours.prompt("?", videos=[video]), k.ours.prompt("?", [image])]
    if name == "llava_onevision":  # its template writes images first, wherever they are
        alone.reverse()
    prompt = k.ours.prompt(user(*parts), [image], [video])
    assert [m.digest for m in prompt.media] == [m.digest for p in alone for m in p.media]
    (again,) = split(k.config, {"input_ids": torch.tensor([prompt.ids]), **family_of(k.config).join(prompt.media)})
    assert_same_prompt(again, prompt)


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
