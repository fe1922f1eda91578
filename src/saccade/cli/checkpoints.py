"""`saccade inspect`, what a folder holds, and `saccade export`, a trained head in the layout of another engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from saccade.cli import screen
from saccade.cli.option_groups import option, spread
from saccade.errors import InputError


@spread
def inspect(
    path: str = typer.Argument(
        metavar="PATH", help="Folder or hub id of a head or a model; pocket is the built-in target."
    ),
    target: str | None = option(None, "Compare a head with this target's configuration.", "-t", metavar="PATH"),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Show what a folder holds: the layout of a head, the target it was made for, positions and norms.

    No model is run, and of the target only the configuration is read. With --target the exit code is 1 if the head
    does not fit.

    Examples:

    `saccade inspect runs/eagle3/best`

    `saccade inspect lucylyn/MSD-LLaVA1.5-7B -t llava-hf/llava-1.5-7b-hf`
    """
    from saccade.checkpoints import inspect_checkpoint
    from saccade.pocket import target_path

    pocket = str(target_path())
    content = inspect_checkpoint(pocket if path == "pocket" else path, pocket if target == "pocket" else target)
    if as_json:
        print(json.dumps({**asdict(content), "fits": content.fits}))
    else:
        screen.show(f"{content.path}: {content.holds} of the kind {content.kind}, layout of {content.layout}")
        screen.show(*(f"  {name:<15} {_text(value)}" for name, value in content.facts.items()))
        if content.checks:
            screen.show(f"compared with {target}")
        for check in content.checks:
            verdict = {True: "fits", False: "differs", None: "check"}[check.fits]
            note = f": {check.note}" if check.note else ""
            values = f"head {_text(check.head)}, target {_text(check.target)}"
            screen.show(f"  {check.what:<15} {values}  {verdict}{note}")
        if content.problem:
            screen.show(f"cannot be loaded: {content.problem}")
    if content.fits is False:
        raise typer.Exit(1)


def _text(value: object) -> str:
    """A value for a person."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


@spread
def export(
    head: str = typer.Argument(metavar="HEAD", help="Folder or hub id of a head."),
    to: str = option(..., "`speculators` (vLLM), `eagle` or `sglang`.", metavar="LAYOUT"),
    out: Path = option(..., "New folder to write.", "-o", metavar="FOLDER"),
    target: str | None = option(None, "The model that the head was trained for.", "-t", metavar="PATH"),
    dtype: str = option("auto", "Of the written weights: float32, bfloat16, float16, or auto: as stored."),
) -> None:
    """Write a head in the layout of speculators (vLLM), EAGLE or SGLang, with a model card.

    EAGLE-3 heads can be written in every layout, EAGLE and MSD heads without norms of their inputs in EAGLE's. A
    layout that cannot hold a head is refused. The folder is loaded again before the command ends. The target's LM head
    and embedding are copied where the layout needs them.

    Examples:

    `saccade export runs/eagle3/best --to speculators -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-speculator`

    `saccade export runs/eagle3/best --to sglang -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-sglang`

    `saccade export MSD-LLaVA1.5-7B --to eagle -t llava-hf/llava-1.5-7b-hf --dtype float16 -o msd-again`
    """
    import torch

    from saccade.checkpoints import export_head
    from saccade.checkpoints.exporting import check_export
    from saccade.draft.heads.store import kind_at, load_head
    from saccade.loading import adapt, check_dtype, load_model, path_of
    from saccade.pocket import target_path

    if target is None:
        raise InputError("Give the target that the head was trained for with --target.")
    screen.quiet_libraries()
    check_export(out, to)
    kind_at(path_of(head))  # refuses a head that is not there before the target is loaded
    precision = check_dtype(dtype)
    place = str(target_path()) if target == "pocket" else path_of(target)
    owner = adapt(load_model(place))
    loaded = load_head(path_of(head), owner, precision if isinstance(precision, torch.dtype) else None)
    export_head(loaded, owner, out, to, target_name=place)
    load_head(out, owner)
    print(f"{out}: the {loaded.kind} head in the layout of {to}; it loads here again.")
