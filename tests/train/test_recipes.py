"""Recipes are data with strict keys; their pages' commands run, with tiny models in place of the big."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import checkpoints
from checkpoints import ready, saved_picture, tokenizer
from doc_pages import ROOT, blocks, commands
from saccade.cli import main
from saccade.draft.heads.registry import HEAD_KINDS, head_class
from saccade.errors import TrainingError
from saccade.train.recipe import Recipe, Stage, from_dict, objective_of, read_recipe, trained_kinds
from tools.docs import plans


def test_there_is_a_recipe_for_every_kind_that_can_be_trained() -> None:
    assert [read_recipe(name).kind for name in trained_kinds()] == [*HEAD_KINDS, "draft-vlm"]
    assert all(isinstance(read_recipe(kind).objective, objective_of(kind)) for kind in trained_kinds())


def test_settings_change_single_values() -> None:
    changed = read_recipe("hivis").with_settings(
        {"batch_size": 8, "stage2.steps": 0, "stage1.rate": 1, "loss.k": 3, "head.after_image": "visual"}
    )
    assert changed.batch_size == 8
    assert (changed.stages[1].steps, changed.stages[0].rate, changed.stages[0].draft_steps) == (0, 1, 1)
    assert changed.deepest == 1
    assert changed.objective.k == 3  # type: ignore[attr-defined]
    assert changed.head == {"after_image": "visual"}
    assert from_dict(changed.as_dict()) == changed


def test_few_answers_shorten_a_built_in_recipe_and_steps_of_ones_own_stay() -> None:
    recipe = read_recipe("hivis")
    few = recipe.over(108)
    assert [(stage.steps, stage.warmup) for stage in few.stages] == [(41, 1), (27, 0)]
    assert few.steps * few.batch_size / 108 == pytest.approx(recipe.epochs, rel=0.01) == 10
    assert list(few.cautions()) == []
    assert recipe.over(64_000) == recipe
    assert recipe.with_settings({"epochs": 5}).over(64_000).steps == recipe.steps
    assert recipe.with_settings({"epochs": 5}).over(16_000).steps == 5_000
    own = recipe.with_settings({"stage1.steps": 300})
    assert own.over(108) == own
    assert own.with_settings({"epochs": 2}).over(108).steps == 15


def test_a_warm_up_as_long_as_its_stage_is_said() -> None:
    short = read_recipe("hivis").with_settings({"stage1.steps": 300, "stage2.steps": 0})
    assert [*short.cautions()] == [
        "Stage 1 has 300 steps and a warm-up of 500, so that its rate stays below 0.0003; add --set stage1.warmup=30."
    ]
    assert [*short.with_settings({"stage1.warmup": 30}).cautions()] == []


def test_a_step_knows_its_stage() -> None:
    recipe = read_recipe("hivis").with_settings({"stage1.steps": 2, "stage2.steps": 1})
    assert [(recipe.at(i)[0], recipe.at(i)[2]) for i in range(3)] == [(1, 0), (1, 1), (2, 0)]
    with pytest.raises(IndexError):
        recipe.at(3)


@pytest.mark.parametrize("given", [50, "50"])
def test_a_number_will_do_for_dreams_layer_as_the_command_line_and_toml_make_one_of_it(given: int | str) -> None:
    recipe = read_recipe("dream").with_settings({"loss.layer": given})
    objective: Any = recipe.objective
    assert (recipe.loss["layer"], objective.layer) == ("50", "50")
    with pytest.raises(TrainingError, match=r"loss.layer must be one of entropy, 25, .*, not '30'"):
        recipe.with_settings({"loss.layer": 30})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batchsize": 8}, r"unknown key 'batchsize' \(did you mean batch_size\?\); expected one of batch_size"),
        ({"stage1.speed": 8}, r"unknown key 'stage1.speed'"),
        ({"stage3.steps": 8}, r"no setting 'stage3.steps'; groups are head, loss, and stage1 to stage2"),
        ({"batch_size": "big"}, r"batch_size must be a whole number, not 'big'"),
        ({"batch_size": 0}, r"batch_size is 0; it must be at least 1"),
        ({"residuals": 1}, r"residuals must be true or false, not 1"),
        ({"optimiser": "sgd"}, r"optimiser is 'sgd'; choose one of adamw, muon"),
        ({"stage1.steps": 0, "stage2.steps": 0}, r"nothing to train"),
        ({"stage1.rate": 0}, r"stage1 needs a rate above 0, not 0"),
        ({"stage2.warmup": -1}, r"stage2 needs steps, warmup and final of 0 or more"),
        ({"stages": [5]}, r"stages is \[5\]; expected tables"),
        ({"betas": [0.9, 1]}, r"betas is \(0.9, 1\); it must be two numbers"),
        ({"clip": float("nan")}, r"clip is nan; every number of a recipe must be finite"),
        ({"clip": float("inf")}, r"clip is inf; every number of a recipe must be finite"),
        ({"stage2.rate": float("inf")}, r"stage2.rate is inf; every number of a recipe must be finite"),
        ({"stage1.rate": float("nan")}, r"stage1.rate is nan; every number"),
        ({"stage1.final": float("inf")}, r"stage1.final is inf; every number"),
        ({"loss.states": float("inf")}, r"loss.states is inf; every number"),
        ({"cache_gb": float("inf")}, r"cache_gb is inf; every number"),
        ({"loss.k": -3}, r"loss.k is -3; it must be at least 1"),
        ({"loss.top": "much"}, r"loss.top must be a number, not 'much'"),
        ({"loss.states": -0.5}, r"loss.states is -0.5; it must be at least 0"),
        ({"kind": "mediocre"}, r"There is no training of 'mediocre'; expected one of eagle2, "),
        ({"head": 1}, r"head must be a table, not 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        read_recipe("hivis").with_settings(settings)


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"expected one of .*eagle2, .*hivis.*, or give a TOML file"):
        read_recipe("none")
    (tmp_path / "a.toml").write_text("kind = ")
    with pytest.raises(TrainingError, match="is not valid TOML"):
        read_recipe(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text('kind = "eagle2"\n[[stages]]\nsteps = 3\n')
    with pytest.raises(TrainingError, match=r"stage1\.rate is missing"):
        read_recipe(str(tmp_path / "b.toml"))


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    names = {f.name for f in fields(Recipe)} - {"kind", "stages", "head", "loss"}
    names |= {f"stageN.{f.name}" for f in fields(Stage)}
    names |= {f"loss.{f.name}" for kind in trained_kinds() for f in fields(objective_of(kind))}
    names |= {f"head.{name}" for kind in HEAD_KINDS for name in head_class(kind).defaults}
    assert sorted(name for name in names if f"`{name}`" not in page) == []
    assert [name for name in trained_kinds() if f"`{name}`" not in page] == []


PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
ROWS = 24
"""Usable rows of the small LLaVA-mix: enough for a tenth to validate on."""


@cache
def internvl() -> Path:
    """A tiny InternVL with squares of 28 pixels, 4 tokens each."""
    tok = tokenizer(more=["<IMG_CONTEXT>", "<img>", "</img>"])
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**tower, num_attention_heads=2, image_size=[28, 28], patch_size=[7, 7]),
        text_config=Qwen2Config(**checkpoints._text(len(tok))),
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=2)
    words = checkpoints.template("<IMG_CONTEXT>")
    return checkpoints._save(ready("qwen").parent / "internvl", checkpoints._finish(config, 0), tok, images, words)


def small_models() -> dict[str, str]:
    """Tiny checkpoints by the ids of the models that they stand for."""
    found = {
        "Qwen/Qwen2.5-VL-7B-Instruct": ready("qwen"),
        "llava-hf/llava-1.5-7b-hf": ready("llava"),
        "OpenGVLab/InternVL3-8B-hf": internvl(),
        "JackFram/llama-68m": ready("llama"),
    }
    assert found.keys() == plans.PUBLISHED.keys()
    return {name: str(path) for name, path in found.items()}


SMALL = {
    "distill": ["--limit", str(ROWS), "-n", "24"],
    "generate": ["-n", "4"],
    "bench": ["--per-task", "1", "-n", "4"],
    "tune": ["--per-task", "1", "-n", "4"],
    "serve": ["--plan"],
}
"""Options that make a command short; later ones have precedence."""
SETTINGS = {"batch_size": 4, "micro_batch": 2, "min_words": 0, "checkpoint_every": 2}
SETTINGS |= {"stage1.steps": 3, "stage1.warmup": 1}
TWO_STAGES = {"stage2.steps": 2, "stage2.warmup": 1}


def shortened(words: list[str]) -> list[str]:
    """The words of a command with small models and counts."""
    models = small_models()
    line = [models.get(word, word) for word in words[1:]]
    line = [re.sub(r"own_vocabulary=\d+", "own_vocabulary=64", word) for word in line]
    if words[1] == "train":
        settings = SETTINGS | (TWO_STAGES if words[2] in ("hivis", "draft-vlm") else {})
        line += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    if words[1] == "bench" and "--preset" in words:
        return [*line, *([] if "--dry-run" in line else ["--dry-run"])]  # its data sets would be downloaded
    if words[1] == "bench" and len(words) == 3 and words[2].startswith("--list"):
        return line
    return line + ([] if "--plan" in line else SMALL.get(words[1], []))


def mix() -> Iterator[dict[str, Any]]:
    """Rows of LLaVA-mix and ShareGPT, one of them with a picture that is missing."""
    for number in range(ROWS):
        question = f"What {number}?"
        if number % 4 == 3:
            begun, answer = ({"from": "gpt", "value": words} for words in ("... on.", "A."))
            turns = [begun, {"from": "human", "value": question}, answer]
            yield {"id": f"share_{number}", "conversations": turns}
        else:
            turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": "Two."}]
            yield {"id": f"{number:012}", "image": "coco/train2017/a.jpg", "conversations": turns}
        if number == 5:
            yield {"id": "gone", "image": "coco/train2017/gone.jpg", "conversations": turns}


def materials(folder: Path) -> None:
    """Write what the recipes begin with."""
    (folder / "images" / "coco" / "train2017").mkdir(parents=True)
    saved_picture(folder / "a.png")
    (folder / "images" / "coco" / "train2017" / "a.jpg").write_bytes((folder / "a.png").read_bytes())
    (folder / "photo.jpg").write_bytes((folder / "a.png").read_bytes())
    (folder / "llava_v1_5_mix665k.json").write_text(json.dumps(list(mix()), indent=1))
    question = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "a.png"}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")


@pytest.mark.slow  # trains a drafter of every kind that the recipes name
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_recipe_runs_and_leaves_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    materials(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    lines = commands(page)
    assert lines
    assert all(words[0] == "saccade" or words[:3] == ["python", "-m", "tools.results.papers"] for words in lines)
    for words in (words for words in lines if words[0] == "saccade"):
        with pytest.raises(SystemExit) as left:
            main(shortened(words))
        printed = capsys.readouterr()
        assert not left.value.code, (shlex.join(words), printed.err)
        if "-o" in words and "--plan" not in words:
            assert any((tmp_path / words[words.index("-o") + 1]).iterdir())
        if words[1] == "distill" and "--plan" not in words and "pocket" not in words:
            assert "1 unusable line" in printed.out
            assert "gone.jpg" in printed.err
    for promise in re.findall(r"It leaves (.*?)\.\s", page.read_text(encoding="utf-8"), re.DOTALL):
        for name in re.findall(r"`([\w./-]+/[\w./-]+)`", promise):
            assert (tmp_path / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_plan_is_followed_by_what_it_prints(page: Path) -> None:
    """That it still prints this is checked with the other generated parts."""
    text = page.read_text(encoding="utf-8")
    shown = blocks(text, "text")
    assert len(shown) == sum("--plan" in words for words in commands(page))
    assert all("computed, nothing was run" in block for block in shown)
