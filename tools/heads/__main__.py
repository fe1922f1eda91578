"""`python -m tools.heads`: train every head that the suites name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute, screen
from saccade.errors import InputError
from saccade.methods.drafters import is_pocket

app = typer.Typer(name="tools.heads", add_completion=False, rich_markup_mode="markdown")


@app.command()
def heads(
    names: Annotated[list[str] | None, typer.Argument(metavar="[HEAD]...", help="Only these; all by default.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder of answers and heads.")] = Path(
        "runs/models"
    ),
    target: Annotated[str, typer.Option("--target", "-t", help="Target: a folder, or `pocket`.")] = "pocket",
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", "-d", help="Its draft VLM, which makes answering faster and changes no answer."),
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.0001, help="Multiply all steps and answers; 0.002 tries everything in minutes.")
    ] = 1.0,
    answers: Annotated[
        float | None,
        typer.Option(
            min=0.0001, help="Multiply answers by this instead: few steps learn more from answers that do not repeat."
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="List what is left to do, and stop.")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Print one command per head, and stop.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the target.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Let the target answer, then train one head after the other, as `tools/heads/recipes.toml` lists them.

    Stop at any moment, also by force: the same
    command resumes. Heads are in FOLDER/heads/NAME/best; `python -m tools.results` finds them there.

    Example: `python -m tools.heads eagle2 no-stage-2 --target my-pair/target --drafter my-pair/draft --plan`
    """
    from tools.heads.catalogue import read

    answers = scale if answers is None else answers
    for option, factor in {"--scale": scale, "--answers": answers}.items():
        if not 0 < factor <= 100:
            raise InputError(f"{option} must be above 0 and at most 100, not {factor}.")
    catalogue = read().chosen(names or ()).scaled(scale, answers)
    if commands:
        for one in catalogue.answers.values():
            prompts = f"{one.source} --count {one.count}"
            print(f"saccade distill {prompts} -t {target} --dtype {dtype} -o {out}/answers/{one.name}")
        for head in catalogue.heads.values():
            print(head.command(str(out), target, dtype))
        return
    drafts = drafter is not None or is_pocket(target)
    vlm = screen.load_models(target, drafter, "chain" if drafts else "plain", dtype=dtype, threads=threads)
    from tools.heads.run import Workshop

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
