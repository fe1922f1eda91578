"""Selections of visual tokens against NumPy, and how scores move between grids."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from families import FAMILIES, IMAGE, VISUAL_FAMILIES
from saccade.draft.pruning import (
    Pruning,
    frames_of,
    places_of,
    resample,
    spread,
    two_stages,
)
from saccade.errors import SaccadeWarning
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Medium, Prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "inputs"))
from kits import VIDEO, kit

SCORES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)
"""Whole numbers: their sums are exact, so that a threshold is met or not."""


def numpy_two_stages(scores: np.ndarray[Any, Any], budget: int, mass: float) -> list[int]:
    order = np.argsort(-scores, kind="stable")
    shares = np.cumsum(scores[order])
    enough = np.concatenate([[0], shares]) >= mass * scores.sum()
    first = order[: min(int(np.argmax(enough)), budget)]
    others = np.setdiff1d(np.arange(len(scores)), first)
    rest = budget - len(first)
    steps = (2 * np.arange(rest) + 1) * len(others) // max(2 * rest, 1)
    return sorted(np.concatenate([first, others[steps]]).astype(int).tolist())


@pytest.mark.parametrize("name", VIDEO)
def test_a_video_s_share_stays_of_its_frames_too(name: str) -> None:
    processor = kit(name).ours
    film = np.random.default_rng(0).integers(0, 256, (8, 100, 100, 3), np.uint8)
    images = [Image.fromarray(film[0])]
    prompt = processor.prompt("What?", images=images, videos=[film])
    left = {}
    for images_share, videos_share in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
        pruning = Pruning("uniform", keep_images=images_share, keep_videos=videos_share)
        dropped = set(pruning.dropped(processor.config, prompt))
        left[images_share, videos_share] = [
            sum(place not in dropped for place in places) for places in places_of(processor.config, prompt)
        ]
    whole = left[1.0, 1.0]
    for medium, here, image_cut, video_cut in zip(prompt.media, whole, left[0.5, 1.0], left[1.0, 0.5], strict=True):
        cut, kept = (video_cut, image_cut) if medium.is_of_video else (image_cut, video_cut)
        assert cut == (here + 1) // 2 < here == kept
    assert {medium.is_of_video for medium in prompt.media} == {True, False}


@given(SCORES, st.floats(0, 0.99), st.data())
def test_two_stages_are_those_of_numpy(scores: list[int], mass: float, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, len(scores)))
    kept = two_stages(scores, budget, mass)
    assert kept == numpy_two_stages(np.array(scores), budget, mass)
    assert len(set(kept)) == budget


@given(SCORES, st.data())
def test_attention_alone_keeps_the_highest(scores: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, len(scores)))
    kept = two_stages(scores, budget, 1.0)
    assert kept == sorted(np.argsort(-np.array(scores), kind="stable")[:budget].tolist())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_an_even_spread_gives_every_frame_its_part(frames: list[int], data: st.DataObject) -> None:
    size = min(frames)
    frames = [size] * len(frames)
    budget = data.draw(st.integers(1, sum(frames)))
    kept = spread(frames, budget)
    assert kept == sorted(set(kept))
    assert len(kept) == budget
    parts = np.bincount([k // size for k in kept], minlength=len(frames))
    assert parts.max() - parts.min() <= 1
    for frame, part in enumerate(parts):
        steps = np.diff([k % size for k in kept if k // size == frame])
        assert part < 2 or steps.max() - steps.min() <= 1


def test_every_fifth_token_stays_of_an_image_and_every_tenth_of_a_video() -> None:
    assert spread([25], 5) == [2, 7, 12, 17, 22]
    assert spread([20, 20], 4) == [5, 15, 25, 35]
    assert spread([4, 4, 4], 2) == [6, 10]


@pytest.mark.parametrize("select", ["uniform", "attention", "specvlm"])
def test_a_share_of_one_keeps_everything(select: Any) -> None:
    pruning = Pruning(select, keep_images=1.0, keep_videos=1.0)
    (prompt,) = split(FAMILIES["llava"].model().config, FAMILIES["llava"].row_inputs("images2", 0))
    assert pruning.dropped(FAMILIES["llava"].model().config, prompt) == []
    assert not pruning.needs_attention


def test_two_stages_of_the_paper_keep_the_seen_and_spread_the_rest() -> None:
    scores = [0.0, 0.0, 8.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert two_stages(scores, 4, 0.4) == [1, 2, 5, 8]
    assert two_stages(scores, 4, 1.0) == [0, 2, 4, 8]
    assert two_stages([0.0] * 6, 3, 0.4) == [1, 3, 5]


# --------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in VISUAL_FAMILIES for k in ("image", "images2", "video") if k in FAMILIES[n].kinds],
)
def test_every_medium_keeps_its_share_and_all_text_stays(name: str, kind: str) -> None:
    config = FAMILIES[name].model().config
    (prompt,) = split(config, FAMILIES[name].row_inputs(kind, 0))
    columns = torch.rand(len(prompt), generator=torch.Generator().manual_seed(0))
    for select in ("uniform", "attention", "specvlm"):
        pruning = Pruning(select, keep_images=0.5, keep_videos=0.25)  # type: ignore[arg-type]
        dropped = set(pruning.dropped(config, prompt, prompt, columns, config))
        for places, medium in zip(places_of(config, prompt), prompt.media, strict=True):
            assert sum(frames_of(config, medium)) == medium.n_tokens == len(places)
            share = 0.25 if medium.kind == "video" else 0.5
            assert len(set(places) - dropped) == max(1, int(share * medium.n_tokens + 0.5))
            if select == "attention":
                worst = min(columns[p] for p in places if p not in dropped)
                assert all(columns[p] <= worst for p in places if p in dropped)
        assert dropped <= {p for places in places_of(config, prompt) for p in places}


def test_grids_are_those_of_the_families() -> None:
    found = {}
    for name in VISUAL_FAMILIES:
        config = FAMILIES[name].model().config
        kind = FAMILIES[name].kinds[-2]  # a video where there is one, else two images
        (prompt,) = split(config, FAMILIES[name].row_inputs(kind, 0))
        found[name] = family_of(config).grid(prompt.media[0])
    assert found["llava"] == found["gemma3"] == (1, 4, 4)
    assert found["llava_pixtral"] == found["mistral3"] == (1, 2, 3)
    assert found["llava_next"] is None
    assert found["llava_onevision"] == (3, 2, 2)
    assert found["qwen2_vl"] == found["qwen2_5_vl"] == found["qwen3_vl"] == (2, 2, 3)
    assert found["idefics3"] == found["smolvlm"] == found["internvl"] == (1, 2, 2)


def test_scores_are_read_at_the_same_relative_place_of_another_grid() -> None:
    scores = torch.arange(16.0)
    assert resample(scores, (1, 4, 4), (1, 2, 2)).tolist() == [5, 7, 13, 15]
    assert resample(torch.tensor([1.0, 2, 3, 4]), (1, 2, 2), (1, 4, 4)).view(4, 4)[0].tolist() == [
        1,
        1,
        2,
        2,
    ]
    assert resample(scores, (1, 4, 4), (1, 4, 4)).tolist() == scores.tolist()
    assert resample(torch.tensor([1.0, 2.0]), (2, 1, 1), (4, 1, 1)).tolist() == [1, 1, 2, 2]


def image(count: int, frames: int = 1) -> Medium:
    return Medium("image", {"pixel_values": torch.zeros(frames, 3, 16, 16)}, count, f"{count}x{frames}")


def prompt_of(*media: Medium) -> Prompt:
    return Prompt((1, *(i for m in media for i in ([IMAGE] * m.n_tokens + [9]))), media)


def test_a_drafter_with_coarser_eyes_keeps_what_the_target_saw() -> None:
    config = FAMILIES["llava"].model().config
    columns = torch.zeros(18)
    columns[1 + 5 : 1 + 7] = torch.tensor([1.0, 2.0])  # both middle tokens of the second row
    pruning = Pruning("attention", keep_images=0.5)
    dropped = pruning.dropped(config, prompt_of(image(4)), prompt_of(image(16)), columns, config)
    assert dropped == [3, 4]


@pytest.mark.parametrize("other", [prompt_of(image(4), image(4)), prompt_of(image(15))], ids=["count", "grid"])
def test_attention_that_fits_nothing_is_noted_and_pruning_is_even(other: Prompt) -> None:
    config = FAMILIES["llava"].model().config
    pruning, mine = Pruning("specvlm", keep_images=0.5), prompt_of(image(4))
    columns = torch.rand(len(other))
    with pytest.warns(SaccadeWarning, match="pruned evenly instead"):
        dropped = pruning.dropped(config, mine, other, columns, config)
    assert dropped == Pruning("uniform", keep_images=0.5).dropped(config, mine)


def test_a_prompt_of_words_loses_nothing_whatever_was_read_last() -> None:
    """View R reads a batch's rows of words again once an image row has come, behind that row's attention."""
    config, other = FAMILIES["llava"].model().config, prompt_of(image(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Pruning().dropped(config, Prompt((1, 2, 3)), other, torch.rand(len(other)), config) == []


def test_media_of_unknown_families_stay_whole() -> None:
    config = SimpleNamespace(model_type="newest", vision_config=SimpleNamespace(), image_token_id=IMAGE)
    unknown = Prompt((1, 5, 6), (Medium("image", {}, 0, "x"),))
    assert Pruning("uniform").dropped(config, unknown) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"select": "best"}, "select must be one of"),
        ({"keep_images": 0.0}, "keep_images must be a share above 0"),
        ({"keep_videos": 1.1}, "keep_videos must be a share above 0"),
        ({"mass": -0.1}, "mass must lie between 0 and 1"),
    ],
)
def test_shares_that_are_none_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pruning(**wrong)
