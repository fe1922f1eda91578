"""`saccade inspect` and `saccade export` on folders as people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell

import checkpoints
from checkpoints import ready
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.store import save_head


def own_head(folder: Path, kind: str = "eagle3") -> Path:
    torch.manual_seed(0)
    save_head(build_head(HeadConfig.from_target(checkpoints.vlm("llava").target, kind)), folder)
    return folder


def test_a_head_goes_out_and_is_described(shell: Shell, tmp_path: Path) -> None:
    head, out = own_head(tmp_path / "head"), tmp_path / "out"
    done = shell("export", head, "--to", "speculators", "-t", ready("llava"), "-o", out)
    assert done.code == 0
    assert "it loads here again" in done.out
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: speculators\n")
    shown = shell("inspect", out, "-t", ready("llava"))
    assert shown.code == 0
    assert "head of the kind eagle3, layout of speculators" in shown.out
    assert "vocabulary" in shown.out
    found = json.loads(shell("inspect", out, "-t", ready("llava"), "--json").out)
    assert (found["fits"], found["layout"], found["kind"]) == (True, "speculators", "eagle3")
    answer = shell("generate", "-t", ready("llava"), "-d", out, "-n", "8", "--json", "What is this?")
    assert json.loads(answer.out)["method"] == "eagle3"


def test_a_head_that_does_not_fit_ends_with_1(shell: Shell, tmp_path: Path) -> None:
    shown = shell("inspect", own_head(tmp_path / "head"), "-t", "pocket")
    assert shown.code == 1
    assert "was made for another target" in shown.out.replace("\n", " ")


def test_what_cannot_be_written_or_read_is_one_sentence(shell: Shell, tmp_path: Path) -> None:
    head = own_head(tmp_path / "head", "hivis")
    refused = shell("export", head, "--to", "speculators", "-t", ready("llava"), "-o", tmp_path / "out").complaint
    assert "The layout speculators cannot hold this hivis head: eagle3 heads are all that vLLM" in refused
    assert "Give the target" in shell("export", head, "--to", "eagle", "-o", tmp_path / "out").complaint
    assert "holds neither a head that is known nor a model" in shell("inspect", tmp_path).complaint


def test_an_export_that_cannot_be_is_refused_before_the_target_is_loaded(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.loading.load_model", None)
    head, out = own_head(tmp_path / "head"), tmp_path / "out"
    refused: dict[str, list[Any]] = {
        "There is no layout 'foo' to export to; choose one of": [head, "--to", "foo", "-o", out],
        "exists and is not an empty folder; give a new one": [head, "--to", "eagle", "-o", head],
        "There is no folder": [tmp_path / "nope", "--to", "eagle", "-o", out],
        "The dtype 'half' is not one of": [head, "--to", "eagle", "-o", out, "--dtype", "half"],
    }
    for words, arguments in refused.items():
        assert words in shell("export", *arguments, "-t", ready("llava")).complaint


def test_the_built_in_target_is_described_by_its_name(shell: Shell) -> None:
    found = json.loads(shell("inspect", "pocket", "--json").out)
    assert (found["holds"], found["facts"]["layers"]) == ("model", 16)
