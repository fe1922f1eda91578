"""The tests of methods and of training on a pretend accelerator, in processes of their own.

A device that is registered with PyTorch stays so, and whatever asks for *the* accelerator afterwards (training does)
would find the pretended one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from processes import exit_code_of

METHODS = Path(__file__).with_name("on_a_pretend_accelerator.py")
TRAINING = Path(__file__).parents[1] / "train" / "train_on_a_pretend_accelerator.py"


class Tally:
    """Notes of a run of pytest: a line for every test that passed, and the text of every failure."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self._file.open("a", encoding="utf-8") as notes:
            if report.failed:
                notes.write(f"{report.nodeid} failed: {report.longreprtext[-4000:]}\n")
            elif report.when == "call" and report.passed:
                notes.write("passed\n")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("tests", "chosen", "least"),
    [
        (METHODS, "not slow", 30),
        (TRAINING, "not slow", 2),
        pytest.param(METHODS, "slow", 22, marks=pytest.mark.slow),
        pytest.param(TRAINING, "slow", 8, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_promises_are_kept_on_a_pretend_accelerator(tests: Path, chosen: str, least: int, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def work() -> None:
        command = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", chosen, str(tests)]
        sys.exit(pytest.main(command, plugins=[Tally(notes)]))

    code = exit_code_of(work)
    found = notes.read_text(encoding="utf-8") if notes.exists() else "no test has run"
    assert code == 0, found
    assert found.count("passed\n") >= least
