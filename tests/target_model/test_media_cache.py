"""Pictures encoded in one call, for every family, are those encoded one by one, and are counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from families import FAMILIES
from saccade.inputs.families import split
from saccade.inputs.families.family import Medium
from saccade.target_model import media_cache
from saccade.target_model.adapter import Target
from saccade.target_model.media_cache import MediaCache

Given = tuple[Medium, Sequence[int]]


def pictures(name: str) -> tuple[Target, list[Given]]:
    target = Target(FAMILIES[name].model())
    media: list[Given] = []
    for prompt in split(target.config, FAMILIES[name].inputs("image", rows=3)):
        spans = target.family.media_spans(prompt)
        media += [(each, prompt.ids[first:last]) for (first, last), each in zip(spans, prompt.media, strict=True)]
    return target, media


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of media of every call."""
    encode, numbers = media_cache.encode, list[int]()

    def counted(model: Target, media: Sequence[Given]) -> Any:
        numbers.append(len(media))
        return encode(model, media)

    monkeypatch.setattr(media_cache, "encode", counted)
    return numbers


@pytest.mark.some_families
@pytest.mark.parametrize("name", [name for name, case in FAMILIES.items() if "image" in case.kinds])
def test_pictures_encoded_together_are_those_encoded_alone(name: str, calls: list[int]) -> None:
    target, media = pictures(name)
    together, alone = MediaCache(), MediaCache()
    together.prepare(target, media)
    for medium, ids in media:
        ours, expected = together.features(target, medium, ids), alone.features(target, medium, ids)
        torch.testing.assert_close(ours.embeddings, expected.embeddings, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.deepstack, expected.deepstack, rtol=1e-4, atol=1e-5)
    assert calls == [len(media), *(1 for _ in media)]
    assert (together.hits, together.misses) == (0, len(media))
    together.features(target, *media[0])
    together.prepare(target, media)
    assert (together.hits, together.misses) == (1, len(media))
    assert len(calls) == 1 + len(media)


def test_a_film_with_other_words_between_its_frames_has_features_of_its_own() -> None:
    """Such as the times of the same frames at another rate."""
    case = FAMILIES["qwen3_vl"]
    target = Target(case.model())
    (prompt,) = split(target.config, case.row_inputs("video", 0))
    ((first, last),) = target.family.media_spans(prompt)
    ids, (medium,) = list(prompt.ids[first:last]), prompt.media
    placeholder = target.family.visual_ids["video"]
    word = next(place for place, token in enumerate(ids) if token != placeholder)
    other = [*ids[:word], ids[word] + 1, *ids[word + 1 :]]
    cache = MediaCache()
    ours = [cache.features(target, medium, each).embeddings for each in (ids, other)]
    assert (ours[0] != ours[1]).any(1).nonzero().flatten().tolist() == [word]


def test_pictures_that_fail_together_are_encoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target, media = pictures("llava")
    encode = media_cache.encode

    def fails(model: Target, given: Sequence[Given]) -> Any:
        if len(given) > 1:
            raise RuntimeError("out of memory")
        return encode(model, given)

    monkeypatch.setattr(media_cache, "encode", fails)
    cache = MediaCache()
    cache.prepare(target, media)
    assert not cache.nbytes
    assert cache.features(target, *media[0]).embeddings.shape[0] == len(media[0][1])


def test_a_cache_without_room_for_them_gets_no_pictures_ahead(calls: list[int]) -> None:
    target, media = pictures("llava")
    MediaCache(0).prepare(target, media)
    assert not calls
