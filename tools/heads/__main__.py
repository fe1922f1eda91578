"""`python -m tools.heads`: train every head that the suites name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute, screen
from saccade.cli.option_groups import option
from saccade.errors import InputError
from saccade.model_spec import ModelSpec
from saccade.resolution import is_pocket
from tools import SETTINGS

app = typer.Typer(name="tools.heads", add_completion=False, rich_markup_mode="markdown")


@app.command()
def heads(
    names: Annotated[list[str] | None, typer.Argument(metavar="[HEAD]...", help="Only these; all by default.")] = None,
    out: Path = option(Path("runs/models"), "Folder of answers and heads.", "--out", "-o", metavar="FOLDER"),
    target: str = option("pocket", "Target: a folder, or `pocket`.", "--target", "-t"),
    drafter: str | None = option(
        None, "Its draft VLM, which makes answering faster and changes no answer.", "--drafter", "-d"
    ),
    scale: float = option(
        SETTINGS["heads"]["scale"], "Multiply the recipes' steps; 0.002 tries everything in minutes.", min=0.0001
    ),
    answers: float = option(SETTINGS["heads"]["answers"], "Multiply the recipes' answers.", min=0.0001),
    plan: bool = option(False, "List what is left to do, and stop.", "--plan"),
    commands: bool = option(False, "Print one command per head, and stop.", "--commands"),
    dtype: str = option(SETTINGS["heads"]["dtype"], "Of the target."),
    threads: int = option(SETTINGS["heads"]["threads"], "CPU threads.", min=1),
) -> None:
    """Let the target answer, then train one head after the other, as `tools/heads/recipes.toml` lists them.

    Stop at any moment, also by force: the same command resumes. Heads are in FOLDER/heads/NAME/best;
    `python -m tools.results` finds them there.

    Example: `python -m tools.heads eagle2 no-stage-2 --target my-pair/target --drafter my-pair/draft --plan`
    """
    from tools.heads.catalogue import read

    for name, factor in {"--scale": scale, "--answers": answers}.items():
        if not 0 < factor <= 100:
            raise InputError(f"{name} must be above 0 and at most 100, not {factor}.")
    catalogue = read().chosen(names or ()).scaled(scale, answers)
    if commands:
        for one in catalogue.answers.values():
            prompts = f"{one.source} --count {one.count} --grammar {one.grammar}"
            print(f"saccade distill {prompts} -t {target} --dtype {dtype} -o {out}/{one.place}")
        for head in catalogue.heads.values():
            print(head.command(str(out), target, dtype))
        return
    drafts = drafter is not None or is_pocket(target)
    method = "chain" if drafts else "plain"
    vlm = screen.load_models(ModelSpec(target, drafter, method, dtype=dtype, threads=threads))
    from tools.heads.workshop import Workshop

    workshop = Workshop(vlm, catalogue, out, screen.note)
    if plan:
        print(workshop.plan())
        return
    try:
        workshop.run()
    except KeyboardInterrupt:
        screen.note("Stopped; the same command resumes.")
        raise


if __name__ == "__main__":
    execute(app, "python -m tools.heads")
