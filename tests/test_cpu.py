"""Number format and threads by the processor: stored formats that it does not compute in, busy cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import ready
from saccade import SaccadeWarning, cpu, load
from saccade.errors import InputError
from saccade.loading import load_model


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cpu.SWITCH)
    cpu._findings.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, speed: float | None) -> None:
    """A processor with bfloat16 instructions of a speed relative to float32; None: without them."""
    monkeypatch.setattr(cpu, "has_instructions", lambda dtype: speed is not None)
    monkeypatch.setattr(cpu, "_speed_over_float32", lambda dtype: speed)


@pytest.mark.parametrize(("speed", "expected"), [(None, "float32"), (0.9, "float32"), (2.0, "bfloat16")])
def test_auto_is_the_stored_format_where_the_processor_is_faster_in_it_or_float32_does_not_fit(
    speed: float | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, speed)
    load_model(ready("llama")).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert load_model(tmp_path / "half", dtype="bfloat16").dtype == torch.bfloat16
    if expected == "bfloat16":
        assert load_model(tmp_path / "half").dtype == torch.bfloat16
        return
    with pytest.warns(SaccadeWarning, match="in which this processor is slow: it runs in float32"):
        assert load_model(tmp_path / "half").dtype == torch.float32
    enough = 4 * sum(p.numel() for p in load_model(tmp_path / "half", dtype="bfloat16").parameters()) / 0.9
    for free, dtype, words in ((0.99, torch.bfloat16, "in bfloat16 all the same"), (1.01, torch.float32, "in float32")):
        monkeypatch.setattr(cpu, "available_memory", lambda free=free: int(free * enough))
        with pytest.warns(SaccadeWarning, match=f"it runs {words}"):
            assert load_model(tmp_path / "half").dtype == dtype


def test_the_speed_of_a_format_is_measured_once_per_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, 2.0)
    assert cpu.computes_in(torch.bfloat16)
    (file,) = (tmp_path / "cache" / "saccade").iterdir()
    assert json.loads(file.read_text()) == {"bfloat16 over float32": [2.0]}
    pretend(monkeypatch, 0.5)  # a busy machine at the next start
    cpu._findings.cache_clear()
    assert cpu.computes_in(torch.bfloat16)
    file.write_text("damaged")
    cpu._findings.cache_clear()
    assert not cpu.computes_in(torch.bfloat16)


@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_the_switch_decides_in_place_of_instructions_speed_and_what_was_measured(
    has: bool, value: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has}, raising=False)
    monkeypatch.setattr(cpu, "_speed_over_float32", lambda dtype: pytest.fail("measured"))
    monkeypatch.setenv(cpu.SWITCH, value)
    assert cpu.has_instructions(torch.bfloat16) is cpu.computes_in(torch.bfloat16) is expected
    assert cpu.suitable_dtype(torch.bfloat16) == (torch.bfloat16 if expected else torch.float32)
    assert not cpu.has_instructions(torch.float16)
    assert not (tmp_path / "cache").exists()


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SWITCH, "yes")
    with pytest.raises(InputError, match="SACCADE_CPU_BF16 must be 0 or 1, not 'yes'"):
        cpu.computes_in(torch.bfloat16)


def test_a_measured_speed_is_a_ratio_of_times() -> None:
    assert 0.01 < cpu._speed_over_float32(torch.float32) < 100


@pytest.mark.parametrize(
    ("threads", "variable", "parameters", "expected"),
    [(3, "2", 10, [3]), (None, "2", 10**10, [7]), (None, "", 10, [1, 2, 4]), (None, "", 10**10, [5])],
)
def test_threads_are_those_requested_or_of_the_environment_or_one_for_a_small_model_or_the_idle_cores(
    threads: int | None, variable: str, parameters: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [7]
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(cpu, "idle_cores", lambda: 5)
    monkeypatch.setattr(cpu, "usable_cores", lambda: 6)
    assert cpu.use_threads(threads, parameters) == expected
    assert chosen[-1] == expected[0]


def test_cores_that_others_use_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_capabilities", lambda: {"num_physical_cores": 8})
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: range(16), raising=False)
    for busy, idle in ((0.1, 8), (2.6, 5), (20.0, 1)):
        monkeypatch.setattr(cpu, "busy_cores", lambda busy=busy: busy)
        assert cpu.idle_cores() == idle


def test_fewer_than_one_thread_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InputError, match="at least 1, not 0"):
        load("no/such/model", threads=0)
