"""Runs on Ray: batches end in any order at any actor, and the file is that of one process, byte for byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_lines import asks, talks

from checkpoints import vlm
from isolated import ISOLATED, isolated
from saccade import cluster
from saccade.distill import distill
from saccade.distill.folder import ANSWERS, HEADER
from saccade.distill.ray_run import DistillActor
from saccade.distill.run import Batch, opened
from saccade.distill.setup import Setup, models_of
from saccade.jobs.actors import Hello, Models

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "batch": 2, "history": "own"}


@pytest.fixture
def source(written: Callable[..., Path], pictures: Path) -> Path:
    """Single questions and conversations of up to three turns, one of them with a broken picture."""
    (pictures / "broken.png").write_bytes(b"no picture")
    return written(
        *(asks(f"What {'x' * n} é?", ("a.png", "b.png")[n % 2], name=f"p{n}") for n in range(5)),
        asks("Broken?", "broken.png"),
        talks("t", ("One?", "1"), ("Two?", "2"), ("Three?", "3")),
        talks("u", ("Uno?", "1"), ("Due?", "2")),
    )


def test_batches_that_end_in_another_order_are_written_in_that_of_the_plan(source: Path, tmp_path: Path) -> None:
    model = vlm("llava", method="plain")
    images = source.parent / "images"
    distill(model, source, tmp_path / "whole", media_root=images, on_bad_line="skip", **OPTIONS)
    arguments = {
        "source": source,
        "out": tmp_path / "out",
        "media_root": images,
        "on_bad_line": "skip",
        "method_options": {},
        "options": OPTIONS,
    }
    actor = DistillActor(Models({}), arguments)
    assert actor.open(model) == models_of(model)
    stages = []

    def backwards(batches: Iterator[Batch]) -> Iterator[Any]:
        given = list(batches)
        stages.append(given)
        yield from actor.work(str(tmp_path / "out"), iter(given[::-1]))

    with opened(Setup(models_of(model), **arguments)) as attempt:
        report = attempt.run(backwards, lambda _: None)
    assert (tmp_path / "out" / ANSWERS).read_bytes() == (tmp_path / "whole" / ANSWERS).read_bytes()
    assert (tmp_path / "out" / HEADER).read_bytes() == (tmp_path / "whole" / HEADER).read_bytes()
    assert len(stages) == 3, "one per turn"
    assert max(len(stage) for stage in stages) > 1
    assert [problem for problem in report.problems if "broken" in problem]


def test_an_actor_says_what_its_run_cannot_use() -> None:
    class Loaded(Models):
        def load(self) -> Any:
            return vlm("llava", method="plain")

    arguments = {
        "source": "none.jsonl",
        "out": Path("out"),
        "media_root": None,
        "on_bad_line": "stop",
        "method_options": {},
        "options": {},
    }
    messages = list(DistillActor(Loaded({}), arguments).answers())
    assert len(messages) == 1
    assert not isinstance(messages[0], Hello)
    assert messages[0].startswith("Cannot read the prompts in none.jsonl")


@pytest.mark.ray
@ISOLATED
@pytest.mark.timeout(1500)
def test_two_actors_write_the_file_of_one_process(tmp_path: Path) -> None:
    weights = str(Path(cluster.__file__).parent / "pocket" / "weights" / "draft")
    words = [sys.executable, "-c", "from saccade.cli import main; main()", "distill", "pocket:chart,receipt"]
    words += ["--count", "5", "-t", weights, "-n", "8", "--batch", "2", "--threads", "1"]
    isolated([*words, "-o", str(tmp_path / "one")], seconds=400)
    isolated([*words, "-o", str(tmp_path / "two"), "--ray", "--actors", "2"], seconds=1000)
    assert (tmp_path / "one" / ANSWERS).read_bytes() == (tmp_path / "two" / ANSWERS).read_bytes()
    headers = [json.loads((tmp_path / name / HEADER).read_text()) for name in ("one", "two")]
    assert headers[0] == headers[1]
