"""Going on after any kind of end gives the file of an unbroken run, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_lines import asks, rows, talks

import saccade
from checkpoints import ready, vlm
from processes import exit_code_of
from saccade import resumable
from saccade.distill import distill
from saccade.distill.folder import ANSWERS, HEADER
from saccade.errors import SaccadeError
from saccade.resumable import whole_lines

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "batch": 2, "history": "own", "on_bad_line": "skip"}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.fixture
def source(written: Callable[..., Path], pictures: Path) -> Path:
    """Pictures, texts, turns, a duplicate, and what cannot be used."""
    (pictures / "broken.png").write_bytes(b"no picture")
    return written(
        *(asks(f"What {'x' * n} é?", ("a.png", "b.png")[n % 2], name=f"p{n}") for n in range(3)),
        asks("Broken?", "broken.png"),
        asks("What  é?", "same.png"),
        "{",
        talks("t", ("One?", "1"), ("Two?", "2")),
        asks("Text?"),
    )


def run(source: Path, out: Path, **changes: Any) -> Any:
    target = changes.pop("target", vlm("llava", method="plain"))
    return distill(target, source, out, **{**OPTIONS, "media_root": source.parent / "images", **changes})


def killed_at(call: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> bool:
    """Run until the given call that writes, half of which still happens, then SIGKILL."""
    calls = iter(range(10**6))

    def dying(stock: Any, half: bool) -> Any:
        def wrapped(*arguments: Any) -> Any:
            if next(calls) == call:
                if half:
                    stock(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return stock(*arguments)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("write", "fsync", "replace", "ftruncate"):
            patch.setattr(resumable.os, name, dying(getattr(os, name), name == "write"))
        code = exit_code_of(work)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def test_a_kill_at_any_write_changes_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "whole")
    whole = (tmp_path / "whole" / ANSWERS).read_bytes()
    assert whole.count(b"\n") == 6
    call, ended = 0, False
    while not ended:
        out = tmp_path / f"killed{call}"
        ended = killed_at(call, monkeypatch, lambda out=out: run(source, out))  # type: ignore[misc]
        if not ended:
            run(source, out)
        assert (out / ANSWERS).read_bytes() == whole
        assert (out / HEADER).read_bytes() == (tmp_path / "whole" / HEADER).read_bytes()
        call += 1
    assert call > 8, "every batch is a chance to die"


def test_a_file_torn_at_any_byte_is_mended(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    path = tmp_path / "out" / ANSWERS
    whole = path.read_bytes()
    for end in [*range(0, len(whole), 331), len(whole) - 1]:
        path.write_bytes(whole[:end])
        report = run(source, tmp_path / "out")
        assert path.read_bytes() == whole
        assert report.there == whole[:end].count(b"\n")
        assert report.there + report.answered == 6


def test_whole_lines_end_where_a_slow_reading_says(tmp_path: Path) -> None:
    path, long = tmp_path / "x", b"[" + b"7," * 50_000
    ends = {b"": 0, b"1": 0, b"1\n": 2, b"1\n2": 2, b'1\n{"b"\n': 2, b"1\n\0\0\0\n": 2, long: 0}
    for content, end in ends.items():
        path.write_bytes(content)
        assert whole_lines(path) == end, content[:20]


def test_a_full_disk_is_reported_and_leaves_whole_lines(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = os.write

    def full(file: int, data: Any) -> int:
        stock(file, bytes(data)[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resumable.os, "write", full)
    with pytest.raises(SaccadeError, match="No space left on device; the answers so far are intact"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out" / ANSWERS).read_bytes() == b""


def test_another_runs_folder_is_refused_by_the_name_of_what_differs(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    before = (out / ANSWERS).read_bytes()
    other = saccade.load(ready("llava-draft"), method="plain")
    shutil.copytree(ready("llava"), tmp_path / "other")
    place = tmp_path / "other" / "preprocessor_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "image_mean": [0.1, 0.2, 0.3]}))
    changes: dict[str, dict[str, Any]] = {
        "another processor's digest": {"target": saccade.load(tmp_path / "other", method="plain")},
        r"another max_new_tokens \(4 there, 7 now\)": {"max_new_tokens": 7},
        r"another sampled_share \(0.5 there, 0.25 now\)": {"sampled_share": 0.25},
        r"another limit \(None there, 2 now\)": {"limit": 2},
        r"another method \('plain' there, 'prompt-lookup' now\)": {"target": vlm("llava", method="prompt-lookup")},
        "another target's digest": {"target": other},
        "another source's media_root": {"media_root": tmp_path},
    }
    for words, options in changes.items():
        with pytest.raises(SaccadeError, match=words):
            run(source, out, **options)
    source.write_text(source.read_text() + "\n")
    with pytest.raises(SaccadeError, match="another source's content"):
        run(source, out)
    assert (out / ANSWERS).read_bytes() == before
    assert len(rows(out)) == 6


def test_options_may_change_until_there_is_an_answer(
    written: Callable[..., Path], pictures: Path, tmp_path: Path
) -> None:
    (pictures / "broken.png").write_bytes(b"no picture")
    source = written(asks("?", "broken.png"), asks("Fine?"))
    with pytest.raises(SaccadeError, match=r"line 1, question line-1: .* not an image"):
        run(source, tmp_path / "out", on_bad_line="stop", sampled_share=0)
    assert json.loads((tmp_path / "out" / HEADER).read_text())["options"]["max_new_tokens"] == 4
    run(source, tmp_path / "out", max_new_tokens=3)
    assert json.loads((tmp_path / "out" / HEADER).read_text())["options"]["max_new_tokens"] == 3
    assert [len(row["answer_ids"]) for row in rows(tmp_path / "out")] == [3]


def test_two_runs_never_write_to_one_folder(source: Path, tmp_path: Path) -> None:
    def second(progress: Any) -> None:
        with pytest.raises(SaccadeError, match="Another run is writing to"):
            run(source, tmp_path / "out")

    run(source, tmp_path / "out", progress=second)
    assert len(rows(tmp_path / "out")) == 6


def test_damage_inside_the_file_is_named_with_its_line(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    path = tmp_path / "out" / ANSWERS
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged, words in {
        b"".join([lines[0], b"{\n", *lines[2:]]): "line 2 is damaged",
        b"".join([b'{"id": ["a"], "answer": "x"}\n', *lines[1:]]): "line 1 is damaged",
        b"".join([*lines, lines[1]]): "line 7: .* is answered twice",
        b"".join([*lines, lines[1].replace(b'"id": "', b'"id": "strange')]): "an answer to strange",
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(SaccadeError, match=words):
            run(source, tmp_path / "out")
