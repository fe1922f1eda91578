"""Files of the package that one `generate` crosses, and those that loading the built-in pair imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import saccade
from saccade.pocket import draw

CROSSED, IMPORTED = 25, 85
"""Most files that a warmed-up `generate` runs code of, and that `load("pocket")` imports."""
PACKAGE = Path(saccade.__file__).parent


def test_one_generate_crosses_few_files() -> None:
    vlm = saccade.load("pocket", method="auto", dtype="float32")
    sample = draw(5, "chart")
    question, image = sample.question, sample.image
    vlm.generate(question, [image], max_new_tokens=16)
    crossed: set[Path] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            crossed.add(path.relative_to(PACKAGE))

    sys.setprofile(record)
    try:
        vlm.generate(question, [image], max_new_tokens=64)
    finally:
        sys.setprofile(None)
    assert len(crossed) <= CROSSED, sorted(map(str, crossed))


def test_loading_imports_few_files() -> None:
    code = "import sys, saccade; saccade.load('pocket'); print([m for m in sys.modules if m.startswith('saccade')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    modules = run.stdout.splitlines()[-1]
    assert modules.count("'") // 2 <= IMPORTED, modules
