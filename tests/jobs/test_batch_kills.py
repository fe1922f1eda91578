"""A job that is killed at any moment goes on to the output of an undisturbed one; its memory does not grow."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import picture, saved_picture, vlm
from processes import forked
from saccade.jobs import batch_file
from saccade.resumable import Report

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

QUESTIONS = 12


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Questions of different lengths about pictures, and two that cannot be answered."""
    for shade in range(3):
        saved_picture(tmp_path / f"{shade}.png", shade)
    rows: list[Any] = [{"prompt": f"What {'x' * n}?", "image": f"{n % 3}.png"} for n in range(QUESTIONS)]
    rows[4]["image"], rows[7] = "none.png", "no row"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source: Path, out: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_new_tokens": 12, "max_rows": 3, "workers": 2}
    return batch_file(vlm("llava", "llava-draft"), source, out, **{**options, **changes})


def killed(work: Callable[[Callable[[Report], None]], Any], *, seconds: float = 600, records: int = 10**9) -> bool:
    """Work in a forked process, which is killed after some seconds or records; whether it came to its end."""

    def progress(at: Report) -> None:
        if at.done - at.there >= records:
            os.kill(os.getpid(), signal.SIGKILL)

    process = forked(lambda: work(progress))
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def lines(out: Path) -> list[dict[str, Any]]:
    path = out.with_name(f"{out.name}.journal") / "records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_kills_between_records_lose_none_and_double_none(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    for records in (0, 2, 5):
        assert not killed(lambda progress: run(source, out, progress=progress), records=records)
        assert not out.exists()
    assert len(lines(out)) == 7
    with (tmp_path / "out.jsonl.journal" / "records.jsonl").open("ab") as file:
        file.write(b'{"key": "0", "fail')  # a line that the kill has torn
    report = run(source, out)
    assert (report.there, report.answered + report.failed) == (7, QUESTIONS - 7)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    keys = [line["key"] for line in lines(out)]
    assert len(keys) == len(set(keys)) == QUESTIONS


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(source: Path, tmp_path: Path) -> None:
    vlm("llava", "llava-draft")
    started = time.perf_counter()
    run(source, tmp_path / "whole.jsonl")
    seconds = time.perf_counter() - started
    moments, out = random.Random(1), tmp_path / "out.jsonl"
    ended = 0
    for number in range(20):
        if number % 5 == 0:  # begin anew, so that all kills meet work
            out = tmp_path / f"out{number}.jsonl"
        ended += killed(lambda progress: run(source, out, progress=progress), seconds=moments.uniform(0, 0.6 * seconds))  # noqa: B023
        keys = [line["key"] for line in lines(out)[:-1]]
        assert len(keys) == len(set(keys))
        if number % 5 == 4:
            run(source, out)
            assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert ended < 10, "most were killed at work"


@pytest.mark.slow
def test_memory_stays_flat_over_thousands_of_pictures(tmp_path: Path) -> None:
    """All pictures together have 400 MB of pixels, the items 3,000 rows."""
    for shade in range(20):
        picture(shade, (220, 200)).save(tmp_path / f"{shade}.png")
    row = '{{"id": "{}", "prompt": "What?", "image": "{}.png"}}\n'
    (tmp_path / "rows.jsonl").write_text("".join(row.format(n, n % 20) for n in range(3000)))
    used: list[int] = []

    def progress(found: Report) -> None:
        if found.done >= 200 and not found.done % 100:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used.append(pages * os.sysconf("SC_PAGESIZE"))

    options: dict[str, Any] = {"max_new_tokens": 1, "max_rows": 8, "workers": 2, "progress": progress}
    batch_file(vlm("llava", method="plain"), tmp_path / "rows.jsonl", tmp_path / "out.jsonl", **options)
    assert max(used) - used[0] < 24 << 20
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3000
