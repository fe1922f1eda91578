"""Arguments of an evaluator: which are for loading, which for answers, and what a task's settings mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.engine.row import UNSUPPORTED
from saccade.errors import InputError
from saccade.options import check_whole
from saccade.stream import GenerationOptions

NEW_TOKENS = 1024
"""Limit of an answer where neither the task nor the caller sets one."""
ALIASES = {"max_gen_toks": "max_new_tokens", "max_tokens": "max_new_tokens", "stop": "until", "stop_sequences": "until"}
"""Names of generation settings in tasks -> the usual ones."""

ELSEWHERE = {
    "image_aspect_ratio": "the checkpoint's image processor decides how pictures are scaled",
    "skip_special_tokens": "answers are decoded without special tokens",
    "use_cache": "the KV cache is always used",
}
"""Settings of tasks that need nothing here, with the reason that is reported."""

OF_SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OBJECTS = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
GENERATION = {*GenerationOptions.__annotations__, *UNSUPPORTED, *ALIASES, "until", "seed"} - {*_OBJECTS}
"""Accepted names of generation settings; `saccade.engine.row` refuses unsupported values."""


@dataclass(slots=True)
class PluginOptions:
    """Arguments of the plug-ins themselves."""

    batch_size: Any = 1  # rows of the running batch, or `auto`
    system: str | None = None  # system prompt
    speed: str | None = None  # JSON file of the speed
    skip_failed: bool = False  # leave the answer to an unusable question empty
    paragraphs: bool = False  # leave out stop strings of white space
    num_frames: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if self.batch_size == "auto":
            self.batch_size = 8
        elif str(self.batch_size).isdecimal():
            self.batch_size = int(self.batch_size)
        check_whole(self.batch_size, 1, "batch_size", error=InputError)


def sort_arguments(
    arguments: Mapping[str, Any], target_names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any], PluginOptions]:
    """Sort arguments: those of `saccade.load`, generation settings where the task has none, and the plug-in's.

    Those of no other purpose are options of the method, which `saccade.load` checks.
    """
    values = {name: value for name, value in arguments.items() if value is not None}
    targets = [name for name in target_names if name in values]
    if len(targets) != 1:
        raise InputError(
            f"Exactly one of {' and '.join(target_names)} must name the target, such as {target_names[0]}=pocket; "
            f"{'both were' if targets else 'none was'} given."
        )
    values["target"] = values.pop(targets[0])
    if isinstance(values.get("heads"), str):  # folders between semicolons: an evaluator's arguments hold no lists
        entries = [entry.strip() for entry in values["heads"].split(";") if entry.strip()]
        values["heads"] = [entry for entry in entries if "=" not in entry]
        if not values["heads"]:
            values["heads"] = dict(entry.split("=", 1) for entry in entries)
        elif len(values["heads"]) < len(entries):
            raise InputError(
                f"Either all heads have a name (NAME=FOLDER;NAME=FOLDER) or none, not {'; '.join(entries)}."
            )
    if "device" in values:
        values.setdefault("device_map", values.pop("device"))
    plugin = {name: values.pop(name) for name in PluginOptions.__slots__ if name in values}
    generation = {name: values.pop(name) for name in list(values) if name in GENERATION}
    return values, generation, PluginOptions(**plugin)


def decoding(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], paragraphs: bool, log: Callable[[str], None]
) -> tuple[dict[str, Any], int | None]:
    """Return the generation options and the seed of a task's settings.

    Greedy decoding where neither temperature nor do_sample says otherwise.
    """
    options: dict[str, Any] = {}
    for source in (defaults, settings):
        options |= {ALIASES.get(name, name): value for name, value in source.items()}
    for name in ELSEWHERE.keys() & options.keys():
        log(f"The task's setting {name}={options.pop(name)!r} is left out: {ELSEWHERE[name]}.")
    if unknown := sorted(set(options) - GENERATION):
        raise InputError(
            f"The generation setting {unknown[0]}={options[unknown[0]]!r} is not known here; expected options of "
            "Hugging Face's GenerationConfig, until and seed. Take it out of the task."
        )
    stops = [*_stops(options.pop("until", None)), *_stops(options.pop("stop_strings", None))]
    if paragraphs:
        stops = [stop for stop in stops if stop.strip()]
    seed = options.pop("seed", None)
    options = {"max_new_tokens": NEW_TOKENS} | {name: value for name, value in options.items() if value is not None}
    longest = options["max_new_tokens"]
    if isinstance(longest, float) and math.isfinite(longest) and longest == int(longest):
        options["max_new_tokens"] = int(longest)  # an evaluator's parser makes floats of numbers
    temperature, wanted = options.get("temperature"), options.get("do_sample")
    samples = bool(temperature) if wanted is None else bool(wanted) and temperature != 0
    if wanted and not samples:
        log("The task asks for do_sample=True at temperature 0, which is greedy decoding.")
    if temperature and not samples:
        log(f"The task asks for do_sample=False, so its temperature={temperature} has no effect.")
    if not samples:
        options = {name: value for name, value in options.items() if name not in OF_SAMPLING}
    if stops:
        options["stop_strings"] = list(dict.fromkeys(stops))
    return {**options, "do_sample": samples}, seed


def _stops(value: Any) -> list[str]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not all(entry is None or isinstance(entry, str) for entry in entries):
        raise InputError(f"The setting until must be a string or a list of strings, not {value!r}.")
    return [entry for entry in entries if entry]
