"""`python -m tools.pocket`: draw samples; train, measure and inflate the pocket models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import execute, screen
from saccade.errors import InputError, SaccadeError
from saccade.pocket import WORLD, draft_path, draw, lacks, target_path

app = typer.Typer(
    name="tools.pocket",
    help="Workshop of the pocket world: draw samples; train, measure and inflate its models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")]
Tasks = Annotated[
    list[str] | None, typer.Option("--task", "-t", help="A task; repeat for more. All of them by default.")
]
Count = Annotated[int, typer.Option("--count", "-n", min=1, help="Samples of every task.")]
First = Annotated[int, typer.Option("--seed", help="Number of the first sample; equal numbers draw equal samples.")]
Style = Annotated[str, typer.Option("--grammar", help="`dense`, or `verbose` for easy template sentences.")]
Source = Annotated[
    Path | None, typer.Option("--from", metavar="FOLDER", help="Model to begin with; the pocket target by default.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the new weights.")]


def _checked(tasks: list[str] | None, grammar: str) -> list[str]:
    """Return the tasks, all by default."""
    chosen = tasks or list(WORLD)
    for task in chosen:
        if reason := lacks(task, grammar):
            raise SaccadeError(reason)
    return chosen


@app.command("draw")
def draw_samples(
    out: Out,
    tasks: Tasks = None,
    count: Count = 8,
    seed: First = 0,
    grammar: Style = "dense",
    videos: Annotated[bool, typer.Option("--videos", help="Write videos as MP4 files, too (needs PyAV).")] = False,
) -> None:
    """Draw samples of the pocket world into a folder, with a page that shows them.

    Example: `python -m tools.pocket draw --task story --count 4 --out stories`
    """
    from tools.pocket.contact_sheet import write_sheet

    chosen = _checked(tasks, grammar)
    with screen.waiting("Drawing"):
        drawn = {task: [(n, draw(n, task, grammar)) for n in range(seed, seed + count)] for task in chosen}
        try:
            written = write_sheet(out, drawn, grammar, videos)
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {out}: {problem.strerror}; choose another --out.") from problem
    print("\n".join(map(str, written)))


@app.command("tasks")
def write_tasks(
    evaluator: Annotated[str, typer.Argument(metavar="EVALUATOR", help="`lmms-eval` or `vlmevalkit`.")],
    out: Out,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="A task; repeat for more. By default `scene` and `difference`."),
    ] = None,
    count: Count = 8,
    seed: First = 0,
) -> None:
    """Write tasks of the pocket world for an evaluator, to try its plug-in without a download.

    Example: `python -m tools.pocket tasks lmms-eval --task scene --count 8 --out pocket-tasks`
    """
    from tools.pocket.evaluator_tasks import write_lmms_tasks, write_vlmevalkit_tables

    writers = {"lmms-eval": write_lmms_tasks, "vlmevalkit": write_vlmevalkit_tables}
    if evaluator not in writers:
        raise InputError(f"There is no evaluator {evaluator!r} here; choose one of {', '.join(writers)}.")
    with screen.waiting("Drawing"):
        written = writers[evaluator](out, tasks or ["scene", "difference"], count, seed)
    print("\n".join(map(str, written)))


@app.command("eval")
def evaluate_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="`target`, `draft`, or the folder of a trained one.")
    ] = "target",
    tasks: Tasks = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=2, help="Fresh samples of every task.")] = 100,
    grammar: Style = "dense",
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
    """Print a pocket model's accuracy, with that by chance and that with the wrong picture.

    Every fourth sample is also evaluated with the wrong picture.

    Example: `python -m tools.pocket eval target --task chart --samples 1000`
    """
    import saccade
    from tools.pocket.accuracy import measure, table

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


@app.command("inflate")
def inflate_model(
    like: Annotated[
        str,
        typer.Option(metavar="SHAPE", help="llava-1.5-7b, qwen2.5-vl-32b, llava-ov-72b, or WIDTHxLAYERSxHEADS."),
    ],
    out: Out,
    source: Source = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    heads: Annotated[
        list[Path] | None,
        typer.Option(
            "--head", metavar="FOLDER", help="Head of the model, inflated to OUT/heads/NAME; may be repeated."
        ),
    ] = None,
    shard_gb: Annotated[float, typer.Option("--shard-gb", min=0.01, help="Largest size of a file in gigabytes.")] = 4.0,
    seed: Seed = 0,
) -> None:
    """Write a checkpoint of a big model's width and depth that computes exactly a small model's function.

    Every step costs as much as the big model's, while answers, and so acceptance, are the small model's: speed
    measurements without a big model's weights. SHAPE: hidden width x layers x heads.

    Example: `python -m tools.pocket inflate --like llava-1.5-7b --out pocket-7b`
    """
    from tools.pocket.inflate import FORMATS, checked, inflate, inflate_head

    for number, head in enumerate(heads or ()):  # before the target, which can take minutes
        checked(head, like)
        if any(head.name == other.name for other in (heads or ())[:number]):
            raise SaccadeError(
                f"Two heads are named {head.name}; rename a folder, as each is written to OUT/heads/NAME."
            )
    with screen.waiting("Writing"):
        report = inflate(source or target_path(), out, like, dtype=dtype, shard_gb=shard_gb, seed=seed)
        for head in heads or ():
            inflate_head(head, out / "heads" / head.name, like, dtype=FORMATS[dtype], seed=seed)
    print(f"{out}: {report}")


@app.command("experts")
def make_experts(
    out: Out,
    source: Source = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts per layer.")] = 8,
    per_token: Annotated[int, typer.Option("--per-token", min=1, help="Experts that a token is sent to.")] = 2,
    seed: Seed = 0,
) -> None:
    """Write a mixture of experts that computes exactly a dense model's function: every expert is a copy of its MLP.

    Answers, and so acceptance, are the dense model's, while a pass over several tokens reads more experts than one over
    a single token, as in trained mixtures.

    Example: `python -m tools.pocket experts --out pocket-experts`, then `saccade chat -t pocket-experts -d pocket`
    """
    from tools.pocket.experts import upcycle

    with screen.waiting("Writing"):
        report = upcycle(source or target_path(), out, experts, per_token, seed=seed)
    print(f"{out}: {report}")


@app.command("train")
def train_pair(
    out: Out,
    quick: Annotated[
        bool, typer.Option("--quick", help="Toy sizes: every stage in a minute; the models learn nothing.")
    ] = False,
    scale: Annotated[
        float, typer.Option(min=0.001, help="Multiply the steps of every stage; 0.1 makes a rough pair.")
    ] = 1.0,
    batch_scale: Annotated[int, typer.Option("--batch-scale", min=1, help="Multiply all batches; 8 suits a GPU.")] = 1,
    pair: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PAIR",
            help="Train a finished pair further: its folder, or `pocket` for the built-in one.",
        ),
    ] = None,
    single: Annotated[
        bool,
        typer.Option(
            "--single-picture-draft",
            help="Train only a second draft for the target of `--from`, which never sees several pictures or videos.",
        ),
    ] = False,
    steps: Annotated[
        list[str] | None,
        typer.Option("--steps", metavar="STAGE=N", help="Steps of one stage; repeat for more."),
    ] = None,
    until: Annotated[str, typer.Option(help="The last stage to run.")] = "export",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; PyTorch's choice by default.")] = None,
) -> None:
    """Train the pocket target and draft, from scratch or from a pair, on a GPU if available; it takes hours on a CPU.

    A run that was stopped at any moment resumes when started again with the same folder, and ends with the same
    weights.

    Example: `python -m tools.pocket train --out my-pair`, then `saccade chat -t my-pair/target -d my-pair/draft`;
    `python -m tools.pocket train --out lone --from my-pair --single-picture-draft` for a draft in `lone/draft`
    for which several pictures are out of distribution.
    """
    import torch

    from saccade.methods.drafters import is_pocket
    from tools.pocket.recipe import Recipe, quick_recipe
    from tools.pocket.stages import STAGES, run, run_single

    if until not in STAGES:
        raise SaccadeError(f"Unknown stage {until!r}; choose from {', '.join(STAGES)}.")
    if threads:
        torch.set_num_threads(threads)
    earlier = None if pair is None else target_path().parent if is_pocket(pair) else Path(pair)
    recipe = (quick_recipe() if quick else Recipe()).scaled(scale, batch_scale)
    for setting in steps or []:
        stage, _, count = setting.partition("=")
        if not count.isdecimal() or int(count) < 1:
            raise SaccadeError(f"--steps {setting} is not a stage with its steps; write for example follow=800.")
        try:
            recipe = recipe.with_steps(stage, int(count))
        except ValueError as problem:
            raise SaccadeError(str(problem)) from None
    if not single:
        run(recipe, out, until, earlier)
    elif earlier is None:
        raise SaccadeError("--single-picture-draft needs a pair with the target: add --from FOLDER, or --from pocket.")
    else:
        run_single(recipe, out, earlier, until)


if __name__ == "__main__":
    execute(app, "python -m tools.pocket")
