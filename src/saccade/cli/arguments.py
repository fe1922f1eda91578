"""Options shared by several commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from saccade.cli import completion, screen
from saccade.errors import InputError
from saccade.wording import parse_value

_model = partial(typer.Option, rich_help_panel="Models")
_decoding = partial(typer.Option, rich_help_panel="Decoding")

Target = Annotated[
    str | None,
    _model(
        "--target",
        "-t",
        metavar="PATH",
        autocompletion=completion.checkpoints,
        help="Checkpoint folder or hub id of the target; `pocket` is the built-in pair; a profile of `saccade tune` "
        "brings its drafter and method.",
    ),
]
Drafter = Annotated[
    str | None,
    _model(
        "--drafter",
        "-d",
        metavar="PATH",
        autocompletion=completion.checkpoints,
        help="A smaller checkpoint with the same tokenizer, or the folder or hub id of a trained head; `pocket` is the "
        "built-in draft model.",
    ),
]
Heads = Annotated[
    list[str] | None,
    _model(
        "--head",
        metavar="[NAME=]FOLDER",
        help="A trained head beside the drafter: its folder or hub id, named NAME or like the folder; may be repeated. "
        "With `pocket` the shipped heads are loaded too, except those of a name or kind given here.",
    ),
]
MethodName = Annotated[
    str | None,
    _model(
        "--method",
        "-m",
        autocompletion=completion.methods,
        help="See `saccade methods`. By default `auto` with a draft model (`chain` with options that it lacks), "
        "a head's own method with a head, `prompt-lookup` without a drafter.",
    ),
]
Settings = Annotated[
    list[str] | None,
    _model(
        "--set",
        metavar="NAME=VALUE",
        autocompletion=completion.settings,
        help="Override one of the method's options, for example `--set gamma=7`; may be repeated.",
    ),
]
Dtype = Annotated[
    str,
    _model(
        autocompletion=completion.formats,
        help="Of the target: float32, bfloat16, float16, or auto: as stored, but on a CPU float32 for `pocket` and "
        "where the stored format is not faster.",
    ),
]
DraftDtype = Annotated[
    str | None,
    _model(
        autocompletion=completion.formats,
        help="Of the drafter; by default as stored, but float32 for a small one on a CPU.",
    ),
]
SPLITTING = {"tp": "generate", "fsdp": "train"}
"""Devices that mean several processes which share the target, each with the command that has it."""


def _device(context: typer.Context, device: str | None) -> str | None:
    """Check that the command can share its target with other processes, of which the first one alone speaks."""
    if device in SPLITTING:
        name = context.command.name
        if name != SPLITTING[device]:
            raise InputError(
                f"The device {device} splits the target over processes, which `saccade {name}` cannot use; give "
                f"another device, or use `saccade {SPLITTING[device]}` or the Python API."
            )
        if device == "tp" and os.environ.get("RANK", "0") != "0":
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            screen.be_quiet()
    return device


DeviceMap = Annotated[
    str | None,
    _model(
        "--device",
        callback=_device,
        help="Device of the target: cpu, cuda, cuda:1, auto to spread it over several (needs accelerate), tp to "
        "split it over the processes that torchrun started (in `generate`), or fsdp to shard it over them (in "
        "`train`); by default a CUDA GPU if there is one, except for `pocket`.",
    ),
]
Threads = Annotated[
    int | None, _model(help="CPU threads; by default one for a small target, else as many as cores are idle.")
]
Exact = Annotated[
    bool,
    _model(
        "--exact",
        help="Exact mode: in every number format, greedy answers of all lossless methods are the tokens of plain "
        "decoding in this mode. Takes longer.",
    ),
]
MaxNewTokens = Annotated[int | None, _decoding("--max-new-tokens", "-n", help="Most tokens of an answer.")]
Sample = Annotated[bool, _decoding("--sample", help="Sample instead of greedy decoding.")]
Temperature = Annotated[
    float | None,
    _decoding(help="Below 1 sharpens, above 1 flattens; implies --sample, except 0: greedy decoding."),
]
TopP = Annotated[float | None, _decoding(help="Keep the likeliest tokens up to this mass; implies --sample.")]
TopK = Annotated[int | None, _decoding(help="Keep this many of the likeliest tokens; implies --sample.")]
MinP = Annotated[
    float | None,
    _decoding(help="Keep tokens at least this likely, relative to the likeliest; implies --sample."),
]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", "-i", metavar="FILE", help="Image of the prompt (file or data URI); may be repeated."),
]
Videos = Annotated[
    list[str] | None,
    typer.Option("--video", "-v", metavar="FILE", help="Video of the prompt (needs the video extra); may be repeated."),
]
TextAsText = Annotated[
    bool,
    typer.Option(
        "--text-as-text",
        help="Encode control tokens and placeholders in the messages, such as `</s>` or `<image>`, as ordinary text.",
    ),
]
Marks = Annotated[
    bool,
    typer.Option(
        "--marks",
        help="Mark accepted draft tokens: green, or yellow where a lossy rule accepted one in place of the target's "
        "own; without colours between ‹ and ›, and between « and ».",
    ),
]
Seed = Annotated[int | None, _decoding(help="Seed of sampling.")]
RepetitionPenalty = Annotated[float | None, _decoding(help="Above 1 discourages repetition.")]
Stop = Annotated[list[str] | None, _decoding(help="End the answer after this string; may be repeated.")]


def settings(pairs: list[str] | None) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` pairs; numbers become numbers, true and false become booleans."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--set takes NAME=VALUE, such as gamma=7, not {pair!r}.")
        found[name.replace("-", "_")] = parse_value(value)
    return found


Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on Ray (`pip install 'saccade[ray]'`): without an address on this machine, `auto` or HOST:PORT is a "
        "cluster, which belongs in a network of its own.",
        rich_help_panel="Several machines",
    ),
]


def check_ray(ray: str | None, option: str, value: int | None) -> None:
    """Raise InputError where an option for Ray is given without ``--ray``."""
    if ray is None and value is not None:
        raise InputError(f"{option} is for engines on Ray; give --ray with it, or leave it out.")


Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="24gb|80gb",
        autocompletion=completion.memory_presets,
        help="Settings for one GPU of this memory: batch sizes, precision, the longest sample, the place of cached "
        "features. What you give yourself has precedence; --plan shows them.",
    ),
]


def with_local_ray(arguments: Sequence[str]) -> list[str]:
    """Give ``--ray`` its value where it has none: typer knows no options whose value may be left out."""
    found = list(arguments)
    for number, word in enumerate(found):
        if word == "--":
            break
        follower = found[number + 1 : number + 2]
        if word == "--ray" and (not follower or follower[0].startswith("-")):
            found[number] = "--ray=local"
    return found
