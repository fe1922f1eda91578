"""Heads learn from what they draft with, are not judged while they learn, and forms of others are not trained."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import FAMILIES
from heads_kit import POLICIES, engine, prompts, random_head, target, touching_images
from saccade.engine import Request
from saccade.errors import SaccadeWarning, TrainingError
from saccade.train.data import TrainingSample
from saccade.train.feature_cache import FeatureCache
from saccade.train.features import extract_features
from saccade.train.learner import EngineMeasure
from saccade.train.objectives.entries import entries_of
from saccade.train.recipe import read_recipe
from saccade.train.warm_start import new_head


@pytest.mark.parametrize("kept", ["", "memory", "disk"])
def test_images_that_touch_are_learnt_from_as_they_are_drafted_with(kept: str, tmp_path: Path) -> None:
    own, head, (_, prompt) = target("llava"), random_head("llava", "vispec"), touching_images()
    drafted: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: drafted.append(args[1][0]))
    engine("llava", head, POLICIES["chain"]).generate([Request(prompt)], max_new_tokens=1)
    handle.remove()
    features = extract_features(own, [TrainingSample("0", prompt, (20,))], head.layers)
    if kept:
        cache = FeatureCache(own, 1e9, tmp_path / "kept" if kept == "disk" else None)
        cache.put(0, features[0])
        cache.flush()
        found = cache.get(0)
        assert found is not None
        features = [found]
    supervised = entries_of(head, features).embeddings[0].detach()
    assert len(supervised) == len(drafted[0]) + 1  # the answer's token
    torch.testing.assert_close(drafted[0], supervised[:-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_that_is_still_learning_is_not_reported(kind: str) -> None:
    head = random_head("llava", kind)
    case = FAMILIES["llava"]
    measure = EngineMeasure(target("llava"), prompts(case, case.inputs("image", rows=2)), max_new_tokens=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaccadeWarning)
        for _ in range(3):
            measure(head)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("eagle3", {"residual": "normed"}),
        ("eagle3", {"state_norms": "each"}),
        ("eagle3", {"feeds": "normed"}),
        ("msd", {"bias": True}),
        ("vispec", {"form": "released"}),
    ],
)
def test_forms_of_others_are_not_trained(kind: str, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(TrainingError, match=rf"not trained here; leave out head\.{name}"):
        new_head(target("llava"), replace(read_recipe(kind), head=option))
