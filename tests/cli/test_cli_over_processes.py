"""Commands in the processes of `torchrun`, which share the target: the first one speaks for all."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ready, saved_picture
from over_processes import run_split
from saccade.cli import main

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def spoken(words: list[str]) -> dict[str, Any]:
    """What a command prints on standard output and on standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdout
    with redirect_stdout(out), redirect_stderr(err), suppress(SystemExit):
        main(words)
    sys.stdout = before
    return {"out": out.getvalue(), "err": err.getvalue()}


def asked(picture: str, *more: str) -> list[str]:
    pair = ["-t", str(ready("llava")), "-d", str(ready("llava-draft"))]
    return ["generate", *pair, "-i", picture, "What is it?", "--json", "-n", "20", *more]


@pytest.mark.parametrize(
    "more",
    [("-m", "auto"), pytest.param(("-m", "dynamic-tree", "--sample", "--seed", "3"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_the_first_process_prints_the_answer_of_one_process(more: tuple[str, ...], tmp_path: Path) -> None:
    words = asked(saved_picture(tmp_path / "one.png"), *more)
    alone = json.loads(spoken(words)["out"])
    first, second = run_split(tmp_path, lambda _: spoken([*words, "--device", "tp"]))
    answer = json.loads(first["out"])
    assert answer["tokens"] == alone["tokens"]
    assert answer["text"] == alone["text"]
    assert second["out"] == ""


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    picture = saved_picture(tmp_path / "one.png")
    assert "start the command with `torchrun" in spoken([*asked(picture), "--device", "tp"])["err"]
    assert "which `saccade chat` cannot use" in spoken(["chat", "-t", "pocket", "--device", "tp"])["err"]
    assert "Standard input" in spoken(["generate", "-t", "pocket", "--device", "tp", "-"])["err"]
