"""`python -m tools.results`: measure every suite on one revision and write docs/results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute, screen
from saccade.cli.option_groups import option
from saccade.errors import InputError
from tools import SETTINGS

PAGES = Path("docs/results")
app = typer.Typer(name="tools.results", add_completion=False, rich_markup_mode="markdown")


@app.command()
def results(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PAGE]...", help="Only these pages of docs/results; all by default.")
    ] = None,
    target: str = option("pocket", "Target: a folder, or `pocket`.", "--target", "-t"),
    drafter: str | None = option(
        None, "Its draft VLM, but of suites that train one; with `pocket` the built-in one.", "--drafter", "-d"
    ),
    models: Path = option(Path("runs/models"), "Trained heads, as of `python -m tools.heads --out`.", metavar="FOLDER"),
    out: Path | None = option(
        None, "Records, all of one revision; runs/results by default.", "--out", "-o", metavar="FOLDER"
    ),
    docs: Path | None = option(
        None,
        "Where the pages of all that is measured go; by default docs/results when every suite is measured, else "
        "OUT/pages.",
        metavar="FOLDER",
    ),
    per_task: int | None = option(None, "Prompts per task; the suites' own by default.", min=1),
    short: bool = option(False, "A trial: one prompt of two tasks of every suite, in minutes.", "--short"),
    plan: bool = option(False, "List pages, answers and missing heads, and stop.", "--plan"),
    render: bool = option(
        False,
        "Write the pages again from the records kept beside them, or in --out, and stop; needs no heads.",
        "--render",
    ),
    dtype: str = option(SETTINGS["results"]["dtype"], "Of target, draft VLM and heads."),
    threads: int = option(SETTINGS["results"]["threads"], "CPU threads.", min=1),
) -> None:
    """Measure every suite on the checked-out revision, and write one page per suite and their index.

    It takes hours. Stop at any moment, also by force: the same command resumes. A suite whose heads are not trained is
    left out, with the command that trains them. When nothing failed and no name was given, the pages replace
    docs/results as a whole, as they replace the folder of --docs before, which lists what it lacks.

    Example: `python -m tools.results --target my-pair/target --drafter my-pair/draft`
    """
    from tools.results.catalogue import measurements
    from tools.results.kept import FOLDER
    from tools.results.measure import Session, Setup
    from tools.results.pages import publish

    screen.quiet_libraries()
    chosen = measurements(names or ())
    if render:
        if names or short or plan or per_task is not None:
            raise InputError("--render writes all pages of the records that are kept; give it --out or --docs alone.")
        place = docs or PAGES
        publish((out or place) / FOLDER, place, chosen, screen.note)
        print(f"The pages are in {place}.")
        return
    out = out or Path("runs/results")
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
    if report.measured:
        is_part = names or short or report.failed
        place = out / "pages" if report.failed else docs or (out / "pages" if is_part else PAGES)
        publish(session.records, place, measurements(()), screen.note)
        print(f"The pages are in {place}.")
    if report.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    execute(app, "python -m tools.results")
