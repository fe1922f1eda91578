"""The kit that measures a device: from end to end with tiny models, and what it does with what goes wrong."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device import ROOT, exact
from benchmarks.device.__main__ import options_of, work, write_page
from benchmarks.device.kit import Kit, device_of
from benchmarks.device.page import page
from benchmarks.device.records import SHARES, Record, Records
from families import FAMILIES
from processes import exit_code_of
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Row
from saccade.errors import SaccadeWarning
from saccade.loading import adapt


def check(records: list[Record], parts: tuple[str, ...]) -> None:
    """Every part is there, and everything that was begun ended without an error or a wrong token."""
    assert not [record for record in records if record["kind"] == "error" or record.get("WRONG")]
    assert {r["part"] for r in records if r["kind"] == "finding"} == set(parts)
    begun, ended = ({r["piece"] for r in records if r["kind"] == kind} for kind in ("begin", "end"))
    assert begun == ended
    assert "/tmp" not in page(records)


def test_one_command_measures_a_cpu_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device", "--small", "--device", "cpu", "--minutes", "5"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    check(Records(tmp_path).read(), tuple(SHARES))
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "0 WRONG, 0 warnings, 0 errors" in text
    assert "Computed, not measured" in text


def test_the_same_runs_on_the_pretend_device_with_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_EXECUTOR", "auto")
    arguments = ["--small", "--device", "pretend", "--out", str(tmp_path), "--worker", str(time.time() + 300)]
    options = options_of([*arguments, "--parts", "cost", "load"])
    assert exit_code_of(lambda: sys.exit(work(options))) == 0
    records = Records(tmp_path).read()
    check(records, ("cost", "load"))
    passes = {r["graphs"]: r["launches"] for r in records if r.get("nodes") == 8 and r.get("rows") == 1}
    assert passes[True] < passes[False]
    (graphs,) = (r for r in records if "reserved" in r)
    assert graphs["reserved"] > 0
    assert graphs["line"] in page(records)


PRETENDED = ("qwen3_5", "deepseek_v3 (MLA) and its MTP", "nemotron_h", "two threads")


def test_the_pretend_device_runs_stock_modules_and_every_thread(tmp_path: Path) -> None:
    """Modules that give tensors to `torch.tensor`, count experts, or are loaded by threads of their own."""

    def measure() -> None:
        with device_of("pretend") as (device, pretend):
            kit = Kit(Records(tmp_path), device, small=True, ends=time.time() + 500, pretend=pretend)
            kit.begin("exact")
            for name, piece in exact.pieces(kit):
                assert name not in PRETENDED or kit.run(name, piece)

    assert exit_code_of(measure) == 0
    records = Records(tmp_path).read()
    check(records, ("exact",))
    assert {r["piece"] for r in records if r.get("same")} == set(PRETENDED)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    made = Kit(Records(tmp_path), torch.device("cpu"), small=True, ends=time.time() + 300)
    made.begin("exact")
    return made


def test_a_planted_token_is_called_wrong(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact.tiny(kit, "llava")
    drafters = {"chain": ModelDrafter(adapt(FAMILIES["llava"].draft_model(), drafts=True), Chain(4))}
    (right,) = exact.judge(kit, model, drafters)
    assert (right["WRONG"], right["same"]) == (0, 2)
    emit = Row.emit
    monkeypatch.setattr(Row, "emit", lambda self, tokens, *more: emit(self, [*tokens[:-1], tokens[-1] ^ 1], *more))
    (wrong,) = exact.judge(kit, model, drafters)
    assert (wrong["WRONG"], wrong["same"]) == (2, 0)
    assert "WRONG at 0" in wrong["line"]


def test_a_token_as_likely_as_the_expected_one_is_a_tie_in_bfloat16_alone() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[1, 8] = 9.0, 8.9
    expected = exact.Reference([3, 7], logits)
    verdicts = [exact.compare(expected, [3, 8], dtype)["verdict"] for dtype in (torch.bfloat16, torch.float32)]
    assert verdicts == ["tie", "WRONG"]
    assert exact.compare(expected, [3], torch.bfloat16)["verdict"] == "WRONG"


def test_exceptions_and_warnings_are_recorded_without_paths_and_stop_nothing(kit: Kit) -> None:
    def broken() -> Iterator[Any]:
        yield {"line": "before"}
        raise RuntimeError(f"no file {Path(__file__)} here\nand more")

    assert kit.run("broken", broken)
    assert kit.run("whole", lambda: iter([{"line": "fine"}]))
    assert kit.run("slower", lambda: warnings.warn("no graphs", SaccadeWarning, stacklevel=1) or iter([]))
    kit.ends = kit.part_ends = 0.0
    assert kit.run("late", broken)
    kinds = [(r["kind"], r["piece"]) for r in kit.records.read()]
    assert ("left out", "late") in kinds
    (error,) = (r for r in kit.records.read() if r["kind"] == "error")
    assert (error["error"], error["line"]) == ("RuntimeError", "no file <path> here")
    assert error["frames"][-1].startswith("bench/test_device_kit.py:")
    write_page(kit.records.folder)
    text = (kit.records.folder / "page.md").read_text(encoding="utf-8")
    assert "**error** exact, broken: RuntimeError" in text
    assert "**warning** exact, slower: no graphs" in text
    assert "whole: fine" in text


def test_a_process_that_breaks_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write("begin", "exact", "fatal")
    records.path.open("a").write('{"cut sho')
    records.path.open("a").write("\n")
    records.close_open(-11)
    assert records.begun == {("exact", "fatal")}
    assert "the process ended with code -11" in page(records.read())
