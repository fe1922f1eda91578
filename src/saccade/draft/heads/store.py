"""Heads on disk, ours and published ones: config.json and weights in one folder, loaded completely or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from saccade.draft.heads.head import MARK, Head, HeadConfig, TargetShape, check_fit, empty_head
from saccade.draft.heads.published.released import (
    FILES,
    SPECULATORS,
    Released,
    ReleasedLayout,
    Shapes,
    Values,
    Weights,
    check_form,
)
from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.loading import fastest_dtype, file_of, is_on_hub, path_of, refuse_code
from saccade.target_model.adapter import Target

WEIGHTS = "model.safetensors"
_DAMAGE = (SafetensorError, UnpicklingError, RuntimeError, EOFError)  # exceptions from reading a damaged weight file


def save_head(head: Head, folder: str | Path) -> None:
    """Write a head, without the weights that it shares with the target."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(head.config.to_json(), encoding="utf-8")


def load_head(folder: str | Path, target: Target, dtype: torch.dtype | None = None) -> Head:
    """Load a head for a target, onto its device."""
    head, weights = read_head(folder, TargetShape.of(target))
    head.load_state_dict(weights, assign=True)
    head = head.to(target.device)
    return head.to(dtype or fastest_dtype(head, target.dtype)).eval()


def read_head(
    folder: str | Path, target: TargetShape | Callable[[Values, Weights], TargetShape]
) -> tuple[Head, dict[str, torch.Tensor]]:
    """Return a head for a target, on torch's meta device, and all of its weights, or raise `ModelError`.

    A function gives the target by a released head's files; a head of ours names its own.
    """
    values = read_values(folder)
    layout = layout_of(folder, values)
    with _refusing(folder):
        if layout is None:
            config = read_config(folder)
            own = TargetShape(config.target_class, config.hidden_size, config.vocab_size, config.target_layers)
            shape = own if callable(target) else target
            weights = read_weights(folder, [WEIGHTS])
        else:
            check_form(f"The head {folder}", values)
            theirs = read_weights(folder, layout.files)
            shape = target(values, theirs) if callable(target) else target
            config, weights = layout.translate(Released(f"The head {folder}", values, theirs, shape))
        check_fit(config, shape)
        head = empty_head(config)
        expected = head.state_dict()
        for name in (*expected, *weights):
            _check(folder, name, expected.get(name), weights.get(name))
        ids = weights.get("token_ids")
        if ids is not None and not (ids.min() >= 0 and ids.max() < config.vocab_size and len(ids.unique()) == len(ids)):
            raise ModelError(f"The token_ids of the head {folder} are not {len(ids)} of its tokens; copy it again.")
    return head, weights


@contextmanager
def _refusing(folder: str | Path) -> Iterator[None]:
    """Name the folder in every refusal, and refuse files that a layout cannot take apart."""
    title = f"The head {folder}"
    try:
        yield
    except ModelError as problem:
        if str(folder) in str(problem):
            raise
        raise ModelError(f"{title} cannot be loaded: {problem}") from problem
    except Exception as problem:  # of many kinds: transformers reads settings of speculators, too
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ModelError(f"{title} has settings or weights unlike its layout's ({reason}); copy it again.") from problem


def read_config(folder: str | Path) -> HeadConfig:
    """Return the configuration of the head in a folder of ours."""
    file = file_of(folder, "config.json")
    if file is None:
        if not Path(path_of(folder)).exists() and not is_on_hub(folder):
            raise ModelError(f"There is no folder {folder}; give that of a trained head, or a hub id like OWNER/NAME.")
        raise ModelError(f"The folder {folder} has no config.json, so it holds no drafter head; give one that has.")
    return HeadConfig.from_values(parsed(file), folder)


def kind_at(folder: str | Path) -> str:
    """Return the kind of the head in a folder."""
    return kind_in(folder) or read_config(folder).kind


def kind_in(folder: Any) -> str | None:
    """Return the kind of the head in a folder or on the hub; None for anything else."""
    if not isinstance(folder, (str, Path)):
        return None
    values = read_values(folder)
    layout = layout_of(folder, values)
    if layout is None and MARK not in values:
        return None
    with _refusing(folder):
        return head_class(values[MARK]).kind if layout is None else layout.kind(values).kind


def layout_of(folder: str | Path, values: Mapping[str, Any], shapes: Shapes | None = None) -> ReleasedLayout | None:
    """Return the layout of the released head in a folder; None for ours and for other folders.

    ``shapes`` are those of its weights, by default read from their file.
    """
    if MARK in values:
        return None
    from saccade.draft.heads.published.blocks import block_layout
    from saccade.draft.heads.published.eagle3 import eagle3_layout
    from saccade.draft.heads.published.stacks import stack_layout

    if not values.keys().isdisjoint({"block_size", "dflash_config"}):
        from saccade.draft.heads.published.denoisers import dflash_layout

        if found := dflash_layout(values):
            return found
    if values.get(SPECULATORS) == "peagle":
        from saccade.draft.heads.published.peagle import PEAGLE

        return PEAGLE
    return eagle3_layout(values) or stack_layout(values) or block_layout(values, shapes or (lambda: _shapes(folder)))


def read_values(folder: str | Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json; empty if it has none or a damaged one."""
    file = file_of(folder, "config.json")
    try:
        return {} if file is None else parsed(file)
    except ModelError:
        return {}


def parsed(file: Path) -> dict[str, Any]:
    """Return the contents of a config.json; empty unless it is a table."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{file} is damaged ({problem}); copy it again.") from None
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
        if isinstance(weights, dict) and all(map(_is_plain, weights.values())):
            return weights
        raise ModelError(f"The weight file {file} holds more than dense weights; save the state_dict alone.")
    raise ModelError(f"The head {folder} has no {' or '.join(names)}; train it, or copy the whole folder.")


def _is_plain(weight: Any) -> bool:
    """Whether a weight has all of its numbers in the file, in the usual way."""
    if not isinstance(weight, torch.Tensor) or weight.layout != torch.strided or weight.device.type != "cpu":
        return False
    return not weight.is_quantized and weight.untyped_storage().nbytes() >= weight.nbytes


_FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # formats of weights; tokens' ids are int64


def _check(folder: str | Path, name: str, expected: torch.Tensor | None, weight: torch.Tensor | None) -> None:
    problem, other = "", "its config.json belongs to another head."
    if weight is None:
        problem = f"The head {folder} lacks the weight {name}; copy it again, or train it again."
    elif expected is None:
        problem = f"The head {folder} has the weight {name}, which its kind does not have; {other}"
    elif expected.shape != weight.shape:
        shapes = f"is {tuple(weight.shape)}, not {tuple(expected.shape)}"
        problem = f"The weight {name} of the head {folder} {shapes}; {other}"
    elif weight.dtype not in (_FORMATS if expected.is_floating_point() else (expected.dtype,)):
        usual = "float32, bfloat16 or float16" if expected.is_floating_point() else "int64"
        problem = f"The weight {name} of the head {folder} is stored as {weight.dtype}, not as {usual}; {other}"
    elif not bool(torch.isfinite(weight).all()):
        what = "holds numbers that are not finite, with which it would draft nothing"
        problem = f"The weight {name} of the head {folder} {what}; copy it again, or train it again."
    if problem:
        raise ModelError(problem)
