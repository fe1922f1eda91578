"""`saccade export`: a trained head in the layout of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import arguments as args


def export(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Folder or hub id of a head.")],
    to: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="`speculators` (vLLM), `eagle` or `sglang`.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="New folder to write.")],
    target: args.Target = None,
    dtype: args.Dtype = "auto",
) -> None:
    """Write a head in the layout of speculators (vLLM), EAGLE or SGLang, with a model card.

    EAGLE-3 heads can be written in every layout, EAGLE and MSD heads without norms of their inputs in EAGLE's. A
    layout that cannot hold a head is refused. The folder is loaded again before the command ends. --target is the
    model that the head was trained for; its LM head and embedding are copied where the layout needs them.

    Examples:

    `saccade export runs/eagle3/best --to speculators -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-speculator`

    `saccade export runs/eagle3/best --to sglang -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-sglang`

    `saccade export MSD-LLaVA1.5-7B --to eagle -t llava-hf/llava-1.5-7b-hf --dtype float16 -o msd-again`
    """
    import torch

    from saccade.checkpoints import export_head
    from saccade.checkpoints.exporting import check_export
    from saccade.cli import screen
    from saccade.draft.heads.store import kind_at, load_head
    from saccade.errors import InputError
    from saccade.loading import adapt, check_dtype, load_model, path_of
    from saccade.pocket import target_path

    if target is None:
        raise InputError("Give the target that the head was trained for with --target.")
    screen.quiet_libraries()
    check_export(out, to)
    kind_at(path_of(head))  # refuses a head that is not there before the target is loaded
    found = check_dtype(dtype)
    place = str(target_path()) if target == "pocket" else path_of(target)
    owner = adapt(load_model(place))
    loaded = load_head(path_of(head), owner, found if isinstance(found, torch.dtype) else None)
    export_head(loaded, owner, out, to, target_name=place)
    load_head(out, owner)
    print(f"{out}: the {loaded.kind} head in the layout of {to}; it loads here again.")
