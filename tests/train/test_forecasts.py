"""Forecasts from published configurations alone: sizes, presets, and memory and disk on a GPU elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import Shell
from PIL import Image

from saccade import memory_plan as machine
from saccade.errors import InputError, ModelError, TrainingError
from saccade.memory_plan import ModelSize
from saccade.train.plan import Forecast, forecast
from saccade.train.recipe import read_recipe, trained_kinds

SHAPES = Path(__file__).parents[1] / "shapes"
"""Configurations of published models, without weights."""
GB = 1e9


@cache
def size(name: str) -> ModelSize:
    return ModelSize(SHAPES / name)


def forecast_of(name: str, kind: str, preset: str, data: Path = SHAPES / "none", **changed: Any) -> Forecast:
    chosen = machine.preset(preset)
    settings = chosen.training(kind)
    more = {"head.lm": str(SHAPES / "llama-68m")} if kind == "draft-vlm" else {}
    recipe = read_recipe(kind).with_settings({**settings, **more, **changed})
    return forecast(recipe, SHAPES / name, data, chosen, settings)


@pytest.mark.parametrize(
    ("name", "weights", "entry", "picture"),
    [
        ("qwen2.5-vl-7b", 8_292_166_656, 2 * 28 * 4 * 128 * 2, (17 * 23, 34 * 46)),
        ("llava-1.5-7b", 7_063_427_072, 2 * 32 * 32 * 128 * 2, (576, 576)),
        ("internvl3-8b", 7_944_373_760, 2 * 28 * 4 * 128 * 2, (13 * 256, 13 * 1024)),
        ("llama-68m", 68_030_208, 2 * 2 * 12 * 64 * 4, None),
    ],
)
def test_a_configuration_has_the_published_sizes(
    name: str, weights: int, entry: int, picture: tuple[int, int] | None
) -> None:
    assert (size(name).weights, size(name).entry) == (weights, entry)
    if picture:
        assert size(name).picture(640, 480) == picture  # tokens, patches


@pytest.mark.parametrize("preset", machine.names())
@pytest.mark.parametrize("kind", trained_kinds())
def test_a_preset_sets_what_its_recipe_knows(kind: str, preset: str) -> None:
    settings = machine.preset(preset).training(kind)
    recipe = read_recipe(kind).with_settings(settings).as_dict()
    assert {name: recipe[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("name", "kind", "preset"),
    [
        *(("qwen2.5-vl-7b", kind, "24gb") for kind in ("eagle3", "hivis")),
        *(
            ("qwen2.5-vl-7b", kind, "80gb")
            for kind in ("eagle2", "eagle3", "msd", "vispec", "hivis", "dream", "medusa")
        ),
        *(("internvl3-8b", "hivis", preset) for preset in machine.names()),
        *(("llava-1.5-7b", "draft-vlm", preset) for preset in machine.names()),
    ],
)
def test_what_the_recipes_train_fits_the_gpu_of_its_preset(name: str, kind: str, preset: str) -> None:
    found = forecast_of(name, kind, preset)
    assert found.memory <= found.preset.bytes
    assert "it fits" in str(found)
    assert "WARNING" not in str(found)


def test_what_does_not_fit_is_said() -> None:
    large = forecast_of("qwen2.5-vl-7b", "dream", "24gb")
    assert large.memory > large.preset.bytes
    assert "DOES NOT FIT" in str(large)
    assert "prompts of 3388 tokens leave no room" in str(forecast_of("internvl3-8b", "hivis", "24gb", max_tokens=2048))


def test_memory_and_disk_follow_the_settings() -> None:
    """Weights, gradients and two moments take 16 bytes each; features take the disk that there is room for."""
    precise = forecast_of("qwen2.5-vl-7b", "eagle3", "24gb", precision="fp32")
    assert precise.size.bytes == 2 * 8_292_166_656
    assert precise.work.memory["head"] == 16 * precise.work.trained == 16 * 288_115_200
    kept, recomputed = (forecast_of("qwen2.5-vl-7b", "eagle3", "24gb", recompute=on) for on in (False, True))
    assert recomputed.work.memory["micro batch"] < kept.work.memory["micro batch"]
    none, half = (
        forecast_of("qwen2.5-vl-7b", "hivis", "24gb", feature_cache=where, cache_gb=60) for where in ("none", "disk")
    )
    assert half.features == 60 * GB
    assert half.disk - none.disk == pytest.approx(60 * GB)


def test_hours_follow_the_work_and_what_the_user_measured() -> None:
    hivis, eagle3 = (forecast_of("qwen2.5-vl-7b", kind, "24gb") for kind in ("hivis", "eagle3"))
    assert hivis.seconds < eagle3.seconds, "whose features are computed in every epoch"
    assert hivis.distilling == eagle3.distilling
    assert "before for the answers; assumed: 35%" in str(hivis)
    large = forecast_of("qwen2.5-vl-7b", "hivis", "80gb")
    assert large.seconds < hivis.seconds
    assert large.distilling < hivis.distilling / 2, "larger batches read the weights less often"
    assert forecast_of("qwen2.5-vl-7b", "hivis", "24gb", epochs=2).seconds < 0.7 * hivis.seconds
    measured = replace(hivis, throughput=10.0)
    assert measured.seconds == 20_000 * 16 / 10
    assert "time       about 8.9 h, at 10 samples a second" in str(measured)


def answers(folder: Path) -> Path:
    Image.new("RGB", (280, 140)).save(folder / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "x" * 80}]
    row = {"messages": [{"role": "user", "content": parts}], "answer": "y"}
    rows = [{"id": str(n), **row, "answer_ids": [5] * (10 + 10 * n)} for n in range(5)]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{torn\n")
    return folder


def test_lengths_come_from_the_answers_where_there_are_some(tmp_path: Path) -> None:
    found = forecast_of("qwen2.5-vl-7b", "hivis", "24gb", answers(tmp_path)).lengths
    assert (found.samples, found.text, found.visual, found.answer) == (5, 20, 10 * 5, 30)
    assert found.longest == (20, 50, 200, 50)
    found = forecast_of("qwen2.5-vl-7b", "hivis", "24gb", tmp_path, max_tokens=80).lengths
    assert found.longest[3] == found.answer == 10, "answers are cut where samples are too long"


def test_a_plan_with_a_preset_needs_neither_weights_nor_answers(shell: Shell, tmp_path: Path) -> None:
    made = ["train", "eagle3", "-t", SHAPES / "qwen2.5-vl-7b", "--data", tmp_path / "none", "-o", tmp_path / "out"]
    assert "--throughput is for --plan with --preset" in shell(*made, "--throughput", "9").complaint
    found = shell(*made, "--preset", "24gb", "--plan", "--set", "max_tokens=1024", "--set", "batch_size=8")
    assert found.code == 0, found.err
    assert "288,115,200 weights; the target's 8,292,166,656 are frozen" in found.out
    assert "computed, nothing was run" in found.out
    assert "--set micro_batch=1" in found.out
    assert "cached on disk" in found.out
    uncached = shell(*made, "--preset", "24gb", "--plan", "--set", "feature_cache=none")
    assert "not cached" in uncached.out, "own settings have precedence over a preset"
    assert list(tmp_path.iterdir()) == []
    assert "Cannot read the answers" in shell(*made, "--plan").complaint
    (tmp_path / "none").touch()
    assert "has no weights" in shell(*made, "--plan").complaint
    assert "preset '24' (did you mean 24gb?); expected" in shell(*made, "--preset", "24", "--plan").complaint


def test_presets_and_targets_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for preset, near in (("24g", "mean 24gb"), ("80", "mean 80gb"), ("huge", "expected one of 24gb, 80gb")):
        with pytest.raises(InputError, match=near):
            machine.preset(preset)
    for target, message in ((SHAPES / "llama-68m", "pictures of"), (tmp_path, "config.json")):
        with pytest.raises(ModelError, match=message):
            forecast(read_recipe("hivis"), target, tmp_path / "none", machine.preset("24gb"))


def test_a_draft_vlm_is_forecast_for_targets_that_can_have_one(tmp_path: Path) -> None:
    found = forecast_of("llava-1.5-7b", "draft-vlm", "24gb")
    projector = 1024 * 768 + 768 + 768 * 768 + 768
    grown = 2 * 64 * 768  # rows of embedding and LM head that the target's vocabulary has beyond the language model's
    assert found.work.trained == 68_030_208 + projector + grown
    with pytest.raises(TrainingError, match="A draft VLM cannot be made for a Qwen2_5_VL"):
        forecast_of("qwen2.5-vl-7b", "draft-vlm", "24gb")
