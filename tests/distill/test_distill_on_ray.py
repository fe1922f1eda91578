"""Runs on Ray: batches end in any order at any actor, and the file is that of one process, byte for byte."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_lines import asks, talks

from checkpoints import vlm
from isolated import ISOLATED, isolated
from saccade import ray_cluster
from saccade.distill import distill
from saccade.distill.folder import ANSWERS, HEADER
from saccade.distill.planning import make_plan
from saccade.distill.run import QuestionBatch, QuestionWorker, Setup, run
from saccade.jobs.actors import ActorModels, EngineActor, Hello
from saccade.model_spec import ModelSpec
from saccade.resumable import Finished, Pending

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


class Backwards(QuestionWorker):
    """Answers the batches that need no answers of each other from the last to the first."""

    stages: list[list[Pending]]

    def answers(self, pending: Iterator[Pending]) -> Generator[Finished]:
        self.stages.append(list(pending))
        yield from super().answers(iter(self.stages[-1][::-1]))


class Loaded(ActorModels):
    def load(self) -> Any:
        return vlm("llava", method="plain")


def test_batches_that_end_in_another_order_are_written_in_that_of_the_plan(source: Path, tmp_path: Path) -> None:
    model, images = vlm("llava", method="plain"), source.parent / "images"
    distill(model, source, tmp_path / "whole", media_root=images, on_bad_line="skip", **OPTIONS)
    setup = pickle.loads(pickle.dumps(Setup(source, tmp_path / "out", images, "skip", OPTIONS)))
    worker = Backwards(model, setup)
    worker.stages = []
    report = run(worker, setup)
    for name in (ANSWERS, HEADER):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(worker.stages) == 3, "one per turn"
    assert max(len(stage) for stage in worker.stages) > 1
    assert [problem for problem in report.problems if "broken" in problem]


def test_an_actor_answers_batches_and_ends_with_the_reason_that_stops_its_run(source: Path, tmp_path: Path) -> None:
    setup = Setup(source, tmp_path / "out", source.parent / "images", "stop", OPTIONS)
    plan = make_plan(setup.prompts(tmp_path), setup.options, "stop")
    actor = EngineActor(Loaded(ModelSpec("")), QuestionWorker, (setup,))
    actor.put(tmp_path)
    actor.put([Pending(n, QuestionBatch(b, frozenset(q.id for q in b))) for n, b in enumerate(plan.batches)])
    first, *messages, last = actor.answers()
    assert isinstance(first, Hello)
    assert first.facts["method"]["method"] == "plain"
    assert all(isinstance(message, Finished) for message in messages)
    assert re.search(r"line 6, question line-6: .* not an image", last)


@pytest.mark.ray
@ISOLATED
@pytest.mark.timeout(1500)
def test_two_actors_write_the_file_of_one_process(tmp_path: Path) -> None:
    weights = str(Path(ray_cluster.__file__).parent / "pocket" / "weights" / "draft")
    words = [sys.executable, "-c", "from saccade.cli import main; main()", "distill", "pocket:chart,receipt"]
    words += ["--count", "5", "-t", weights, "-n", "8", "--batch", "2", "--threads", "1"]
    isolated([*words, "-o", str(tmp_path / "one")], seconds=400)
    isolated([*words, "-o", str(tmp_path / "two"), "--ray", "--actors", "2"], seconds=1000)
    assert (tmp_path / "one" / ANSWERS).read_bytes() == (tmp_path / "two" / ANSWERS).read_bytes()
    headers = [json.loads((tmp_path / name / HEADER).read_text()) for name in ("one", "two")]
    assert headers[0] == headers[1]
