"""`python -m tools.results`: measure every suite on one revision and write docs/results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute, screen
from saccade.cli.option_groups import option
from saccade.errors import InputError

app = typer.Typer(name="tools.results", add_completion=False, rich_markup_mode="markdown")


@app.command()
def results(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PAGE]...", help="Only these pages of docs/results; all by default.")
    ] = None,
    target: str = option("pocket", "Target: a folder, or `pocket`.", "--target", "-t"),
    drafter: str | None = option(None, "Its draft VLM; with `pocket` the built-in one by default.", "--drafter", "-d"),
    models: Path = option(Path("runs/models"), "Trained heads, as of `python -m tools.heads --out`.", metavar="FOLDER"),
    out: Path = option(
        Path("runs/results"), "Records and pages, all of one revision.", "--out", "-o", metavar="FOLDER"
    ),
    docs: Path | None = option(
        None,
        "Where all pages measured so far go; by default docs/results when every suite is measured, of a short run "
        "OUT/docs.",
        metavar="FOLDER",
    ),
    per_task: int | None = option(None, "Prompts per task; the suites' own by default.", min=1),
    short: bool = option(False, "A trial: one prompt of two tasks of every suite, in minutes.", "--short"),
    plan: bool = option(False, "List pages, answers and missing heads, and stop.", "--plan"),
    render: bool = option(
        False,
        "Write the pages again from the records in --out by the present sources; measure nothing.",
        "--render",
    ),
    dtype: str = option("auto", "Of the target."),
    threads: int = option(1, "CPU threads.", min=1),
) -> None:
    """Measure every suite on the checked-out revision, and write one page per suite and their index.

    It takes hours. Stop at any moment, also by force: the same command resumes. A suite whose heads are not trained is
    left out, with the command that trains them. Pages gather in OUT/pages; when nothing failed and no name was given,
    they replace docs/results as a whole, as they replace the folder of --docs before, which lists what it lacks.

    Example: `python -m tools.results --target my-pair/target --drafter my-pair/draft`
    """
    from tools.results.catalogue import measurements
    from tools.results.measure import Session, Setup
    from tools.results.pages import Folder

    screen.quiet_libraries()
    chosen = measurements(names or ())
    if render:
        if short or plan or per_task is not None:
            raise InputError("--render writes the pages of what is measured; leave out --short, --plan and --per-task.")
        if names and docs is not None:
            raise InputError("An index needs all pages computed by one revision; leave out the names, or --docs.")
        folder = Folder(out, screen.note)
        folder.render(chosen)
        if not names:
            folder.publish(docs or Path("docs/results"), measurements(()), {})
        print(f"The pages are in {docs or (out / 'pages' if names else 'docs/results')}.")
        return
    if short and per_task is not None:
        raise InputError("--short has one prompt per task; leave out --per-task.")
    if short:
        chosen = [measurement.short() for measurement in chosen]
    elif per_task is not None:
        chosen = [measurement.with_prompts(per_task) for measurement in chosen]
    session = Session(Setup(target, drafter, models, out, dtype, threads, short), screen.note)
    if plan:
        print(session.plan(chosen))
        return
    try:
        report = session.run(chosen)
    except KeyboardInterrupt:
        screen.note("Stopped; the same command resumes.")
        raise
    print(f"{len(report.measured)} measured, {len(report.left_out)} left out, {len(report.failed)} failed.")
    if names and docs is None:
        print(f"The pages are in {out}/pages; docs/results is written when every suite is measured.")
    elif not report.failed:
        place = docs or (out / "docs" if short else Path("docs/results"))
        session.folder.publish(place, measurements(()), report.left_out)
        print(f"The pages are in {place}.")
    if report.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["premises"]:
        from tools.results.premises import app as premises

        execute(premises, "python -m tools.results premises", sys.argv[2:])
    execute(app, "python -m tools.results")
