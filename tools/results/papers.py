"""The papers' own pairs and settings: `python -m tools.results.papers [NAME]` prints the command of one, or lists all.

A setting is an entry of ``papers.toml``: a suite that mirrors the paper's table, methods, data sets, models and sizes.
"""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli import execute
from saccade.errors import InputError
from saccade.wording import unknown_name
from tools.results.catalogue import SUITES

ALONE = "none"  # drafter of a setting that needs none besides heads or the target itself
SETTINGS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""By PAPER/TARGET: source, suite, methods, tasks, target; where the paper states them drafter, max_new_tokens, note."""

app = typer.Typer(name="tools.results.papers", add_completion=False)


def command(name: str) -> str:
    """Return the command of a setting, without a draft model where the paper's authors trained their own."""
    if name not in SETTINGS:
        raise InputError(f"There is no setting {unknown_name(name, SETTINGS)}.")
    setting = SETTINGS[name]
    drafter, longest = setting.get("drafter", ""), setting.get("max_new_tokens")
    options = {
        "suite": SUITES / f"{setting['suite']}.toml",
        "methods": ",".join(setting["methods"]),
        "tasks": ",".join(setting["tasks"]),
        "target": setting["target"],
        "drafter": None if drafter == ALONE else drafter or "YOUR-DRAFT-VLM",
        "max-new-tokens": longest,
    }
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
    return shlex.join(["saccade", "bench", *words])


@app.command()
def papers(name: Annotated[str | None, typer.Argument(metavar="[PAPER/TARGET]")] = None) -> None:
    """Print the command of a paper's setting, or list all settings with the paper's section."""
    if name is not None:
        print(command(name))
        if SETTINGS[name].get("note"):
            typer.echo(SETTINGS[name]["note"], err=True)
        return
    for known, setting in SETTINGS.items():
        print(f"{known}  {setting['source']}: {setting['target']}")


if __name__ == "__main__":
    execute(app, "python -m tools.results.papers")
