"""Output of the plans in docs/recipes, computed from the published configurations in tests/shapes."""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from saccade.cli import app

SHAPES = Path(__file__).parents[2] / "tests" / "shapes"
PUBLISHED = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "llava-hf/llava-1.5-7b-hf": "llava-1.5-7b",
    "OpenGVLab/InternVL3-8B-hf": "internvl3-8b",
    "JackFram/llama-68m": "llama-68m",
}
"""Hub ids by the folder of their configuration."""
_PLAN = re.compile(r"(```\n(saccade [^`]*--plan)\n```\n\n```text\n)(.*?)(```)", re.DOTALL)


def filled(page: str) -> str:
    """Return a page with the output after every plan written again."""
    return _PLAN.sub(lambda found: found[1] + printed(found[2]) + found[4], page)


def printed(command: str) -> str:
    """Return what a plan prints where there are neither weights nor data."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    words = [str(SHAPES / PUBLISHED[word]) if word in PUBLISHED else word for word in words]
    output, before = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with redirect_stdout(output):
                app(words, standalone_mode=False)
        finally:
            os.chdir(before)
    return output.getvalue()
