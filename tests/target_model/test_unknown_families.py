"""Architectures outside the tables, which pass the check at load: their answers are `generate`'s, pictures and all."""

from __future__ import annotations

import pytest
import torch

from families import UNKNOWN, VIDEO, Inputs, Piece
from saccade.hf import speculate

NEW = 24


def both(name: str, inputs: Inputs) -> tuple[list[list[int]], list[list[int]]]:
    case = UNKNOWN[name]
    own = speculate(case.draft_model(), gamma=3)
    theirs = case.model().generate(**inputs, max_new_tokens=NEW, do_sample=False)
    ours = case.model().generate(**inputs, max_new_tokens=NEW, do_sample=False, custom_generate=own)
    return theirs.tolist(), ours.tolist()


@pytest.mark.parametrize("kind", ["text", "image", "images2", "video"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_pictures_and_videos_are_read_as_generate_reads_them(name: str, kind: str) -> None:
    theirs, ours = both(name, UNKNOWN[name].inputs(kind))
    assert ours == theirs


def test_a_video_beside_a_picture_is_read_too() -> None:
    case = UNKNOWN["llava_next_video"]
    assert case.image
    assert case.video
    generator = torch.Generator().manual_seed(3)
    words = Piece((9, 40, 71), {})
    inputs = case._assemble([[words, case.image(generator, 0), words, case.video(generator, 1), words]])
    assert (inputs["input_ids"] == VIDEO).any()
    theirs, ours = both("llava_next_video", inputs)
    assert ours == theirs
