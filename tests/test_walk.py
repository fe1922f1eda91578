"""Files that one `generate`, chat or job crosses, functions that a step calls, and files that loading imports."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import saccade
from media_files import data_uri
from saccade import VLM
from saccade.jobs import batch_file
from saccade.pocket import draw
from saccade.serve.configuration import ModelEntry
from saccade.target_model.openvino_graph import missing
from serve.live_server import asks, live

CROSSED = {
    "plain": 21,
    "chain": 24,
    "auto": 25,
    "lvspec": 25,
    "dynamic-tree": 25,
    "tabed": 26,
    "hivis": 27,
    "eagle2": 27,
    "sage": 28,
    "dream": 29,
}
"""Most files that a warmed-up `generate` runs code of, by method: one of each kind that the built-in pair has."""
IMPORTED = 95
"""Most files that `load("pocket")` imports."""
PACKAGE = Path(saccade.__file__).parent
METHODS: dict[str, dict[str, Any]] = {"plain": {}, "chain": {"gamma": 5}, "auto": {}, "dynamic-tree": {}, "hivis": {}}
CALLS = {
    "lean": {"plain": 150, "chain": 416, "auto": 600, "dynamic-tree": 482, "hivis": 570},
    "openvino": {"plain": 170, "chain": 284, "auto": 560, "dynamic-tree": 660, "hivis": 600},
}
"""Most calls of the package's functions in a pass of the target with its drafts, by what runs the models: those in the
lean decoder, a few for every layer, are not counted. `auto` drafts by the clock, and processors differ."""
DECODER = {"LeanDecoder.__call__", "Linear.__call__", "Linear.product"}


@pytest.fixture(scope="module")
def loaded() -> VLM:
    return saccade.load("pocket", dtype="float32", threads=1)


@pytest.mark.parametrize("method", CROSSED)
def test_one_generate_crosses_few_files(loaded: VLM, method: str) -> None:
    vlm, sample = loaded.using(method), draw(5, "chart")
    question, image = sample.question, sample.image
    vlm.generate(question, [image], max_new_tokens=16)
    crossed: set[Path] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            crossed.add(path.relative_to(PACKAGE))

    sys.setprofile(record)
    try:
        vlm.generate(question, [image], max_new_tokens=64)
    finally:
        sys.setprofile(None)
    assert len(crossed) <= CROSSED[method], sorted(map(str, crossed))


def test_loading_imports_few_files() -> None:
    code = "import sys, saccade; saccade.load('pocket'); print([m for m in sys.modules if m.startswith('saccade')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    modules = run.stdout.splitlines()[-1]
    assert modules.count("'") // 2 <= IMPORTED, modules


def calls(vlm: VLM, tokens: int) -> tuple[int, int]:
    """Calls of the package's functions outside of the lean decoder while an answer is generated, and its passes."""
    sample, count, decoders = draw(900100, "scene", "verbose"), 0, list[FrameType]()

    def record(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if decoders and event == "return" and frame is decoders[0]:
            decoders.clear()
        elif not decoders and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            count += 1
            if frame.f_code.co_qualname in DECODER:
                decoders.append(frame)

    sys.setprofile(record)
    try:
        output = vlm.generate(sample.question, [sample.image], max_new_tokens=tokens)
    finally:
        sys.setprofile(None)
    return count, output.stats.target_passes


@pytest.mark.parametrize("executor", [name for name in CALLS if name != "openvino" or not missing()])
def test_a_pass_calls_few_functions(executor: str) -> None:
    loaded = saccade.load("pocket", dtype="float32", executor=executor)
    counted = {}
    for method, options in METHODS.items():
        vlm = loaded.using(method, **options)
        calls(vlm, 20)  # with what is only done once
        (few, first), (many, last) = calls(vlm, 10), calls(vlm, 90)
        counted[method] = (many - few) / (last - first)
    assert {name: each for name, each in counted.items() if each > CALLS[executor][name]} == {}, counted


# -- the server and jobs -----------------------------------------------------------------------------------

AROUND_A_CHAT, AROUND_A_JOB = 9, 8
"""Most files, besides those of one `generate`, that a chat over HTTP and a `batch_file` run code of, warmed-up."""


@contextmanager
def crossing() -> Iterator[set[str]]:
    """Files of the package that this thread runs code of, and those that begin while the context is open."""
    files = set[str]()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def warm() -> tuple[VLM, set[str]]:
    """A model, and the files of one `generate`."""
    vlm, sample = saccade.load("pocket", method="auto", dtype="float32", executor="lean"), draw(5, "chart")
    question, image = sample.question, sample.image
    vlm.generate(question, [image], max_new_tokens=16)
    with crossing() as files:
        vlm.generate(question, [image], max_new_tokens=64)
    return vlm, files


def test_a_chat_over_http_crosses_few_more_files(warm: tuple[VLM, set[str]]) -> None:
    (vlm, generating), sample, picture = warm, draw(5, "chart"), BytesIO()
    sample.image.save(picture, "PNG")
    body = {"messages": asks(sample.question, data_uri(picture.getvalue())), "max_tokens": 64}
    with crossing() as files, live([(ModelEntry("pocket"), vlm)]) as server:
        assert server.post({**body, "max_tokens": 16})[0] == 200
        server.until(lambda: server.is_idle)
        files.clear()
        assert server.post(body)[0] == 200
        more = files - generating
    assert len(more) <= AROUND_A_CHAT, sorted(more)


def test_a_batch_file_crosses_few_more_files(warm: tuple[VLM, set[str]], tmp_path: Path) -> None:
    vlm, generating = warm
    for number in range(3):
        draw(number, "chart").image.save(tmp_path / f"{number}.png")
    for name in ("first", "second"):
        with crossing() as files:
            report = batch_file(vlm, str(tmp_path / "*.png"), tmp_path / name, prompt="What is it?", max_new_tokens=16)
        assert report.answered == 3
    assert len(files - generating) <= AROUND_A_JOB, sorted(files - generating)
