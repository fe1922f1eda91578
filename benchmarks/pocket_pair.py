"""The pair of models, the prompts, clocks, options and tables that all measurements share."""

from __future__ import annotations

import argparse
import base64
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from saccade import VLM
from saccade.cpu import suitable_dtype
from saccade.inputs.families import join, type_ids
from saccade.inputs.families.family import Prompt
from saccade.pocket import Sample, draft_path, draw, target_path
from tools.pocket.world import FIRST_TASKS

FIRST_SEED = 300_000
"""Pictures are drawn from here on; training and evaluation use other seeds."""
MIXED_TASKS = ("chart", "scene", "receipt", "document", "detail", "line")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

Inputs = Mapping[str, torch.Tensor]


class Clock:
    """Seconds of wall time or of processor time since its start, all work on the device done; it can jump ahead."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._read, self._device = CLOCKS[name], device
        self._zero = self._read()

    def __call__(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._read() - self._zero

    def jump(self, to: float) -> None:
        """Leave out idle time."""
        self._zero -= max(to - self(), 0.0)


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
    made.add_argument("--json", type=Path, help="also write everything measured to this file")
    return made


def batch_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of a measurement of the running batch, in float32 on one thread by default."""
    made = parser(description)
    made.set_defaults(target_dtype="float32", threads=1)
    made.add_argument("--method", default="chain", help="what the running batch drafts with (default: chain)")
    made.add_argument("--gamma", type=int, default=5)
    made.add_argument("--requests", type=int, default=48, help="per load (default: 48)")
    made.add_argument("--new-tokens", type=int, default=96)
    made.add_argument("--rows", type=int, default=8)
    made.add_argument("--chunk", type=int, default=256, help="prompt tokens per step (default: 256)")
    made.add_argument("--clock", default="wall", choices=CLOCKS)
    return made


def clocks(options: argparse.Namespace) -> Callable[[], Clock]:
    """Starts a clock of the options."""
    return partial(Clock, options.clock, torch.device(options.device))


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, set the number of threads, and silence transformers."""
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def write_json(path: Path | None, content: Any) -> None:
    """Write everything measured, dataclasses as their fields; nothing without a path."""
    if path is not None:
        fields: Callable[[Any], Any] = lambda value: asdict(value) if is_dataclass(value) else str(value)  # noqa: E731
        path.write_text(json.dumps(content, indent=1, default=fields) + "\n")


def load(folder: Path, dtype: str, device: str) -> Any:
    """A model of the pair, fresh from disk."""
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


def data_uri(picture: Image.Image) -> str:
    """A picture as a PNG in a data URI."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
