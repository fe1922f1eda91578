"""What the README shows runs as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_first_example_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page.partition("## Use it")[2], re.DOTALL)[0]
    assert 'saccade.load("pocket")' in code
    exec(code, {})
    answer, last = capsys.readouterr().out.splitlines()
    assert float(answer.rpartition(" ")[2]) > 2, "the draft model's block efficiency"
    assert float(last) > 2, "the head's"
