"""The commands that repeat a run, with everything that its answers and times depend on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from saccade.bench.records import Header

_OF_QUESTIONS = ("per_task", "turns", "max_new_tokens")
"""Sizes that a data set may decide, unless the command line gives them."""
_SIZES = ("per_task", "repeats", "turns", "max_new_tokens", "seed")


def commands(header: Header, labels: Iterable[str]) -> str:
    """Return the commands that repeat a run in a new folder, and show its report.

    What was left to defaults that depend on the machine (number formats, threads) is written out. Files, models and
    heads are named as they were on the command line; a run that was started from Python names them by what it knows.
    """
    config, places = header.config, header.places
    words = ["saccade", "bench", "--suite", str(places.get("suite") or header.suite)]
    words += ["--methods", str(places.get("methods") or ",".join(labels))]
    given = places.get("sizes")
    named = [str(word) for word in places.get("questions") or ()]
    if places.get("data"):
        words += ["--data", str(places["data"])]
    words += named
    if not places.get("data") and "--dataset" not in named:
        tasks = [task.get("name") for task in config.get("tasks", ()) if isinstance(task, Mapping)]
        words += ["--tasks", ",".join(map(str, tasks))] if tasks else []
    for option in _SIZES:
        if option == "per_task" and _has_counts(config):
            continue  # it would replace the numbers of the suite's tasks
        if option in config and (given is None or option in given or option not in _OF_QUESTIONS):
            words += [f"--{option.replace('_', '-')}", str(config[option])]
    words += _models(header)
    if "threads" in header.environment:
        words += ["--threads", str(header.environment["threads"])]
    return f"{shlex.join(words)} --out RUN\nsaccade report RUN"


def _has_counts(config: Mapping[str, Any]) -> bool:
    """Whether some task has another number of prompts than the suite."""
    counts = (task.get("count") for task in config.get("tasks", ()) if isinstance(task, Mapping))
    return any(count not in (None, config.get("per_task")) for count in counts)


def _models(header: Header) -> list[str]:
    """Options that load the run's models in its number formats on its device."""
    places = header.places
    target, drafter = (_facts(header.models, name) for name in ("target", "drafter"))
    names = [places.get(name) or facts.get("name") for name, facts in (("target", target), ("drafter", drafter))]
    words = ["--target", str(names[0])] if names[0] else []
    if names[1] and names[1] != names[0]:
        words += ["--drafter", str(names[1])]
    heads = places.get("heads")
    if heads is None and names[0] != "pocket":  # which brings its own
        heads = [f"{name}=FOLDER" for name in _facts(header.models, "heads")]
    for head in heads or ():
        words += ["--head", str(head)]
    for option, facts in (("--dtype", target), ("--draft-dtype", drafter)):
        if facts.get("dtype"):
            words += [option, str(facts["dtype"])]
    if places.get("device"):
        words += ["--device", str(places["device"])]
    return [*words, "--exact"] if target.get("exact") else words


def _facts(models: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = models.get(name)
    return found if isinstance(found, Mapping) else {}
