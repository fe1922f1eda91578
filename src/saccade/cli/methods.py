"""`saccade methods`: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the methods: what each does, whether it is lossless, what it needs, and its source."""
    from saccade.methods import METHODS

    if as_json:
        fields = ("summary", "source", "lossless", "needs")
        listed = {
            name: {**{f: getattr(m, f) for f in fields}, "options": dict(m.options)}
            for name, m in METHODS.items()
        }
        print(json.dumps(listed))
        return
    from saccade.cli.screen import out

    console = out()
    for name, method in METHODS.items():
        console.print(
            f"[bold]{name}[/bold]  {'lossless' if method.lossless else 'LOSSY'}, needs {method.needs}"
        )
        console.print(f"    {method.summary}")
        if method.options:
            console.print("    options: " + " ".join(f"{k}={v}" for k, v in method.options.items()))
        if method.source:
            console.print(f"    source:  {method.source}")
