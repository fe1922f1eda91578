"""Workers for media: the same prompts as in this process, and no failure that reaches another request."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_processor import FailingProcessor
from live_server import TINY, Live, asks, live, uri
from PIL import Image

from checkpoints import picture, vlm
from media_files import data_uri, encoded
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.inputs.media import SERVER
from saccade.inputs.processor import InputProcessor, MediaOptions
from saccade.serve.configuration import ModelEntry
from saccade.serve.refusals import Refusal
from saccade.serve.workers import PromptWorkers

ONE_SENTENCE = r"^[A-Z][^\n]*[^.\n]\.$"
OPTIONS = MediaOptions(limits=SERVER, text_as_text=True)
FAILING = FailingProcessor(vlm("qwen", "qwen-draft").processor)
SEEN = (FAILING, vlm("llava").processor)
FAILURES = [
    ("crash", InputError, "the decoder has failed"),
    ("kill", Refusal, "was killed; try again in 2 s"),
    ("kill the decoder", Refusal, "was killed; try again in 2 s"),
    ("leave", InputError, "the decoder has failed"),
    ("grow", InputError, "need too much memory"),
    ("grow in Torch", InputError, "need too much memory"),
    ("mistake", RuntimeError, "its traceback is in the log"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """One whose workers fail at what `FailingProcessor` names."""
    model = copy.copy(vlm("qwen", "qwen-draft"))
    model.processor = FAILING
    limits: dict[str, Any] = {"media_workers": 1, "prepare_threads": 1, "media_seconds": 6.0, "media_memory_mib": 1024}
    with live([(TINY, model), (ModelEntry("llava"), vlm("llava"))], media=replace(SERVER), **limits) as running:
        yield running


@pytest.fixture
def workers(server: Live) -> PromptWorkers:
    assert server.service._workers is not None
    return server.service._workers


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


def test_workers_make_the_prompts_of_this_process(workers: PromptWorkers) -> None:
    kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    messages = asks("What is </s> this?", *(data_uri(encoded(kind, picture(3, (90, 60)))) for kind in kinds))
    row = workers.row(messages, SEEN, OPTIONS)
    for processor in SEEN:
        assert are_equal(row.prompt(processor), here(messages, processor))
    frames = [Image.new("RGB", (60, 40), (40 * n, 0, 255 - 40 * n)) for n in range(5)]
    film = data_uri(encoded("GIF", frames[0], save_all=True, append_images=frames[1:]), "video/gif")
    messages[0]["content"].insert(0, {"type": "video", "video": film})
    assert are_equal(workers.row(messages, SEEN[:1], OPTIONS).prompt(SEEN[0]), here(messages, SEEN[0]))


@pytest.mark.parametrize(("words", "error", "says"), FAILURES)
def test_a_failure_is_one_sentence_and_the_next_request_works(
    words: str, error: type[Exception], says: str, workers: PromptWorkers
) -> None:
    with pytest.raises(error) as caught:
        workers.row(asks(words, uri(0)), [FAILING], OPTIONS)
    sentence = getattr(caught.value, "message", str(caught.value))
    assert re.fullmatch(ONE_SENTENCE, sentence)
    assert says in sentence
    assert workers.row(asks("Hello", uri(0)), [FAILING], OPTIONS).prompt(FAILING).media


def test_a_worker_serves_several_requests_and_another_one_where_it_has_ended(workers: PromptWorkers) -> None:
    messages = asks("Hello", uri(0))
    workers.row(messages, SEEN, OPTIONS)
    (first,) = workers._idle
    workers.row(messages, SEEN, OPTIONS)
    assert workers._idle == [first]
    os.kill(first.pid, signal.SIGKILL)
    assert workers.row(messages, SEEN, OPTIONS).prompt(SEEN[0]).media
    (second,) = workers._idle
    second.left = 1
    workers.row(messages, SEEN, OPTIONS)
    assert not workers._idle
    workers.row(messages, SEEN, OPTIONS)
    assert workers._idle[0].pid not in (first.pid, second.pid)


def test_a_worker_that_the_system_kills_in_its_work_is_no_fault_of_the_picture(workers: PromptWorkers) -> None:
    workers._forget()
    children = Path(f"/proc/{workers._process.pid}/task/{workers._process.pid}/children")  # type: ignore[union-attr]
    with ThreadPoolExecutor(1) as pool:
        before = {*children.read_text().split()}
        working = pool.submit(workers.row, asks("hang", uri(0)), [FAILING], OPTIONS)
        while not (new := {*children.read_text().split()} - before):
            time.sleep(0.05)
        time.sleep(0.2)  # others come between its end and the question for it
        os.kill(int(new.pop()), signal.SIGKILL)
        with pytest.raises(Refusal) as caught:
            working.result(60)
    assert (caught.value.status, caught.value.headers()) == (503, {"retry-after": "2"})


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


def test_a_server_answers_others_while_a_decoder_hangs_and_after_it_has_crashed(server: Live) -> None:
    body = {"model": "tiny", "max_tokens": 3}
    status, answer = server.post({**body, "messages": asks("crash", uri(0))})
    assert status == 400
    assert "the decoder has failed" in answer["error"]["message"]
    for words in ("kill", "kill the decoder"):
        status, answer = server.post({**body, "messages": asks(words, uri(0))})
        assert status == 503, "what clients repeat"
        assert "was killed" in answer["error"]["message"]
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(server.post, {**body, "messages": asks("hang", uri(0))})
        server.until(lambda: server.service._preparing)
        assert server.post({**body, "messages": asks("Hello")})[0] == 200
        assert not hanging.done(), "text waits for no picture"
        assert server.post({**body, "messages": asks("Hello", uri(0))})[0] == 200
        status, answer = hanging.result(60)
    assert status == 400
    assert "take longer than 6 seconds" in answer["error"]["message"]


def test_a_fork_server_that_has_ended_is_started_again_and_leaves_nothing_behind(workers: PromptWorkers) -> None:
    workers.row(asks("Hello", uri(0)), SEEN, OPTIONS)
    assert workers._process is not None
    workers._process.kill()
    workers._process.wait()
    assert workers.row(asks("Hello", uri(0)), SEEN, OPTIONS).prompt(SEEN[0]).media
    workers._forget()
    children = Path(f"/proc/{workers._process.pid}/task/{workers._process.pid}/children")
    ended = {*children.read_text().split()}
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(workers.row, asks("hang", uri(0)), [FAILING], OPTIONS)
        end = time.monotonic() + 60
        while not (left := {*children.read_text().split()} - ended):
            assert time.monotonic() < end
            time.sleep(0.05)
        workers.close()
        with pytest.raises((InputError, RuntimeError)):  # as the worker had begun, or not yet
            hanging.result(60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.pop()), signal.SIG_DFL)
