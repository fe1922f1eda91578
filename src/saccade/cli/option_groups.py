"""Options that several commands take together, as dataclasses, and the decorator that gives them to a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import ParameterInfo

from saccade.cli import arguments as args
from saccade.errors import InputError


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of a dataclass type by one option per field, since Typer knows single options alone.

    Fields whose type is not annotated with an option keep their defaults. Parameters behind a group are best
    keyword-only, so that it needs no default.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: options_of(hint) for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += groups[name]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def spread_command(**given: Any) -> None:
        for name, options in groups.items():
            given[name] = hints[name](**{option.name: given.pop(option.name) for option in options})
        command(**given)

    del spread_command.__wrapped__
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread_command


def options_of(group: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass that are options, as parameters of a command."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(group)
        if _is_option(hints[each.name])
    ]


def _is_option(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any(isinstance(each, ParameterInfo) for each in get_args(hint)[1:])


@dataclass(frozen=True)
class Placing:
    """Number format, device and threads of the models."""

    dtype: args.Dtype = "auto"
    draft_dtype: args.DraftDtype = None
    device: args.DeviceMap = None
    threads: args.Threads = None
    exact: args.Exact = False

    def models(self) -> dict[str, Any]:
        """Return them as arguments of `saccade.load`."""
        given = asdict(self)
        return {"device_map": given.pop("device"), **given}


@dataclass(frozen=True)
class Decoding:
    """Length and sampling of answers."""

    max_new_tokens: args.MaxNewTokens = None
    sample: args.Sample = False
    temperature: args.Temperature = None
    top_p: args.TopP = None
    top_k: args.TopK = None
    min_p: args.MinP = None
    repetition_penalty: args.RepetitionPenalty = None
    stop: args.Stop = None
    seed: args.Seed = None

    def options(self) -> dict[str, Any]:
        """Return the given generation options, seed left out; the checkpoint fills the others.

        Temperature 0 is greedy decoding.
        """
        is_greedy = self.temperature == 0
        if is_greedy and self.sample:
            raise InputError("--temperature 0 is greedy decoding, which --sample is not; leave one of them out.")
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        others = {
            "max_new_tokens": self.max_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "stop_strings": self.stop or None,
        }
        found = {name: value for name, value in others.items() if value is not None}
        if is_greedy:
            return {**found, "do_sample": False}
        drawn = {name: value for name, value in sampling.items() if value is not None}
        return {**found, **drawn, **({"do_sample": True} if self.sample or drawn else {})}

    def check(self) -> None:
        """Check what needs no model, before one is loaded."""
        from saccade.engine.generation import check_given
        from saccade.inputs.requests import seeds_of

        check_given(self.options())
        if self.seed is not None:
            seeds_of(self.seed, 1)
