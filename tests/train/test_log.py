"""Numbers of a run on TensorBoard and on Weights & Biases."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from training_run import run

from saccade.errors import TrainingError


class Service(ModuleType):
    """In place of the package `wandb`: notes its calls."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.begun, self.logged, self.finished = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
        self._refuses = refuses

    def init(self, **options: Any) -> SimpleNamespace:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self.begun.append(options)
        return SimpleNamespace(log=self._log, finish=lambda: self.finished.append("heads"))

    def _log(self, values: dict[str, float], step: int) -> None:
        self.logged.append({"step": step, **values})


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_a_run_is_one_run_of_the_project_also_when_it_goes_on(service: Service, tmp_path: Path) -> None:
    run(tmp_path / "run", wandb="heads")
    run(tmp_path / "run", wandb="heads", resume=True)
    one, other = service.begun
    assert one == other
    assert (one["project"], one["name"], one["resume"], one["config"]["seed"]) == ("heads", "run", "allow", 0)
    assert len(service.finished) == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    assert [v["step"] for v in service.logged] == [v["step"] for v in lines]
    assert [v.get("loss") for v in service.logged] == [v.get("loss") for v in lines]
    steps = [line for line in lines if "loss" in line]
    assert [v["agreement/0"] for v in service.logged if "loss" in v] == [v["agreement"][0] for v in steps]


def test_what_the_service_refuses_is_said_before_a_step_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Service("api_key not configured (no-tty).\nCall wandb.login()"))
    with pytest.raises(TrainingError, match=r"\(api_key not configured \(no-tty\)\); log in with `wandb login`, set"):
        run(tmp_path / "run", wandb="heads")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.train.log.find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=r"pip install saccade\[wandb\]"):
        run(tmp_path / "run", wandb="heads")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_the_real_package_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for resume in (False, True):
        run(tmp_path / "run", wandb="heads", resume=resume)
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert files
    assert all(file.stat().st_size > 0 for file in files)
