"""Workers for media: the same prompts as in this process, and no failure that reaches another request."""

from __future__ import annotations

import base64
import copy
import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_processor import FailingProcessor
from live_server import TINY, asks, live, uri
from PIL import Image

from checkpoints import picture, vlm
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.inputs.media import SERVER
from saccade.inputs.processor import InputProcessor, MediaOptions
from saccade.serve.workers import PromptWorkers

ONE_SENTENCE = r"^[A-Z][^\n]*[^.\n]\.$"
OPTIONS = MediaOptions(limits=SERVER, text_as_text=True)
SEEN = tuple(vlm(name).processor for name in ("qwen", "llava"))
FAILING = FailingProcessor(SEEN[0])
FAILURES = [
    ("crash", InputError, "the decoder has failed"),
    ("leave", InputError, "the decoder has failed"),
    ("grow", InputError, "need too much memory"),
    ("grow in Torch", InputError, "need too much memory"),
    ("mistake", RuntimeError, "its traceback is in the log"),
]


@pytest.fixture(scope="module")
def workers() -> Iterator[PromptWorkers]:
    found = PromptWorkers([*SEEN, FAILING], seconds=60, memory=1 << 30)
    yield found
    found.close()


def source(kind: str, **options: Any) -> str:
    content = io.BytesIO()
    picture(3, (90, 60)).save(content, kind, **options)
    return f"data:;base64,{base64.b64encode(content.getvalue()).decode()}"


def here(messages: Any, processor: InputProcessor) -> Prompt:
    loaded = processor.load_media(messages, OPTIONS)
    return processor.prompt(loaded, options=OPTIONS)


def are_equal(first: Prompt, second: Prompt) -> bool:
    """Whether ids, digests and all tensors are."""
    pairs = list(zip(first.media, second.media, strict=True))
    return first == second and all(
        a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)
        for a, b in pairs
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_workers_make_the_prompts_of_this_process(kind: str, workers: PromptWorkers) -> None:
    messages = asks("What is </s> this?", source(kind), uri(1))
    row = workers.row(messages, SEEN, OPTIONS)
    for processor in SEEN:
        assert are_equal(row.prompt(processor), here(messages, processor))


def test_workers_make_the_prompts_of_films(workers: PromptWorkers) -> None:
    frames = [Image.new("RGB", (60, 40), (40 * n, 0, 255 - 40 * n)) for n in range(5)]
    content = io.BytesIO()
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:])
    film = "data:video/gif;base64," + base64.b64encode(content.getvalue()).decode()
    messages = [{"role": "user", "content": [{"type": "video", "video": film}, {"type": "text", "text": "What?"}]}]
    assert are_equal(workers.row(messages, SEEN[:1], OPTIONS).prompt(SEEN[0]), here(messages, SEEN[0]))


@pytest.mark.parametrize(("words", "error", "says"), FAILURES)
def test_a_failure_is_one_sentence_and_the_next_request_works(
    words: str, error: type[Exception], says: str, workers: PromptWorkers
) -> None:
    with pytest.raises(error, match=ONE_SENTENCE) as caught:
        workers.row(asks(words, uri(0)), [FAILING], OPTIONS)
    assert says in str(caught.value)
    assert workers.row(asks("Hello", uri(0)), [FAILING], OPTIONS).prompt(FAILING).media


def test_a_refusal_is_the_sentence_of_this_process(workers: PromptWorkers) -> None:
    messages = asks("Hello", "data:image/png;base64,AAAA")
    with pytest.raises(InputError) as expected:
        here(messages, SEEN[0])
    with pytest.raises(InputError, match=f"^{re.escape(str(expected.value))}$"):
        workers.row(messages, SEEN, OPTIONS)


def test_workers_see_no_keys(workers: PromptWorkers) -> None:
    with pytest.raises(InputError) as caught:
        workers.row(asks("environment", uri(0)), [FAILING], OPTIONS)
    assert "PATH" not in str(caught.value).split()


def test_a_fork_server_that_has_ended_is_started_again(workers: PromptWorkers) -> None:
    assert workers.row(asks("Hello", uri(0)), SEEN, OPTIONS).prompt(SEEN[0]).media
    assert workers._process is not None
    workers._process.kill()
    workers._process.wait()
    assert workers.row(asks("Hello", uri(0)), SEEN, OPTIONS).prompt(SEEN[0]).media


def group(leader: int) -> list[int]:
    """Processes whose parent is this one."""
    return [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]


def test_nothing_is_left_behind() -> None:
    workers = PromptWorkers([FAILING], seconds=600, memory=1 << 30)
    errors: list[BaseException] = []

    def hang() -> None:
        try:
            workers.row(asks("hang", uri(0)), [FAILING], OPTIONS)
        except InputError as error:
            errors.append(error)

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while workers._process is None or not (left := group(workers._process.pid)):
        assert time.monotonic() < end
        time.sleep(0.05)
    workers.close()
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(left[0], signal.SIG_DFL)


def test_a_server_answers_others_while_a_decoder_hangs_and_after_it_has_crashed() -> None:
    model = copy.copy(vlm("qwen", "qwen-draft"))
    model.processor = FailingProcessor(model.processor)
    with live([(TINY, model)], media=replace(SERVER), media_workers=1, media_seconds=6.0) as server:
        body = {"model": "tiny", "max_tokens": 3}
        status, answer = server.post({**body, "messages": asks("crash", uri(0))})
        assert status == 400
        assert "the decoder has failed" in answer["error"]["message"]
        answers: list[Any] = []
        ask = {**body, "messages": asks("hang", uri(0))}
        thread = threading.Thread(target=lambda: answers.append(server.post(ask)))
        thread.start()
        server.until(lambda: server.service._preparing)
        assert server.post({**body, "messages": asks("Hello")})[0] == 200
        assert thread.is_alive(), "text waits for no picture"
        status, _ = server.post({**body, "messages": asks("Hello", uri(0))})
        assert status == 200
        thread.join(60)
        assert answers[0][0] == 400
        assert "take longer than 6 seconds" in answers[0][1]["error"]["message"]
