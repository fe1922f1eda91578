"""VLMEvalKit's plug-in against a stand-in for VLMEvalKit: order of parts, roles, videos, threads, failures, speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_evaluators as fake
import pytest

import saccade.evaluators.evaluated_model as core
from saccade.errors import InputError, SaccadeError
from saccade.evaluators import vlmevalkit
from saccade.pocket import draw
from saccade.vlm import VLM, load

MOST = 12
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return load("pocket", method="chain", dtype="float32")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, vlm: VLM) -> Make:
    """Makes models of the registered class, with one loaded pair for all."""
    monkeypatch.setattr(core, "load", lambda **given: vlm)
    monkeypatch.setattr(vlmevalkit.atexit, "register", lambda function: None)
    supported = fake.install_vlmevalkit(monkeypatch)

    def made(**given: Any) -> Any:
        vlmevalkit.register("saccade-pocket", **{"target": "pocket", "max_new_tokens": MOST, **given})
        return supported["saccade-pocket"]()

    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [str(folder / f"{n}.png") for n in range(4)]
    for number, path in enumerate(paths):
        draw(700_000 + number, "scene").image.save(path)
    return paths


def part(kind: str, value: str, **more: str) -> dict[str, str]:
    return {"type": kind, "value": value, **more}


def plain(vlm: VLM, messages: Any, **options: Any) -> str:
    return vlm.using("plain").generate(messages, max_new_tokens=MOST, do_sample=False, **options).text


def test_roles_become_messages_and_turns_one_conversation(make: Make, vlm: VLM, pictures: list[str]) -> None:
    given = [part("text", "Be brief.", role="system"), part("image", pictures[0]), part("text", "What?")]
    image = {"type": "image", "image": pictures[0]}
    assert vlmevalkit.conversation(given) == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
    ]
    with pytest.raises(InputError, match="audio"):
        vlmevalkit.conversation([part("audio", "a.wav")])
    turns = [
        {"role": "user", "content": [part("image", pictures[0]), part("text", "What is drawn here?")]},
        {"role": "assistant", "content": [part("text", "Shapes.")]},
        {"role": "user", "content": [part("text", "Which?")]},
    ]
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is drawn here?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Shapes."}]},
        {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
    ]
    assert make().chat_inner(turns, dataset="TURNS") == plain(vlm, messages)


def test_threads_share_the_batch_and_get_their_own_answers(
    make: Make, vlm: VLM, pictures: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "speed.json"
    model = make(batch_size=3, speed=str(path))
    assert model.INTERLEAVE
    assert model.is_api, "VLMEvalKit asks several questions at once of such models only"
    given = [[part("image", path), part("text", "What is drawn here?")] for path in pictures]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda message: model.generate(message, dataset="DATA"), given))
    assert answers == [plain(vlm, "What is drawn here?", images=[path]) for path in pictures]
    (speed,) = json.loads(path.read_text())["tasks"].values()
    assert speed["answers"] == 4
    assert speed["tokens_per_pass"] > 1
    assert not make(batch_size=1).is_api


def test_an_error_reaches_the_thread_that_asked(make: Make, pictures: list[str]) -> None:
    model = make(batch_size=2)
    with pytest.raises(InputError, match=r"missing\.png"):
        model.generate([part("image", "missing.png"), part("text", "What?")])
    assert model.generate([part("image", pictures[0]), part("text", "What?")])
    model = make(skip_failed=True)
    assert model.generate([part("image", "missing.png"), part("text", "What?")]) == "Failed to obtain answer via API."


def test_the_data_set_decides_how_videos_are_sampled(make: Make, vlm: VLM, tmp_path: Path) -> None:
    pytest.importorskip("av")
    from tools.pocket.files import write_video

    sample, path = draw(700_000, "video-question"), tmp_path / "film.mp4"
    assert sample.video is not None
    write_video(path, sample.video, sample.fps or 1.0)
    given = [part("video", str(path)), part("text", sample.question)]
    model = make()
    assert model.VIDEO_LLM
    with pytest.raises(InputError, match="batch_size=1"):
        model.generate(given)
    model.nframe, model.fps = 4, None  # as VLMEvalKit sets them
    assert model.generate(given) == plain(vlm, sample.question, videos=[str(path)], num_frames=4)
    with pytest.raises(InputError, match="in the configuration of the data set"):
        make(num_frames=4)


def test_the_launcher_registers_before_it_runs_the_script(make: Make, tmp_path: Path) -> None:
    script, note = tmp_path / "run.py", tmp_path / "note.txt"
    script.write_text("import sys, vlmeval.vlm\nopen(sys.argv[1], 'w').write(vlmeval.vlm.Saccade.__name__ + __name__)")
    path, words = list(sys.path), list(sys.argv)
    try:
        vlmevalkit.main([str(script), str(note)])
    finally:
        sys.path[:], sys.argv[:] = path, words
    assert note.read_text() == "Saccade__main__"
    with pytest.raises(SaccadeError, match=r"run\.py first"):
        vlmevalkit.main(["--data", "X"])
