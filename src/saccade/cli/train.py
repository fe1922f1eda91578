"""`saccade train`: training of a drafter for a target."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from saccade.cli import screen
from saccade.cli.option_groups import TargetOptions, group, named, option, place_of, settings
from saccade.draft.heads.registry import check_recipe
from saccade.errors import InputError, TrainingError
from saccade.files import check_folder
from saccade.model_spec import ModelSpec
from saccade.wording import count

if TYPE_CHECKING:
    from saccade.train.recipe import Recipe


@group()
class TrainerOptions:
    begin: str | None = option(None, "Start from a head, or RUN/checkpoints/step-N.", "--from", metavar="HEAD")
    features: Path | None = option(None, "Cache the target's states here, for all runs.", metavar="FOLDER")
    any_target: bool = option(False, "Take answers that were distilled from another target.")
    resume: str = option("never", "`auto`: from the newest checkpoint in --out; `never` refuses if there is one.")
    wandb: str | None = option(None, "Log to this project of Weights & Biases, too.", metavar="PROJECT")


def train(
    recipe: str = typer.Argument(
        metavar="RECIPE", help="The kind of head (`eagle2`, `hivis`, ...), `draft-vlm`, or the path of a .toml file."
    ),
    data: Path = option(..., "Answers of the target, as `saccade distill` writes them.", metavar="FILE"),
    out: Path = option(..., "Folder of checkpoints, log and the trained head.", "-o", metavar="FOLDER"),
    set_: list[str] | None = option(None, "A number of the recipe: `stage2.steps=0`.", metavar="NAME=VALUE"),
    lm: str | None = option(None, "`draft-vlm`: start from this model, or an untrained LAYERSxWIDTH.", metavar="MODEL"),
    preset: str | None = option(None, "Settings for one GPU of this memory; --plan shows them.", metavar="24gb|80gb"),
    plan: bool = option(False, "Time a few steps and estimate the run; with --preset compute it without weights."),
    throughput: float | None = option(None, "Samples a second, for the hours of --plan --preset.", min=1e-6),
    on_bad_line: str = option("stop", "`stop` at the first line that cannot be used, or `skip` them."),
    *,
    chosen: TrainerOptions,
    models: TargetOptions,
) -> None:
    """Train a drafter head, or a draft VLM, for a target on the target's own answers.

    OUT/best has the drafter with the longest accepted drafts, OUT/head (of a draft VLM OUT/draft) the last one.
    Stop at any time: the same command with `--resume auto` resumes from the last checkpoint, and on a CPU in float32
    ends with the same weights as an uninterrupted run.

    Examples:

    - `saccade train hivis -t pocket --data answers --out head --set stage1.steps=2000 --set stage2.steps=1000`
    - `saccade train eagle3 -t Qwen/Qwen2.5-VL-7B-Instruct --data answers --out head --preset 24gb --plan`
    - `saccade train hivis -t pocket --data more --from head/best --out further`
    - `saccade train draft-vlm -t llava-hf/llava-1.5-7b-hf --lm JackFram/llama-68m --data answers --out draft`
    - `torchrun --nproc-per-node 8 --no-python saccade train eagle2 -t TARGET --device fsdp --data answers -o head`
    """
    named(models)
    if chosen.resume not in ("auto", "never"):
        raise InputError(f"--resume takes auto or never, not {chosen.resume!r}.")
    if on_bad_line not in ("stop", "skip"):
        raise InputError(f"--on-bad-line takes stop or skip, not {on_bad_line!r}.")
    check_recipe(recipe)
    with screen.waiting("Starting"):
        from saccade import memory_plan
        from saccade.train.processes import Processes
        from saccade.train.recipe import read_recipe

    steps = read_recipe(recipe)
    if lm is not None and steps.kind != "draft-vlm":
        raise InputError(f"--lm is for the recipe draft-vlm; leave it out to train the {steps.kind} head.")
    fitted = {} if preset is None else memory_plan.preset(preset).training(steps.kind)
    implied = {"feature_cache": chosen.features and "disk", "head.lm": lm}
    implied = {name: value for name, value in implied.items() if value is not None}
    steps = steps.with_settings({**fitted, **settings(set_), **implied})
    if plan and preset is not None:
        from saccade.train.plan import forecast

        screen.quiet_libraries()
        on = memory_plan.preset(preset)
        print(forecast(steps, place_of(models.target), data, on, fitted, models.dtype, throughput))
        return
    if throughput is not None:
        raise InputError("--throughput is for --plan with --preset; without a preset --plan measures it.")
    processes = Processes()
    if not processes.leads:
        screen.notes.quiet = True
    if models.device is None and "LOCAL_RANK" in os.environ:
        models = replace(models, device=str(processes.device))
    try:
        with processes.together():
            _run(steps, models, data, out, chosen, plan, on_bad_line == "skip")
    except KeyboardInterrupt:
        screen.note("Stopped; the same command with --resume auto resumes from the last checkpoint.")
        raise


def _run(
    recipe: Recipe, models: ModelSpec, data: Path, out: Path, chosen: TrainerOptions, plan: bool, skips: bool
) -> None:
    """Train or plan in this process, together with the others of the run."""
    with screen.waiting("Starting"):
        import torch

        from saccade.train.data import Answers, check_answers
        from saccade.train.plan import plan_of
        from saccade.train.trainer import Trainer, check_out

    check_answers(data)
    options = {**asdict(chosen), "resume": chosen.resume == "auto"}
    check_out(out, options["resume"])
    if chosen.features is not None:
        check_folder(chosen.features, TrainingError, "give another --features folder")
    kept = recipe.feature_cache, recipe.cache_gb * 1e9
    if plan:
        recipe = replace(recipe, feature_cache="none")
    threads = models.threads or torch.get_num_threads()  # must not change between stop and resume
    vlm = screen.load_models(replace(models, method="plain", threads=threads))
    limits = {"min_words": recipe.min_words, "max_tokens": recipe.max_tokens}
    source = Answers(data, vlm.processor, on_bad_line="skip" if skips else "stop", **limits)
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
