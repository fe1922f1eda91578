"""The packages that people reach OpenAI's and Anthropic's APIs by, against the pocket model, as they are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from live_server import Live, unmarked
from outside import environment, install, install_for_node, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PACKAGES = {
    "openai": "openai>=3,<4",
    "langchain": "langchain-openai>=1,<2",
    "litellm": "litellm>=1.110,<2",
    "llama_index": "llama-index-llms-openai-like>=0.8,<0.9",
    "anthropic": "anthropic>=2,<3 openai>=3,<4",
    "pydantic_ai": "pydantic-ai-slim[openai]>=2,<3",
    "agents": "openai-agents>=0.24,<0.25",
    "haystack": "haystack-ai>=3,<4",
}
OF_NODE = {
    "openai": ["openai@6"],
    "ai": ["ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "openai@6"],
}
FILE = Path(__file__).with_name("client_programs.py")
PROGRAMS = re.findall(r"^def (\w+)\(url: str\) -> None:", FILE.read_text(encoding="utf-8"), re.MULTILINE)
NODE_FILE = FILE.with_suffix(".mjs")
NODE_PROGRAMS = re.findall(r"^  async (\w+)\(url\) \{", NODE_FILE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def python_with() -> Iterator[Callable[[str], str]]:
    """Python of an environment with a package, by the package's name."""
    with ExitStack() as environments:

        @cache
        def python(name: str) -> str:
            folder = environments.enter_context(environment())
            install(folder, *PACKAGES[name].split())
            return f"{folder}/bin/python"

        yield python


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_package_runs_unchanged(program: str, python_with: Callable[[str], str], pocket: Live) -> None:
    package = next(name for name in PACKAGES if program.startswith(name))
    run(python_with(package), FILE, program, pocket.url)


def test_anthropics_package_has_the_thoughts(python_with: Callable[[str], str], thinker: Live) -> None:
    run(python_with("anthropic"), FILE, "anthropic_thoughts", thinker.url, json.dumps(unmarked(thinker)))


@pytest.fixture(scope="module")
def program_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The programs beside packages of npm, by the first one's name."""

    @cache
    def program(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        install_for_node(str(folder), *OF_NODE[name])
        return Path(shutil.copy(NODE_FILE, folder))

    return program


@pytest.mark.parametrize("program", NODE_PROGRAMS)
def test_a_package_of_node_runs_unchanged(program: str, program_with: Callable[[str], Path], pocket: Live) -> None:
    run("node", program_with(program.partition("_")[0]), program, pocket.url)
