"""The wheel: what is in it, and that it works without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from saccade import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "saccade"


def shipped() -> set[str]:
    """Files of the package that belong in the wheel, by their places in it."""
    paths = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"saccade/{path.relative_to(SOURCE).as_posix()}" for path in paths}


def test_the_build_takes_every_file_of_the_package_and_nothing_else() -> None:
    """As the build backend lists them, without building."""
    code = """
import setuptools
distribution = setuptools.Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
print("\\n".join(command.get_outputs(include_bytecode=False)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    taken = {Path(name).relative_to("build/lib").as_posix() for name in done.stdout.split("\n") if name}
    assert taken == shipped(), "left out, or too much: see package-data in pyproject.toml"
    assert "saccade/pocket/weights/target/model.safetensors" in taken
    assert "saccade/serve/static/index.html" in taken


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy by the build backend itself: no network, nothing left in the tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "tests", "tools"):
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=leave_out, copy_function=os.symlink)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    assert path.name == f"saccade-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == shipped()
    info = f"saccade-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "saccade = saccade.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout

    assert run("-c", "import saccade; print(saccade.__file__)").startswith(str(tmp_path))
    assert re.search(r"All \d+ tokens are equal to plain decoding's", run("-m", "saccade", "demo"))


def test_the_changelog_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", ""), "changes are written down as they are made"
    released = [version for version, date in headings[1:] if date]
    assert len(released) == len(headings) - 1, "every version has its date"
    assert __version__ in released or f"{__version__}, has not been released" in text
