"""`saccade methods`: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the methods: what each does, whether it is lossless, what it needs, and its source.

    A draft model or the folder of a trained head is given with --drafter; `saccade bench` takes more heads with --head.
    """
    from saccade.methods import METHODS

    if as_json:
        fields = ("summary", "source", "lossless", "needs")
        listed = {
            name: {**{f: getattr(m, f) for f in fields}, "options": dict(m.options)}
            for name, m in METHODS.items()
        }
        print(json.dumps(listed))
        return
    from rich.markup import escape

    from saccade.cli.screen import out

    console = out()
    for name, method in METHODS.items():
        kind = "lossless" if method.lossless else "LOSSY"
        console.print(f"[bold]{escape(name)}[/bold]  {kind}, needs {method.needs}", soft_wrap=True)
        lines = [method.summary]
        if method.options:
            lines.append("options: " + " ".join(f"{k}={v}" for k, v in method.options.items()))
        if method.source:
            lines.append(f"source:  {method.source}")
        for line in lines:
            console.print(f"    {line}", markup=False, soft_wrap=True)
