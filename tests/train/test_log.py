"""Numbers of a run on TensorBoard and on Weights & Biases."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from training_run import closeness, recipe, run

from over_processes import run_split
from saccade.errors import TrainingError


class Service(ModuleType):
    """In place of the package `wandb`: notes what it is told in a file, as processes have no memory in common."""

    def __init__(self, noted: Path, refuses: str = "") -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self._noted, self._refuses = noted, refuses

    def init(self, **options: Any) -> SimpleNamespace:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self._note("init", {k: v for k, v in options.items() if k != "config"} | {"seed": options["config"]["seed"]})
        return SimpleNamespace(log=self._log, finish=lambda: self._note("finish", {}))

    def _log(self, values: dict[str, float], step: int) -> None:
        self._note("log", {"step": step, **values})

    def _note(self, what: str, values: dict[str, Any]) -> None:
        with self._noted.open("a") as file:
            file.write(json.dumps([what, values]) + "\n")

    @property
    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [json.loads(line) for line in self._noted.open()]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service(tmp_path / "told.jsonl")
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_a_run_is_one_run_of_the_project_also_when_it_goes_on(service: Service, tmp_path: Path) -> None:
    run(tmp_path / "run", wandb="heads")
    run(tmp_path / "run", wandb="heads", resume=True)
    begun = [values for what, values in service.told if what == "init"]
    assert len(begun) == 2
    assert begun[0] == begun[1]
    assert begun[0]["project"] == "heads"
    assert begun[0]["name"] == "run"
    assert begun[0]["resume"] == "allow"
    assert [what for what, _ in service.told].count("finish") == 2
    logged = [values for what, values in service.told if what == "log"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    assert [v["step"] for v in logged] == [v["step"] for v in lines]
    assert [v.get("loss") for v in logged] == [v.get("loss") for v in lines]
    assert [v.get("agreement/0") for v in logged if "loss" in v] == [v["agreement"][0] for v in lines if "loss" in v]


def test_of_two_processes_the_first_alone_logs(service: Service, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        run(tmp_path / "run", recipe(), wandb="heads")
        return {}

    run_split(tmp_path, work)
    assert [what for what, _ in service.told].count("init") == 1


def test_what_the_service_refuses_is_said_before_a_step_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Service(tmp_path, "api_key not configured (no-tty).\nCall wandb.login()"))
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
    run(tmp_path / "run", replace(recipe(), checkpoint_every=4), wandb="heads", measure=closeness)
    run(tmp_path / "run", replace(recipe(), checkpoint_every=4), wandb="heads", measure=closeness, resume=True)
    found = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert found
    assert all(file.stat().st_size > 0 for file in found)
