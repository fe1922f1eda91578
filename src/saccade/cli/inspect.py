"""`saccade inspect`: what a folder holds, for which target, and whether it fits a given one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from saccade.checkpoints.inspecting import Check


def inspect(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="Folder or hub id of a head or a model; pocket is the built-in target."),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", metavar="PATH", help="Compare a head with this target's configuration."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a folder holds: the layout of a head, the target it was made for, positions and norms.

    No model is run, and of the target only the configuration is read. With --target the exit code is 1 if the head
    does not fit.

    Examples:

    `saccade inspect runs/eagle3/best`

    `saccade inspect lucylyn/MSD-LLaVA1.5-7B -t llava-hf/llava-1.5-7b-hf`
    """
    from saccade.checkpoints import inspect_checkpoint
    from saccade.cli.screen import out
    from saccade.pocket import target_path

    pocket = str(target_path())
    found = inspect_checkpoint(pocket if path == "pocket" else path, pocket if target == "pocket" else target)
    if as_json:
        print(json.dumps({**asdict(found), "fits": found.fits}))
    else:
        console = out()
        heading = f"{found.path}: {found.holds} of the kind {found.kind}, layout of {found.layout}"
        console.print(heading, markup=False, soft_wrap=True)
        for name, value in found.facts.items():
            console.print(f"  {name:<15} {_text(value)}", markup=False, soft_wrap=True)
        if found.checks:
            console.print(f"compared with {target}", markup=False, soft_wrap=True)
        for check in found.checks:
            console.print(_line(check), markup=False, soft_wrap=True)
        if found.problem:
            console.print(f"cannot be loaded: {found.problem}", markup=False, soft_wrap=True)
    if found.fits is False:
        raise typer.Exit(1)


def _line(check: Check) -> str:
    """One comparison for a person."""
    verdict = {True: "fits", False: "differs", None: "check"}[check.fits]
    note = f": {check.note}" if check.note else ""
    return f"  {check.what:<15} head {_text(check.head)}, target {_text(check.target)}  {verdict}{note}"


def _text(value: object) -> str:
    """A value for a person."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
