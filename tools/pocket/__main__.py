"""`python -m tools.pocket`: draw samples; train, measure and inflate the pocket models."""

from __future__ import annotations

from pathlib import Path

import typer

from saccade.cli import execute, screen
from saccade.cli.option_groups import option
from saccade.errors import InputError, SaccadeError
from saccade.pocket import WORLD, draft_path, draw, lacks, target_path

app = typer.Typer(
    name="tools.pocket",
    help="Workshop of the pocket world: draw samples; train, measure and inflate its models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

OUT = option(..., "Output folder.", "--out", "-o", metavar="FOLDER")
TASKS = option(None, "A task; repeat for more. All of them by default.", "--task", "-t")
COUNT = option(8, "Samples of every task.", "--count", "-n", min=1)
FIRST = option(0, "Number of the first sample; equal numbers draw equal samples.", "--seed")
STYLE = option("dense", "`dense`, or `verbose` for easy template sentences.", "--grammar")
SOURCE = option(None, "Model to begin with; the pocket target by default.", "--from", metavar="FOLDER")
SEED = option(0, "Seed of the new weights.", "--seed")


def _checked(tasks: list[str] | None, grammar: str) -> list[str]:
    """Return the tasks, all by default."""
    chosen = tasks or list(WORLD)
    for task in chosen:
        if reason := lacks(task, grammar):
            raise SaccadeError(reason)
    return chosen


@app.command("draw")
def draw_samples(
    out: Path = OUT,
    tasks: list[str] | None = TASKS,
    count: int = COUNT,
    seed: int = FIRST,
    grammar: str = STYLE,
) -> None:
    """Draw samples of the pocket world into a folder: pictures, videos as MP4 files (needs PyAV), text and facts.

    Example: `python -m tools.pocket draw --task story --count 4 --out stories`
    """
    from tools.pocket.files import write_samples

    chosen = _checked(tasks, grammar)
    with screen.waiting("Drawing"):
        drawn = {task: [(n, draw(n, task, grammar)) for n in range(seed, seed + count)] for task in chosen}
        try:
            written = write_samples(out, drawn, grammar)
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {out}: {problem.strerror}; choose another --out.") from problem
    print(written)


@app.command("tasks")
def write_tasks(
    out: Path = OUT,
    tasks: list[str] = option(["scene", "difference"], "A task; repeat for more.", "--task", "-t"),
    count: int = COUNT,
    seed: int = FIRST,
) -> None:
    """Write tasks of the pocket world for lmms-eval, to try its plug-in without a download.

    Example: `python -m tools.pocket tasks --task scene --count 8 --out pocket-tasks`
    """
    from tools.pocket.evaluator_tasks import write_lmms_tasks

    with screen.waiting("Drawing"):
        written = write_lmms_tasks(out, tasks, count, seed)
    print("\n".join(map(str, written)))


@app.command("eval")
def evaluate_model(
    model: str = typer.Argument("target", metavar="MODEL", help="`target`, `draft`, or the folder of a trained one."),
    tasks: list[str] | None = TASKS,
    samples: int = option(100, "Fresh samples of every task.", "--samples", "-n", min=2),
    grammar: str = STYLE,
    drafter: str | None = option(
        None,
        "A draft model that speeds up the evaluation: a folder, or `pocket`, the default of `target`.",
        *("--draft", "-d"),
        metavar="DRAFT",
    ),
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
    like: str = option(..., "llava-1.5-7b, qwen2.5-vl-32b, llava-ov-72b, or WIDTHxLAYERSxHEADS.", metavar="SHAPE"),
    out: Path = OUT,
    source: Path | None = SOURCE,
    dtype: str = option("bfloat16", "float32, bfloat16 or float16."),
    heads: list[Path] = option(
        [], "Head of the model, inflated to OUT/heads/NAME; may be repeated.", "--head", metavar="FOLDER"
    ),
    seed: int = SEED,
) -> None:
    """Write a checkpoint of a big model's width and depth that computes exactly a small model's function.

    Every step costs as much as the big model's, while answers, and so acceptance, are the small model's: speed
    measurements without a big model's weights. SHAPE: hidden width x layers x heads.

    Example: `python -m tools.pocket inflate --like llava-1.5-7b --out pocket-7b`
    """
    from tools.pocket.inflate import FORMATS, checked, inflate, inflate_head

    for number, head in enumerate(heads):  # before the target, which can take minutes
        checked(head, like)
        if any(head.name == other.name for other in heads[:number]):
            raise SaccadeError(
                f"Two heads are named {head.name}; rename a folder, as each is written to OUT/heads/NAME."
            )
    with screen.waiting("Writing"):
        report = inflate(source or target_path(), out, like, dtype=dtype, seed=seed)
        for head in heads:
            inflate_head(head, out / "heads" / head.name, like, dtype=FORMATS[dtype], seed=seed)
    print(f"{out}: {report}")


@app.command("train")
def train_pair(
    out: Path = OUT,
    quick: bool = option(False, "Toy sizes: every stage in a minute; the models learn nothing.", "--quick"),
    scale: float = option(1.0, "Multiply the steps of every stage; 0.1 makes a rough pair.", min=0.001),
    batch_scale: int = option(1, "Multiply all batches; 8 suits a GPU.", "--batch-scale", min=1),
    pair: str | None = option(
        None,
        "Train a finished pair further: its folder, or `pocket` for the built-in one.",
        "--from",
        metavar="PAIR",
    ),
    steps: list[str] = option([], "Steps of one stage; repeat for more.", "--steps", metavar="STAGE=N"),
    until: str = option("export", "The last stage to run."),
    threads: int | None = option(None, "CPU threads; PyTorch's choice by default.", min=1),
) -> None:
    """Train the pocket target and draft, from scratch or from a pair, on a GPU if available; it takes hours on a CPU.

    A run that was stopped at any moment resumes when started again with the same folder, and ends with the same
    weights.

    Example: `python -m tools.pocket train --out my-pair`, then `saccade chat -t my-pair/target -d my-pair/draft`
    """
    import torch

    from saccade.resolution import is_pocket
    from tools.pocket.recipe import Recipe, quick_recipe
    from tools.pocket.stages import STAGES, run

    if until not in STAGES:
        raise SaccadeError(f"Unknown stage {until!r}; choose from {', '.join(STAGES)}.")
    if threads:
        torch.set_num_threads(threads)
    earlier = None if pair is None else target_path().parent if is_pocket(pair) else Path(pair)
    recipe = (quick_recipe() if quick else Recipe()).scaled(scale, batch_scale)
    for setting in steps:
        stage, _, count = setting.partition("=")
        if not count.isdecimal() or int(count) < 1:
            raise SaccadeError(f"--steps {setting} is not a stage with its steps; write for example follow=800.")
        try:
            recipe = recipe.with_steps(stage, int(count))
        except ValueError as problem:
            raise SaccadeError(str(problem)) from None
    run(recipe, out, until, earlier)


if __name__ == "__main__":
    execute(app, "python -m tools.pocket")
