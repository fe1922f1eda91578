"""The pair of models, the prompts, clocks, options and tables that all measurements share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from saccade.cpu import suitable_dtype
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.pocket import draft_path, target_path

_Name = TypeVar("_Name")
FIRST_SEED = 300_000  # pictures are drawn from here on; training and evaluation use other seeds

Inputs = Mapping[str, torch.Tensor]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring, with the options that choose models, number formats and threads."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", type=Path, default=target_path(), help="model folder (default: the pocket's)")
    made.add_argument("--draft", type=Path, default=draft_path(), help="model folder (default: the pocket's)")
    made.add_argument(
        "--target-dtype",
        default=str(suitable_dtype(torch.bfloat16)).removeprefix("torch."),
        choices=("bfloat16", "float16", "float32"),
        help="default: bfloat16 where this processor computes in it, else float32",
    )
    made.add_argument("--draft-dtype", default="float32", choices=("bfloat16", "float32"))
    made.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    made.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    return made


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, set the number of threads, and silence transformers."""
    options = parser.parse_args()
    quiet()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(folder: Path, dtype: str, device: str) -> Any:
    """A model of the pair, fresh from disk."""
    if not folder.is_dir():
        raise SystemExit(f"There is no model folder {folder}; train one with `python -m tools.pocket train`.")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def stock_inputs(model: Any, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """Prompts as `generate` takes them, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p.ids) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    media = family_of(model.config).join([m for p in prompts for m in p.media])
    made = {"input_ids": ids, "attention_mask": mask, **media, **family_of(model.config).type_ids(ids)}
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in made.items()
    }


def rotated(names: Iterable[_Name], turn: int) -> list[_Name]:
    """The same in an order that rotates from turn to turn, so that what else the machine does falls on all alike."""
    every = list(names)
    first = turn % len(every)
    return every[first:] + every[:first]


def table(head: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
