"""`saccade pocket`: the built-in world and its models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import screen
from saccade.errors import SaccadeError

app = typer.Typer(
    name="pocket",
    help="The built-in world of generated pictures and videos, and its models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.command("draw")
def draw_samples(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where to write.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="A task; repeat for more. All of them by default."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples of every task.")] = 8,
    seed: Annotated[
        int, typer.Option(help="Number of the first sample; the same number, the same sample.")
    ] = 0,
    grammar: Annotated[
        str, typer.Option(help="`dense`, or `verbose` for easy template sentences.")
    ] = "dense",
    videos: Annotated[
        bool, typer.Option("--videos", help="Write videos as MP4 files, too (needs PyAV).")
    ] = False,
) -> None:
    """Draw samples of the pocket world into a folder, with a page to look at them.

    Example: `saccade pocket draw --task story --count 4 --out stories`
    """
    from saccade.pocket import WORLD, draw
    from saccade.pocket.contact_sheet import write_sheet

    chosen = tasks or list(WORLD)
    for task in chosen:
        if task not in WORLD:
            raise SaccadeError(f"There is no pocket task {task!r}; choose from {', '.join(WORLD)}.")
        if grammar not in WORLD[task].grammars:
            known = " or ".join(WORLD[task].grammars)
            raise SaccadeError(f"There is no grammar {grammar!r}; choose {known}.")
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


@app.command("inflate")
def inflate_model(
    like: Annotated[
        str,
        typer.Option(
            metavar="SHAPE", help="llava-1.5-7b, qwen2.5-vl-32b, llava-ov-72b, or WIDTHxLAYERSxHEADS."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where to write the checkpoint.")
    ],
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="The model; the pocket target by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    shard_gb: Annotated[float, typer.Option("--shard-gb", min=0.01, help="Most gigabytes per file.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the numbers that fill the new weights.")] = 0,
) -> None:
    """Write a checkpoint of a big model's width and depth that computes exactly a small model's function.

    Every step costs what the big model's costs, while answers, and so what a drafter gets accepted, stay the small
    model's: honest speed measurements without a big model's weights. SHAPE: hidden width x layers x heads.

    Example: `saccade pocket inflate --like llava-1.5-7b --out pocket-7b`
    """
    from saccade.pocket import target_path
    from saccade.pocket.inflate import inflate

    with screen.waiting("Writing"):
        report = inflate(source or target_path(), out, like, dtype=dtype, shard_gb=shard_gb, seed=seed)
    print(f"{out}: {report}")


# `train` and `eval` belong here: the same two functions that `saccade.pocket.train` and `.evaluate` run.
