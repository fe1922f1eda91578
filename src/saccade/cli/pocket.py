"""`saccade pocket`: the built-in world and its models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import screen
from saccade.errors import InputError, SaccadeError

app = typer.Typer(
    name="pocket",
    help="The built-in world of generated pictures and videos, and its models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.command("draw")
def draw_samples(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="A task; repeat for more. All of them by default."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples of every task.")] = 8,
    seed: Annotated[int, typer.Option(help="Number of the first sample; equal numbers draw equal samples.")] = 0,
    grammar: Annotated[str, typer.Option(help="`dense`, or `verbose` for easy template sentences.")] = "dense",
    videos: Annotated[bool, typer.Option("--videos", help="Write videos as MP4 files, too (needs PyAV).")] = False,
) -> None:
    """Draw samples of the pocket world into a folder, with a page that shows them.

    Example: `saccade pocket draw --task story --count 4 --out stories`
    """
    from saccade.pocket import draw
    from saccade.pocket.contact_sheet import write_sheet

    chosen = _checked(tasks, grammar)
    with screen.waiting("Drawing"):
        drawn = {task: [(n, draw(n, task, grammar)) for n in range(seed, seed + count)] for task in chosen}
        try:
            written = write_sheet(out, drawn, grammar, videos)
        except OSError as problem:
            raise SaccadeError(
                f"Cannot write to {out}: {problem.strerror}; choose another folder with --out."
            ) from problem
    for path in written:
        print(path)


@app.command("tasks")
def write_tasks(
    evaluator: Annotated[str, typer.Argument(metavar="EVALUATOR", help="`lmms-eval` or `vlmevalkit`.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="A task; repeat for more. By default `scene` and `difference`."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples of every task.")] = 8,
    seed: Annotated[int, typer.Option(help="Number of the first sample; equal numbers draw equal samples.")] = 0,
) -> None:
    """Write tasks of the pocket world for an evaluator, to try its plug-in without a download.

    Example: `saccade pocket tasks lmms-eval --task scene --count 8 --out pocket-tasks`
    """
    from saccade.evaluators.pocket_tasks import write_lmms_tasks, write_vlmevalkit_tables

    writers = {"lmms-eval": write_lmms_tasks, "vlmevalkit": write_vlmevalkit_tables}
    if evaluator not in writers:
        raise InputError(f"There is no evaluator {evaluator!r} here; choose one of {', '.join(writers)}.")
    with screen.waiting("Drawing"):
        written = writers[evaluator](out, tasks or ["scene", "difference"], count, seed)
    for path in written:
        print(path)


@app.command("train", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train_pair() -> None:
    """Moved to the repository's tools."""
    raise _moved("train")


@app.command("inflate", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def inflate_model() -> None:
    """Moved to the repository's tools."""
    raise _moved("inflate")


def _checked(tasks: list[str] | None, grammar: str) -> list[str]:
    """Return the tasks, all by default."""
    from saccade.pocket import WORLD, lacks

    chosen = tasks or list(WORLD)
    for task in chosen:
        if reason := lacks(task, grammar):
            raise SaccadeError(reason)
    return chosen


def _moved(command: str) -> SaccadeError:
    return SaccadeError(
        f"`saccade pocket {command}` has moved out of the package; in a checkout of the repository, run "
        f"`python -m tools.pocket {command}` with the same options."
    )


@app.command("eval")
def evaluate_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="`target`, `draft`, or the folder of a trained one.")
    ] = "target",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="A task; repeat for more. All of them by default."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=2, help="Fresh samples of every task.")] = 100,
    grammar: Annotated[str, typer.Option(help="`dense`, or `verbose` for easy template sentences.")] = "dense",
    drafter: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            metavar="DRAFT",
            help="A draft model that speeds up the evaluation: a folder, or `pocket`, the default of `target`.",
        ),
    ] = None,
) -> None:
    """Print a pocket model's accuracy, beside chance and beside its accuracy with the wrong picture.

    Every fourth sample is also evaluated with the wrong picture.

    Example: `saccade pocket eval target --task chart --samples 1000`
    """
    import saccade
    from saccade.bench.pocket_accuracy import measure, table
    from saccade.pocket import WORLD, draft_path, draw, target_path

    chosen = _checked(tasks, grammar)
    folder = {"target": target_path(), "draft": draft_path()}.get(model, Path(model))
    draft = drafter or (draft_path() if model == "target" else None)
    vlm = saccade.load(folder, draft, method="chain" if draft else "plain")
    for task in list(chosen):
        try:
            prompt = vlm.processor.prompt(draw(0, task, grammar).messages())
            vlm.target.traits.limits.check(len(prompt.ids) + WORLD[task].longest)
        except InputError as problem:
            if tasks:
                raise
            chosen.remove(task)
            screen.note(f"Task {task} is left out: {problem}")
    with screen.progress("Answering") as tell:
        rows = measure(vlm, chosen, samples, grammar, tell)
    print(table(rows))
