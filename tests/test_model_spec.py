"""One specification of models behind every door: Python, tables and the command line."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from saccade import VLM, load, vlm
from saccade.cli.option_groups import ModelOptions, spread
from saccade.errors import InputError, SaccadeError
from saccade.model_spec import ModelSpec
from saccade.options import in_tables, make

GIVEN: dict[str, Any] = {
    "drafter": "d",
    "method": "chain",
    "heads": {"h": "folder"},
    "head": "h",
    "adapters": {"a": "folder"},
    "dtype": "float16",
    "draft_dtype": "bfloat16",
    "device": "cuda:1",
    "threads": 3,
    "exact": True,
    "executor": "lean",
    "weights": "int8",
    "options": {"gamma": 7},
}
"""Another value than its default for every field."""


def taken(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What a function of `saccade.vlm` is called with."""
    seen: list[Any] = []

    def stop(spec: ModelSpec, *_: Any, **__: Any) -> None:
        seen.append(spec)
        raise SaccadeError("enough")

    monkeypatch.setattr(vlm, name, stop)
    return seen


def test_load_hands_on_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = taken(monkeypatch, "check")
    device, options, rest = GIVEN["device"], GIVEN["options"], {**GIVEN}
    del rest["device"], rest["options"]
    for arguments in (rest | {"device_map": device} | options, {}):
        with pytest.raises(SaccadeError, match="enough"):
            load("t", **arguments)
    assert GIVEN.keys() == {entry.name for entry in fields(ModelSpec)} - {"target"}
    assert all(value != getattr(ModelSpec("t"), name) for name, value in GIVEN.items())
    assert seen[0] == ModelSpec("t", **GIVEN)
    assert (seen[1].heads, seen[1]) == ((), ModelSpec("t", heads=()))


def test_a_loaded_model_hands_on_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = taken(monkeypatch, "resolve")
    names = inspect.signature(VLM).parameters.keys() & GIVEN.keys() - {"options"}
    given = {name: GIVEN[name] for name in names}
    with pytest.raises(SaccadeError, match="enough"):
        VLM("m", **given, **GIVEN["options"])
    assert seen == [ModelSpec("m", **given, options=GIVEN["options"])]


def test_the_command_line_has_the_help_and_the_defaults_of_the_fields() -> None:
    seen: list[ModelSpec] = []

    def command(*, models: ModelOptions) -> None:
        seen.append(models)

    shown = spread(command)
    parameters = inspect.signature(shown).parameters
    help_of = {name: in_tables(hint)[1] for name, hint in inspect.get_annotations(ModelSpec, eval_str=True).items()}
    assert {name for name, words in help_of.items() if words} == parameters.keys() - {"store"}
    assert all(parameters[name].default.help == words for name, words in help_of.items() if words)
    shown(**{name: parameter.default.default for name, parameter in parameters.items()})
    assert seen == [ModelSpec(None)]


@pytest.mark.parametrize("name", [name for name, value in GIVEN.items() if name != "threads"])
def test_a_table_takes_plain_values_alone(name: str) -> None:
    assert make(ModelSpec, {"target": "t", name: GIVEN[name]}, "x") == ModelSpec("t", **{name: GIVEN[name]})
    with pytest.raises(SaccadeError, match=f"^x: {name} must be "):
        make(ModelSpec, {"target": "t", name: 3}, "x", error=InputError)
