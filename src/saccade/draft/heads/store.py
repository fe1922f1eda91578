"""Heads on disk, ours and published ones: config.json and weights in one folder, loaded completely or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from saccade.draft.heads.head import MARK, Head, HeadConfig, TargetShape, build_head, check_fit
from saccade.draft.heads.published.released import FILES, Released, ReleasedLayout
from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.loading import draft_dtype, file_of, is_on_hub, path_of, refuse_code
from saccade.target_model.adapter import Target

WEIGHTS = "model.safetensors"
_DAMAGE = (SafetensorError, UnpicklingError, RuntimeError, EOFError)
"""Exceptions from reading a damaged weight file."""


def save_head(head: Head, folder: str | Path) -> None:
    """Write a head, without the weights that it shares with the target."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(head.config.to_json(), encoding="utf-8")


def load_head(folder: str | Path, target: Target, dtype: torch.dtype | None = None) -> Head:
    """Load a head for a target, onto its device."""
    values, shape = read_values(folder), TargetShape.of(target)
    layout = layout_of(folder, values)
    if layout is None:
        config = read_config(folder)
        check_fit(config, shape)
        weights = read_weights(folder, [WEIGHTS])
    else:
        released = Released(f"The head {folder}", values, read_weights(folder, layout.files), shape)
        config, weights = layout.translate(released)
        check_fit(config, shape)
    head = build_head(config)
    expected = head.state_dict()
    for name in (*expected, *weights):
        _check(folder, name, expected.get(name), weights.get(name))
    head.load_state_dict(weights, assign=True)
    head = head.to(target.device)
    return head.to(dtype or draft_dtype(head, target.dtype)).eval()


def read_config(folder: str | Path) -> HeadConfig:
    """Return the configuration of the head in a folder."""
    if file_of(folder, "config.json") is None:
        if not Path(path_of(folder)).exists() and not is_on_hub(folder):
            raise ModelError(f"There is no folder {folder}; give that of a trained head, or a hub id like OWNER/NAME.")
        raise ModelError(f"The folder {folder} has no config.json, so it holds no drafter head; give one that has.")
    return HeadConfig.from_values(read_values(folder))


def kind_at(folder: str | Path) -> str:
    """Return the kind of the head in a folder."""
    return kind_in(folder) or read_config(folder).kind


def kind_in(folder: Any) -> str | None:
    """Return the kind of the head in a folder or on the hub; None for anything else."""
    if not isinstance(folder, (str, Path)):
        return None
    values = read_values(folder)
    layout = layout_of(folder, values)
    if layout is not None:
        return layout.kind(values).kind
    return head_class(values[MARK]).kind if MARK in values else None


def layout_of(folder: str | Path, values: Mapping[str, Any]) -> ReleasedLayout | None:
    """Return the layout of the released head in a folder; None for ours and for other folders."""
    if MARK in values:
        return None
    from saccade.draft.heads.published.blocks import block_layout
    from saccade.draft.heads.published.eagle3 import SPECULATORS, eagle3_layout
    from saccade.draft.heads.published.stacks import stack_layout

    if not values.keys().isdisjoint({"block_size", "dflash_config"}):
        from saccade.draft.heads.published.denoisers import dflash_layout

        if found := dflash_layout(values):
            return found
    if values.get(SPECULATORS) == "peagle":
        from saccade.draft.heads.published.peagle import PEAGLE

        return PEAGLE
    return eagle3_layout(values) or stack_layout(values) or block_layout(values, lambda: _shapes(folder))


def read_values(folder: str | Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json; empty if it cannot be read."""
    file = file_of(folder, "config.json")
    try:
        values = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a folder, whose files are mapped and not read; empty if unreadable."""
    try:
        return {name: tuple(weight.shape) for name, weight in read_weights(folder, FILES, mmap=True).items()}
    except ModelError:
        return {}


def read_weights(folder: str | Path, names: Sequence[str], mmap: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights of the first file that exists; files of torch are mapped only in their newer format."""
    for file in (file_of(folder, name) for name in names):
        if file is None:
            continue
        try:
            if file.suffix == ".safetensors":
                return load_file(file)
            weights = torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except _DAMAGE as problem:
            refuse_code(problem, folder)
            raise ModelError(f"The weight file of the head {folder} is damaged ({problem}); copy it again.") from None
        if isinstance(weights, dict) and all(isinstance(weight, torch.Tensor) for weight in weights.values()):
            return weights
        raise ModelError(f"The weight file {file} holds more than weights; save the state_dict alone.")
    raise ModelError(f"The head {folder} has no {' or '.join(names)}; train it, or copy the whole folder.")


def _check(folder: str | Path, name: str, expected: torch.Tensor | None, weight: torch.Tensor | None) -> None:
    problem, other = "", "its config.json belongs to another head."
    if weight is None:
        problem = f"The head {folder} lacks the weight {name}; copy it again, or train it again."
    elif expected is None:
        problem = f"The head {folder} has the weight {name}, which its kind does not have; {other}"
    elif expected.shape != weight.shape:
        shapes = f"is {tuple(weight.shape)}, not {tuple(expected.shape)}"
        problem = f"The weight {name} of the head {folder} {shapes}; {other}"
    elif not bool(torch.isfinite(weight).all()):
        what = "holds numbers that are not finite, with which it would draft nothing"
        problem = f"The weight {name} of the head {folder} {what}; copy it again, or train it again."
    if problem:
        raise ModelError(problem)
