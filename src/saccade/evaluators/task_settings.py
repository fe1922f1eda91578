"""Arguments of an evaluator: which are for loading, which for answers, and what a task's settings mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.engine.generation import UNSUPPORTED
from saccade.errors import InputError
from saccade.stream import GenerationOptions

Report = Callable[[str], None]
"""Takes one sentence for the evaluator's log; repeated ones are logged once."""

NEW_TOKENS = 1024
"""Limit of an answer where neither the task nor the caller sets one."""

LOADING = ("drafter", "method", "heads", "head", "dtype", "draft_dtype", "device_map", "threads", "exact")
"""Arguments of `saccade.load` besides the target and the method's options."""

OWN = ("batch_size", "system", "speed", "skip_failed", "paragraphs", "num_frames", "fps")
"""Arguments of the plug-ins themselves, see `EvaluatedModel`."""

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
"""Accepted names of generation settings; `saccade.engine.generation` refuses unsupported values."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A plug-in's arguments by purpose."""

    loading: dict[str, Any]  # of `saccade.load`, the method's options included
    generation: dict[str, Any]  # settings of answers, where the task gives none
    own: dict[str, Any]  # of the plug-in


def sort_arguments(given: Mapping[str, Any], target_names: tuple[str, ...]) -> Arguments:
    """Sort arguments by purpose; those of no other purpose are options of the method, which `saccade.load` checks."""
    values = {name: value for name, value in given.items() if value is not None}
    targets = [name for name in target_names if name in values]
    if len(targets) != 1:
        raise InputError(
            f"Exactly one of {' and '.join(target_names)} must name the target, such as {target_names[0]}=pocket; "
            f"{'both were' if targets else 'none was'} given."
        )
    heads = values.get("heads")
    if isinstance(heads, str):
        values["heads"] = _heads(heads)
    if "device" in values:
        values.setdefault("device_map", values.pop("device"))
    own = {name: values.pop(name) for name in OWN if name in values}
    generation = {name: values.pop(name) for name in list(values) if name in GENERATION}
    return Arguments({"target": values.pop(targets[0]), **values}, generation, own)


def _heads(text: str) -> list[str] | dict[str, str]:
    """Folders between semicolons, each with or without a name: an evaluator's arguments hold no lists."""
    entries = [entry.strip() for entry in text.split(";") if entry.strip()]
    pairs = [entry.partition("=") for entry in entries]
    named = sum(bool(equals) for _, equals, _ in pairs)
    if 0 < named < len(pairs):
        raise InputError(f"Either all heads have a name (NAME=FOLDER;NAME=FOLDER) or none, not {text!r}.")
    return {name: folder for name, _, folder in pairs} if named else entries


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings of one answer."""

    options: dict[str, Any]  # generation options of `saccade.VLM.generate`
    stops: tuple[str, ...]  # strings that end the answer and are no part of it
    seed: int | None  # of its random generator; None: drawn from torch's global generator, which evaluators seed


def decoding(settings: Mapping[str, Any], defaults: Mapping[str, Any], paragraphs: bool, report: Report) -> Decoding:
    """Resolve a task's generation settings; greedy decoding where neither temperature nor do_sample says otherwise."""
    chosen = {**_named(defaults), **_named(settings)}
    for name in [name for name in chosen if name in ELSEWHERE]:
        report(f"The task's setting {name}={chosen.pop(name)!r} is left out: {ELSEWHERE[name]}.")
    if unknown := sorted(set(chosen) - GENERATION):
        raise InputError(
            f"The generation setting {unknown[0]}={chosen[unknown[0]]!r} is not known here; expected options of "
            "Hugging Face's GenerationConfig, until and seed. Take it out of the task."
        )
    stops = _stops([chosen.pop("until", None), chosen.pop("stop_strings", None)], paragraphs)
    seed = chosen.pop("seed", None)
    options = {name: value for name, value in chosen.items() if value is not None}
    options["max_new_tokens"] = _whole(options.get("max_new_tokens", NEW_TOKENS))
    temperature, wanted = options.get("temperature"), options.get("do_sample")
    samples = bool(temperature) if wanted is None else bool(wanted) and temperature != 0
    if wanted and not samples:
        report("The task asks for do_sample=True at temperature 0, which is greedy decoding.")
    if temperature and not samples:
        report(f"The task asks for do_sample=False, so its temperature={temperature} has no effect.")
    options["do_sample"] = samples
    if not samples:
        options = {name: value for name, value in options.items() if name not in OF_SAMPLING}
    if stops:
        options["stop_strings"] = list(stops)
    return Decoding(options, stops, seed)


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {ALIASES.get(name, name): value for name, value in settings.items()}


def _stops(given: list[Any], paragraphs: bool) -> tuple[str, ...]:
    found: list[str] = []
    for value in given:
        entries = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(entries, (list, tuple)) or not all(e is None or isinstance(e, str) for e in entries):
            raise InputError(f"The setting until must be a string or a list of strings, not {value!r}.")
        found += [e for e in entries if e and not (paragraphs and not e.strip())]
    return tuple(dict.fromkeys(found))


def _whole(value: Any) -> Any:
    """A number that an evaluator's parser has made a float of."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


def without_stop(text: str, stops: tuple[str, ...]) -> str:
    """Text up to the first stop string, as evaluators expect it."""
    ends = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(ends, default=len(text))]
