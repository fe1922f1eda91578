"""`saccade train`: training of a drafter for a target."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from saccade.cli import arguments as args
from saccade.cli import completion, screen
from saccade.errors import InputError, TrainingError
from saccade.files import check_folder
from saccade.wording import count

if TYPE_CHECKING:
    from saccade.train.recipe import Recipe


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=completion.recipes,
            help="The kind of head (`eagle2`, `hivis`, `dream`, ...), `draft-vlm`, or the path of a .toml file.",
        ),
    ],
    data: Annotated[
        Path,
        typer.Option("--data", metavar="FILE", help="Answers of the target, as `saccade distill` writes them."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Folder of checkpoints, log and the trained head."),
    ],
    target: args.Target = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HEAD",
            help="Start from the weights of a trained head, a folder or hub id, or of a run's checkpoint "
            "(RUN/checkpoints/step-N) instead of fresh ones; options without a --set are that head's.",
        ),
    ] = None,
    lm: Annotated[
        str | None,
        typer.Option(
            "--lm",
            metavar="MODEL",
            help="`draft-vlm` only: the language model to start from, of the target's tokenizer; or "
            "LAYERSxWIDTH for an untrained one.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Override one of the recipe's numbers, for example `batch_size=8`, `stage2.steps=0` or "
            "`head.text_only=true`; may be repeated.",
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            "--features",
            metavar="FOLDER",
            help="Cache the target's states here, for this run and for any other of the same target and answers whose "
            "head reads the same layers (eagle2, hivis, msd, vispec, medusa and hydra do); up to `cache_gb`, and kept "
            "afterwards. By default a cache belongs to its run (`feature_cache`).",
        ),
    ] = None,
    preset: args.Preset = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Time a few steps, estimate the run, and stop. With --preset nothing is run: memory and disk "
            "on its GPU are computed from the target's configuration, so that neither weights nor a GPU nor answers "
            "need be there.",
        ),
    ] = False,
    resume: Annotated[
        str,
        typer.Option(help="`auto` resumes from the newest checkpoint in --out; `never` refuses if there is one."),
    ] = "never",
    on_bad_line: Annotated[
        str,
        typer.Option("--on-bad-line", help="`stop` at the first line that cannot be used, or `skip` them."),
    ] = "stop",
    any_target: Annotated[
        bool, typer.Option("--any-target", help="Take answers that were distilled from another target.")
    ] = False,
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="PROJECT", help="Log to this project of Weights & Biases, too; WANDB_MODE=offline keeps it here."
        ),
    ] = None,
    dtype: args.Dtype = "auto",
    device: args.DeviceMap = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default torch's choice: all physical cores.")
    ] = None,
) -> None:
    """Train a drafter head, or a draft VLM, for a target on the target's own answers.

    OUT/best has the drafter with the longest accepted drafts, OUT/head (of a draft VLM OUT/draft) the last one; give
    either as `--drafter`.
    Stop at any time: the same command with `--resume auto` resumes from the last checkpoint, and on a CPU in float32
    ends with the same weights as an uninterrupted run.

    Examples:

    `saccade distill pocket:chart,receipt --count 500 -t pocket -o answers`

    `saccade train hivis -t pocket --data answers --out head --set stage1.steps=2000 --set stage2.steps=1000`

    `saccade train eagle3 -t Qwen/Qwen2.5-VL-7B-Instruct --data answers --out head --preset 24gb --plan`

    `saccade train hivis -t pocket --data more --from head/best --out further`

    `saccade train eagle2 -t pocket --data answers --features states --out other`

    `saccade train draft-vlm -t llava-hf/llava-1.5-7b-hf --lm JackFram/llama-68m --data answers --out draft`

    `torchrun --nproc-per-node 8 --no-python saccade train eagle2 -t Qwen/Qwen2.5-VL-72B-Instruct --device fsdp --data
    answers -o head`
    """
    if target is None:
        raise InputError(
            "No model is named; give a checkpoint folder or a hub id with --target, or --target pocket for the "
            "built-in one."
        )
    for name, value, choices in (
        ("--resume", resume, ("auto", "never")),
        ("--on-bad-line", on_bad_line, ("stop", "skip")),
    ):
        if value not in choices:
            raise InputError(f"{name} takes {' or '.join(choices)}, not {value!r}.")
    with screen.waiting("Starting"):
        from saccade import memory_plan
        from saccade.pocket import target_path
        from saccade.train.processes import Processes
        from saccade.train.recipe import read_recipe

    chosen = read_recipe(recipe)
    fitted = {} if preset is None else memory_plan.preset(preset).training(chosen.kind)
    shared = {} if features is None else {"feature_cache": "disk"}
    chosen = chosen.with_settings({**fitted, **args.settings(settings), **shared})
    if lm is not None:
        if chosen.kind != "draft-vlm":
            raise InputError(f"--lm is for the recipe draft-vlm; leave it out to train the {chosen.kind} head.")
        chosen = chosen.with_settings({"head.lm": lm})
    if plan and preset is not None:
        from saccade.train.plan import forecast

        screen.quiet_libraries()
        where = target_path() if target == "pocket" else target
        print(forecast(chosen, where, data, memory_plan.preset(preset), fitted, dtype))
        return
    processes = Processes()
    if not processes.leads:
        screen.be_quiet()
    if device is None and "LOCAL_RANK" in os.environ:
        device = str(processes.device)
    models = {"dtype": dtype, "device_map": device, "threads": threads}
    options = {
        "begin": begin,
        "features": features,
        "resume": resume == "auto",
        "wandb": wandb,
        "any_target": any_target,
    }
    try:
        with processes.together():
            _run(chosen, target, data, out, models, options, plan, "skip" if on_bad_line == "skip" else "stop")
    except KeyboardInterrupt:
        screen.note("Stopped; the same command with --resume auto resumes from the last checkpoint.")
        raise


def _run(
    recipe: Recipe,
    target: str,
    data: Path,
    out: Path,
    models: dict[str, Any],
    options: dict[str, Any],
    plan: bool,
    on_bad_line: Literal["stop", "skip"],
) -> None:
    """Train or plan in this process, beside the others of the run."""
    with screen.waiting("Starting"):
        import torch

        from saccade.train.data import Answers, check_answers
        from saccade.train.plan import plan_of
        from saccade.train.trainer import Trainer, check_out

    check_answers(data)
    check_out(out, options["resume"])
    if options["features"] is not None:
        check_folder(options["features"], TrainingError, "give another --features folder")
    kept = recipe.feature_cache, recipe.cache_gb * 1e9
    if plan:
        recipe = replace(recipe, feature_cache="none")
    models["threads"] = models["threads"] or torch.get_num_threads()  # must not change between stop and resume
    vlm = screen.load_models(target, None, "plain", **models)
    source = Answers(
        data, vlm.processor, on_bad_line=on_bad_line, min_words=recipe.min_words, max_tokens=recipe.max_tokens
    )
    trainer = Trainer(vlm.target, recipe, source, out, processor=vlm.processor, say=screen.note, **options)
    if plan:
        words = plan_of(trainer, kept)
        if trainer.processes.leads:
            print(words)
        return
    outcome = trainer.run()
    if not trainer.processes.leads:
        return
    if source.bad:
        number, why = next(iter(source.bad.items()))
        screen.note(f"Skipped {count(len(source.bad), 'bad line')}; the first is line {number}: {why}")
    if outcome.best is not None:
        print(f"{outcome.best}  block efficiency {outcome.efficiency:.3f}")
    print(outcome.head)
