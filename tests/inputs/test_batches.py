"""Hugging Face batches come apart into prompts and go together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kits import kit
from test_same_as_transformers import clip

from families import FAMILIES, FamilyCase
from saccade.errors import InputError
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Medium, Prompt
from saccade.inputs.families.gemma import counts_frames

TEXT_KEYS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
CASES = [(case, kind) for case in FAMILIES.values() for kind in case.kinds]
VISUAL_CASES = [case for case in FAMILIES.values() if case.is_visual]


def config_of(case: FamilyCase) -> Any:
    return case.build(None).config


def by_name(case: Any) -> str:
    return case.name if isinstance(case, FamilyCase) else str(case)


@pytest.mark.parametrize("case", VISUAL_CASES, ids=by_name)
def test_missing_and_spare_images_are_refused(case: FamilyCase) -> None:
    config = config_of(case)
    image, text, two = (case.row_inputs(kind, 1) for kind in ("image", "text", "images2"))
    for ids, pixels in ((image, text), (text, image), (image, two), (two, image)):
        visual = {name: value for name, value in pixels.items() if name not in TEXT_KEYS}
        with pytest.raises(InputError, match=r"^[A-Z][^\n]*\.$"):
            split(config, {"input_ids": ids["input_ids"], **visual})


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "no input_ids"),
        ({"input_ids": torch.ones(4)}, "must be [rows, tokens]"),
        ({"input_ids": torch.ones(1, 4), "attention_mask": torch.ones(1, 3)}, "must be [rows, tokens]"),
        ({"input_ids": torch.ones(1, 4), "attention_mask": torch.tensor([[1, 0, 1, 1]])}, "has a hole"),
        ({"input_ids": torch.ones(1, 4), "pixel_values": torch.ones(1, 3, 4, 4)}, "reads text only"),
    ],
)
def test_a_batch_that_is_none_is_refused(inputs: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(InputError, match=r"^[A-Z][^\n]*\.$|^input_ids[^\n]*\.$") as error:
        split(config_of(FAMILIES["llama"]), inputs)
    assert says in str(error.value)


def test_pixels_without_their_sizes_are_refused() -> None:
    for name, key in (("qwen2_vl", "image_grid_thw"), ("llava_next", "image_sizes"), ("mistral3", "image_sizes")):
        case = FAMILIES[name]
        inputs = {k: v for k, v in case.inputs("image").items() if k != key}
        with pytest.raises(InputError, match=f"no {key}"):
            split(config_of(case), inputs)


def test_videos_of_two_lengths_cannot_share_a_onevision_row() -> None:
    k = kit("llava_onevision")
    prompt = k.ours.prompt("?", videos=[clip(4, 60, 45, 24.0), clip(5, 60, 45, 24.0)])
    with pytest.raises(InputError, match="do not fit together"):
        family_of(k.config).join(prompt.media)


def test_the_frames_of_two_films_stay_apart() -> None:
    """Where every frame is a medium; the second film of a row begins with its own first frame."""
    k = kit("gemma4")
    prompt = k.ours.prompt("?", videos=[clip(3, 60, 45, 2.0), clip(2, 60, 45, 2.0)])

    def films(media: Sequence[Medium]) -> list[int]:
        made = family_of(k.config).join(media)
        return made["num_frames_per_video"].tolist() if counts_frames() else [*made["pixel_values_videos"].shape[:2]]

    assert films(prompt.media) == ([3, 2] if counts_frames() else [5, 1])
    assert films(prompt.media[1:]) == [2, 2]


def test_media_that_do_not_fill_their_placeholders_have_no_spans() -> None:
    config = config_of(FAMILIES["llava"])
    image = family_of(config).visual_ids["image"]
    medium = Medium("image", {}, 3, "")
    for count in (2, 4):
        with pytest.raises(InputError, match=f"has {count} image placeholders"):
            family_of(config).media_spans(Prompt((1, *[image] * count, 2), (medium,)))


@pytest.mark.parametrize(("case", "kind"), [(c, k) for c in VISUAL_CASES for k in c.kinds if k != "text"], ids=by_name)
def test_a_medium_alone_gives_the_features_that_it_gives_among_others(case: FamilyCase, kind: str) -> None:
    model = case.model()
    (prompt,) = split(model.config, case.row_inputs(kind, 1))
    alone = torch.cat([_features(model, family_of(model.config).join([m])) for m in prompt.media])
    together = _features(model, family_of(model.config).join(prompt.media))
    after = len(prompt.media) if (case.name, kind) == ("llava_onevision", "video") else 0  # may be added later
    assert sum(m.n_tokens for m in prompt.media) - len(alone) in (0, after)
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)  # sums in another order


@torch.no_grad()
def _features(model: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    tensors.pop("second_per_grid_ts", None)
    base = model.base_model
    kind, pixels = ("video", "pixel_values_videos") if "pixel_values_videos" in tensors else ("image", "pixel_values")
    encode = getattr(base, f"get_{kind}_features")
    found = encode(tensors.pop(pixels), **tensors, return_dict=True).pooler_output
    found = torch.cat([*found]) if isinstance(found, (list, tuple)) else found
    return found.reshape(-1, found.shape[-1])
