"""`python -m tools.plant`: plant known bugs, one at a time, and see whether fast tests notice them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute
from saccade.cli.option_groups import option
from saccade.errors import InputError

ROOT = Path(__file__).parents[1]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_FAST = ("-m", "not slow and not browser and not ray", "-p", "no:xdist", "-p", "no:cacheprovider")

app = typer.Typer(name="tools.plant", add_completion=False, rich_markup_mode="markdown")


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bug: a text that occurs once in a file, what replaces it, and the test files (or tests) that may notice."""

    name: str
    room: str
    file: str
    find: str
    replace: str
    tests: Sequence[str]
    survived: str = ""  # why the tests of the time missed it; empty where they did not


def listed() -> list[Plant]:
    """Return the plants of `tools/plants.toml`."""
    return [Plant(**values) for values in tomllib.loads((ROOT / "tools/plants.toml").read_text("utf-8"))["plant"]]


def stale(plant: Plant, root: Path = ROOT) -> str:
    """Say why a plant fits its file no more; empty where it does."""
    path = root / plant.file
    count = path.read_text("utf-8").count(plant.find) if path.is_file() else 0
    return "" if count == 1 else f"its text occurs {count} times in {plant.file}"


def copy_tree(root: Path, folder: Path) -> None:
    """Copy what git tracks or would track, as it is now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():  # a deleted file is listed, too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def tested(folder: Path, tests: Sequence[str], limit: float) -> tuple[int, str]:
    """Exit code and output of the fast ones among some tests of a copy; -1 where they do not end."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", *_FAST, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return -1, f"no end within {limit:g} seconds"
    return run.returncode, run.stdout + run.stderr


def outcome(plant: Plant, folder: Path, limit: float) -> tuple[str, str]:
    """What became of a plant in a copy: ``noticed`` (by which test), ``survived``, ``stale`` or ``unclear``."""
    if reason := stale(plant, folder):
        return "stale", reason
    path = folder / plant.file
    text = path.read_text("utf-8")
    path.write_text(text.replace(plant.find, plant.replace), "utf-8")
    try:
        code, printed = tested(folder, plant.tests, limit)
    finally:
        path.write_text(text, "utf-8")
    failed = _FAILED.search(printed)
    if code == 0:
        return "survived", ", ".join(plant.tests)
    noticing = plant.tests if code < -1 else [failed[1]] if code == 1 and failed else []  # less than -1: a signal
    if not noticing:
        return "unclear", printed.strip().rpartition("\n")[2]
    if tested(folder, noticing, limit)[0]:
        return "unclear", f"{', '.join(noticing)} fails without the bug, too"
    return "noticed", ", ".join(noticing)


def outcomes(plants: Sequence[Plant], root: Path = ROOT, limit: float = 180) -> Iterator[tuple[Plant, str, str]]:
    """Plant one bug after the other in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(root, Path(folder))
        for plant in plants:
            yield plant, *outcome(plant, Path(folder), limit)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Option("--name", help="Only these plants.")] = None,
    room: str | None = option(None, "Only the plants of a room."),
    limit: float = option(180, "Seconds for a plant's tests.", min=1),
) -> None:
    """Plant the bugs of `tools/plants.toml` in a copy of the tree; exit code 1 unless a test notices every one."""
    chosen = [each for each in listed() if room in (None, each.room) and (not names or each.name in names)]
    if not chosen:
        raise InputError("No plant has that name and room; tools/plants.toml lists them.")
    counts: Counter[str] = Counter()
    for each, what, reason in outcomes(chosen, limit=limit):
        counts[what] += 1
        print(f"{what:8}  {each.room:12}  {each.name}: {reason}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    raise typer.Exit(int(counts["noticed"] < len(chosen)))


if __name__ == "__main__":
    execute(app, "python -m tools.plant")
