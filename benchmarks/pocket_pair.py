"""The pair of models, the prompts, options, tables and intervals that all measurements share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers.utils import logging

from benchmarks.clock import CLOCKS
from saccade import VLM
from saccade.cpu import suitable_dtype
from saccade.inputs.families import join, type_ids
from saccade.inputs.families.family import Prompt
from saccade.pocket import Sample, draft_path, draw, target_path
from tools.pocket.world import FIRST_TASKS

FIRST_SEED = 300_000
"""Pictures are drawn from here on; training and evaluation use other seeds."""
LOADS = (0.5, 1.5, 4.0)
"""Arrival rates, as multiples of what one request after the other can serve."""

Inputs = Mapping[str, torch.Tensor]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose models, number formats and threads."""
    parser.add_argument("--target", type=Path, default=target_path(), help="model folder (default: the pocket's)")
    parser.add_argument("--draft", type=Path, default=draft_path(), help="model folder (default: the pocket's)")
    best = str(suitable_dtype(torch.bfloat16)).removeprefix("torch.")
    parser.add_argument(
        "--target-dtype",
        default=best,
        choices=("bfloat16", "float32"),
        help="default: bfloat16 where this processor computes in it, else float32",
    )
    parser.add_argument("--draft-dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")


def add_batch_options(parser: argparse.ArgumentParser, only: Sequence[str]) -> None:
    """The options of measurements of the running batch, in float32 on one thread by default."""
    add_options(parser)
    parser.set_defaults(target_dtype="float32", threads=1)
    parser.add_argument("--method", default="chain", help="what the running batch drafts with (default: chain)")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--requests", type=int, default=48, help="per load (default: 48)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--only", choices=only, help="one of the measurements alone")


def prepare(options: argparse.Namespace) -> None:
    """Set the number of threads, and silence transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)


def chosen(parser: argparse.ArgumentParser, names: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    """The names of an option, all known ones without any; others are refused."""
    if unknown := set(names or ()) - set(known):
        parser.error(f"unknown {what} {sorted(unknown)}; expected some of {list(known)}")
    return [name for name in known if not names or name in names]


def write_json(path: Path | None, content: Any) -> None:
    """Write everything measured, dataclasses as their fields; nothing without a path."""
    if path is not None:
        fields: Callable[[Any], Any] = lambda value: asdict(value) if is_dataclass(value) else str(value)  # noqa: E731
        path.write_text(json.dumps(content, indent=1, default=fields) + "\n")


def load(folder: Path, dtype: str, device: str) -> Any:
    """A model of the pair, fresh from disk."""
    from transformers import AutoModelForImageTextToText

    if not folder.is_dir():
        raise SystemExit(f"There is no model folder {folder}; train one with `python -m tools.pocket train`.")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def load_pair(options: argparse.Namespace) -> VLM:
    """The pair with the method of the options."""
    target = load(options.target, options.target_dtype, options.device)
    draft = load(options.draft, options.draft_dtype, options.device)
    return VLM(target, drafter=draft, method=options.method, gamma=options.gamma)


def samples(numbers: Sequence[int], grammar: str = "dense", tasks: Sequence[str] = FIRST_TASKS) -> list[Sample]:
    """Questions about fresh pictures, task after task."""
    return [draw(FIRST_SEED + number, tasks[number % len(tasks)], grammar) for number in numbers]


def stock_inputs(model: Any, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """Prompts as `generate` takes them, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p.ids) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    media = join(model.config, [m for p in prompts for m in p.media])
    made = {"input_ids": ids, "attention_mask": mask, **media, **type_ids(model.config, ids)}
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in made.items()
    }


def bootstrap(
    values: ArrayLike, statistic: Callable[[np.ndarray], np.ndarray], draws: int = 2000
) -> tuple[float, float, float]:
    """A statistic of values `[N, ...]`, with its 95 % bootstrap interval over the first axis.

    It takes `[draws, N, ...]` to `[draws]`.
    """
    array = np.asarray(values)
    picked = np.random.default_rng(0).integers(0, len(array), (draws, len(array)))
    low, high = np.percentile(statistic(array[picked]), [2.5, 97.5])
    return float(statistic(array[None])[0]), float(low), float(high)


def table(head: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
