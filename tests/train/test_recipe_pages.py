"""The recipes' own commands, literally, with tiny models of the same families in place of the big, and small counts."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
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
from tools.docs import plans

PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
ROWS = 24
"""Usable rows of the small LLaVA-mix: enough for a tenth to validate on."""


@cache
def internvl() -> Path:
    """A tiny InternVL with squares of 28 pixels, 4 tokens each."""
    tok = tokenizer(more=["<IMG_CONTEXT>", "<img>", "</img>"])
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=[28, 28],
            patch_size=[7, 7],
        ),
        text_config=Qwen2Config(**checkpoints._text(len(tok))),
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=2)
    model = checkpoints._finish(config, 0)
    return checkpoints._save(
        ready("qwen").parent / "internvl", model, tok, images, checkpoints.template("<IMG_CONTEXT>")
    )


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
SETTINGS = {
    "batch_size": 4,
    "micro_batch": 2,
    "min_words": 0,
    "checkpoint_every": 2,
    "stage1.steps": 3,
    "stage1.warmup": 1,
}
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
        asked = f"What {number}?"
        if number % 4 == 3:
            turns = [
                {"from": "gpt", "value": "... on."},
                {"from": "human", "value": asked},
                {"from": "gpt", "value": "A."},
            ]
            yield {"id": f"share_{number}", "conversations": turns}
        else:
            turns = [{"from": "human", "value": f"<image>\n{asked}"}, {"from": "gpt", "value": "Two."}]
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
        said = capsys.readouterr()
        assert not left.value.code, (shlex.join(words), said.err)
        if "-o" in words and "--plan" not in words:
            assert any((tmp_path / words[words.index("-o") + 1]).iterdir())
        if words[1] == "distill" and "--plan" not in words:
            assert "1 unusable line" in said.out
            assert "gone.jpg" in said.err
    for told in re.findall(r"It leaves (.*?)\.\s", page.read_text(encoding="utf-8"), re.DOTALL):
        for name in re.findall(r"`([\w./-]+/[\w./-]+)`", told):
            assert (tmp_path / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_plan_is_followed_by_what_it_prints(page: Path) -> None:
    """That it still prints this is checked with the other generated parts."""
    text = page.read_text(encoding="utf-8")
    shown = blocks(text, "text")
    assert len(shown) == sum("--plan" in words for words in commands(page))
    assert all("computed, nothing was run" in block for block in shown)


def test_every_recipe_says_that_nobody_ran_it() -> None:
    for page in PAGES:
        assert re.search(r"nobody has run|Nobody has run", page.read_text(encoding="utf-8"))
