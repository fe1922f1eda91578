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


@app.command("train")
def train_pair(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="For stage files and the finished pair."),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Toy sizes: every stage in a minute; the models learn nothing.")
    ] = False,
    scale: Annotated[
        float, typer.Option(min=0.001, help="Multiply the steps of every stage; 0.1 gives a rough pair.")
    ] = 1.0,
    batch_scale: Annotated[
        int, typer.Option("--batch-scale", min=1, help="Multiply all batches; 8 suits a GPU.")
    ] = 1,
    pair: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PAIR",
            help="Train a finished pair on: its folder, or `pocket` for the built-in one.",
        ),
    ] = None,
    single: Annotated[
        bool,
        typer.Option(
            "--single-picture-draft",
            help="Train only a second draft for the target of `--from`: one that never sees a video or several "
            "pictures.",
        ),
    ] = False,
    steps: Annotated[
        list[str] | None,
        typer.Option("--steps", metavar="STAGE=N", help="Steps of one stage; repeat for more."),
    ] = None,
    until: Annotated[str, typer.Option(help="The last stage to run.")] = "export",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; PyTorch's choice by default.")
    ] = None,
) -> None:
    """Train the pocket target and draft, from nothing or from a pair, on a GPU if there is one; hours on a CPU.

    A run that was stopped, in whatever way, goes on where it was when started again with the same folder, and
    ends with the same weights.

    Example: `saccade pocket train --out my-pair`, then `saccade chat -t my-pair/target -d my-pair/draft`;
    `saccade pocket train --out lone --from my-pair --single-picture-draft` for a draft in `lone/draft` that prompts of
    several pictures are new to.
    """
    import torch

    from saccade import builtin
    from saccade.pocket import target_path
    from saccade.pocket.train.recipe import Recipe, quick_recipe
    from saccade.pocket.train.run import STAGES, run, run_single

    if until not in STAGES:
        raise SaccadeError(f"There is no stage {until!r}; choose from {', '.join(STAGES)}.")
    if threads:
        torch.set_num_threads(threads)
    earlier = None if pair is None else target_path().parent if builtin.is_meant(pair) else Path(pair)
    recipe = (quick_recipe() if quick else Recipe()).scaled(scale, batch_scale)
    for wish in steps or []:
        stage, _, count = wish.partition("=")
        if not count.isdecimal() or int(count) < 1:
            raise SaccadeError(f"--steps {wish} names no stage with its steps; write for example follow=800.")
        try:
            recipe = recipe.with_steps(stage, int(count))
        except ValueError as problem:
            raise SaccadeError(str(problem)) from None
    if not single:
        run(recipe, out, until, earlier)
    elif earlier is None:
        raise SaccadeError(
            "--single-picture-draft needs the pair whose target it is for: give --from, with a folder or `pocket`."
        )
    else:
        run_single(recipe, out, earlier, until)


@app.command("eval")
def evaluate_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="`target`, `draft`, or the folder of a trained one.")
    ] = "target",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="A task; repeat for more. All of them by default."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=2, help="Fresh samples of every task.")
    ] = 100,
    grammar: Annotated[
        str, typer.Option(help="`dense`, or `verbose` for easy template sentences.")
    ] = "dense",
    drafter: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            metavar="DRAFT",
            help="A draft model for the same answers sooner: a folder, or `pocket`, which `target` has anyway.",
        ),
    ] = None,
) -> None:
    """Print how well a pocket model reads: its accuracy beside chance, and when shown the wrong picture.

    The wrong picture is shown with every fourth sample.

    Example: `saccade pocket eval target --task chart --samples 1000`
    """
    import torch

    import saccade
    from saccade.pocket import WORLD, draft_path, draw, target_path
    from saccade.pocket.evaluate import measure, table

    chosen = tasks or list(WORLD)
    for task in chosen:
        if task not in WORLD:
            raise SaccadeError(f"There is no pocket task {task!r}; choose from {', '.join(WORLD)}.")
        if grammar not in WORLD[task].grammars:
            known = " or ".join(WORLD[task].grammars)
            raise SaccadeError(f"There is no grammar {grammar!r}; choose {known}.")
    folder = {"target": target_path(), "draft": draft_path()}.get(model, Path(model))
    guesser = drafter or (draft_path() if model == "target" else None)
    place = "cuda" if torch.cuda.is_available() else None
    vlm = saccade.load(folder, guesser, method="chain" if guesser else "plain", device_map=place)
    for task in list(chosen):
        try:
            asked = vlm.processor.prompt(draw(0, task, grammar).messages())
            vlm.target.family.limits.check(len(asked.ids) + WORLD[task].longest)
        except InputError as problem:
            if tasks:
                raise
            chosen.remove(task)
            screen.note(f"Task {task} is left out. {problem}")
    with screen.progress("Answering") as tell:
        rows = measure(vlm, chosen, samples, grammar, tell)
    print(table(rows))
