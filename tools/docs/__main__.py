"""`python -m tools.docs`: write the generated parts of the documentation anew; `--check` only says which are old."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute
from saccade.errors import SaccadeError
from saccade.files import write_file
from tools.docs import commands, methods, notebook, plans

DOCS = Path(__file__).parents[2] / "docs"
app = typer.Typer(name="tools.docs", add_completion=False)


def generated(docs: Path = DOCS) -> Iterator[tuple[Path, str]]:
    """Yield every generated file, or file with generated blocks, and what it should hold."""
    yield docs / "reference" / "command-line.md", commands.page()
    for page in sorted((docs / "methods").glob("*.md")):
        yield page, methods.filled(page.read_text(encoding="utf-8"), docs / "results")
    for page in sorted((docs / "recipes").glob("*.md")):
        yield page, plans.filled(page.read_text(encoding="utf-8"))
    walk = docs / "walk-through.md"
    yield walk.with_suffix(".ipynb"), notebook.notebook(walk.read_text(encoding="utf-8"))


@app.command()
def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file is old.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Run the walk-through first, and show what it prints now.")
    ] = False,
) -> None:
    """Write the command-line reference, the options and figures of methods, the plans of recipes, and the notebook."""
    if run:
        walk = DOCS / "walk-through.md"
        write_file(walk, notebook.executed(walk.read_text(encoding="utf-8")))
    old = [(path, text) for path, text in generated() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in old:
        print(path.relative_to(DOCS.parent))
        if not check:
            write_file(path, text)
    if old and check:
        raise SaccadeError("These files are older than what they are made of; run `python -m tools.docs`.")


if __name__ == "__main__":
    execute(app, "python -m tools.docs")
