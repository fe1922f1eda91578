"""`saccade methods`: the list of methods, and every option of one."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from saccade.cli import completion


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", autocompletion=completion.methods, help="Show every option of this method."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the methods with summary, losslessness, needed drafter and source.

    With a name: every option of --set NAME=VALUE with default, range and meaning. Drafter, tree, rule and pruning
    combine freely; an answer is lossy exactly when its rule is. --drafter takes a draft model or the folder of a
    trained head; `saccade bench` takes more heads with --head.
    """
    from saccade.methods import METHODS, get
    from saccade.methods.settings import about, table

    chosen = METHODS if name is None else {name: get(name)}
    if as_json:
        fields = ("summary", "source", "lossless", "needs")
        listed: dict[str, dict[str, Any]] = {
            key: {**{f: getattr(m, f) for f in fields}, "options": dict(m.options)} for key, m in chosen.items()
        }
        if name is not None:
            listed[name]["about"] = [
                {"name": n, "default": d, "range": o.range, "meaning": o.meaning, "with": brings}
                for brings, rows in table(METHODS[name].settings)
                for n, d, o in rows
            ]
        print(json.dumps(listed if name is None else listed[name]))
        return
    from rich.markup import escape

    from saccade.cli.screen import out

    console = out()
    for key, method in chosen.items():
        kind = "lossless" if method.lossless else "LOSSY"
        console.print(f"[bold]{escape(key)}[/bold]  {kind}, needs {method.needs}", soft_wrap=True)
        lines = [method.summary]
        if method.options and name is None:
            lines.append("options: " + " ".join(f"{k}={v}" for k, v in method.options.items()))
        if method.source:
            lines.append(f"source:  {method.source}")
        for line in lines:
            console.print(f"    {line}", markup=False, soft_wrap=True)
    for brings, rows in table(METHODS[name].settings) if name is not None else []:
        heading = f"    with {brings}: {about(brings)}" if brings else "    options:"
        console.print(heading, markup=False, soft_wrap=True)
        for option, default, limits in rows:
            text = f"        {option}={default}  {limits.meaning}" + (f" ({limits.range})" if limits.range else "")
            console.print(text, markup=False, soft_wrap=True)
