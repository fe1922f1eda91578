"""The packages that people reach OpenAI's API by, against the pocket model, as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Live
from outside import environment, install, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PACKAGES = {
    "openai": "openai>=2,<3",
    "langchain": "langchain-openai>=1,<2",
    "litellm": "litellm>=1.110,<2",
    "llama_index": "llama-index-llms-openai-like>=0.8,<0.9",
}
FILE = Path(__file__).with_name("client_programs.py")
PROGRAMS = re.findall(r"^def (\w+)\(url: str\) -> None:", FILE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Iterator[str]:
    """Python of an environment with a package."""
    with environment() as folder:
        install(folder, PACKAGES[request.param])
        yield f"{folder}/bin/python"


@pytest.mark.parametrize(
    ("python", "program"),
    [(name, program) for name in PACKAGES for program in PROGRAMS if program.startswith(name)],
    indirect=["python"],
)
def test_a_package_runs_unchanged(python: str, program: str, pocket: Live) -> None:
    run(python, FILE, program, pocket.url)
