"""Options as dataclasses: each is declared once, and a command that takes the dataclass takes all of its options."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from saccade.cli import completion, screen
from saccade.errors import InputError
from saccade.wording import parse_value

if TYPE_CHECKING:
    from saccade.ray_cluster import Places
    from saccade.resumable import Worker
    from saccade.vlm import VLM

T = TypeVar("T")


def option(default: Any, words: str, *names: str, **settings: Any) -> Any:
    """Declare an option with its help, as the default of a parameter of a command, or of a field of a group.

    Its long name is that of the parameter unless ``names`` has one.
    """
    return typer.Option(default, *names, help=words, **settings)


@dataclass_transform(frozen_default=True)
def group(panel: str | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass of options, which are a panel of the help."""

    def made(kind: type[T]) -> type[T]:
        options = {name: value for name, value in vars(kind).items() if isinstance(value, OptionInfo)}
        for name, value in options.items():
            value.rich_help_panel = value.rich_help_panel or panel
            setattr(kind, name, value.default)
        kind.OPTIONS = {**getattr(kind, "OPTIONS", {}), **options}  # type: ignore[attr-defined]
        return dataclass(frozen=True)(kind)

    return made


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of a command that is a group by the group's options."""
    hints = get_type_hints(command)
    groups = {name: hint for name, hint in hints.items() if hasattr(hint, "OPTIONS")}
    parameters = list[inspect.Parameter]()
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name])
            parameters += [_parameter(each, value, types[each]) for each, value in groups[name].OPTIONS.items()]
        else:
            parameters.append(_parameter(name, parameter.default, hints[name]))

    @functools.wraps(command)
    def spread_command(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{each: values.pop(each) for each in kind.OPTIONS})
        command(**values)

    del spread_command.__wrapped__
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread_command


def _parameter(name: str, value: Any, hint: Any) -> inspect.Parameter:
    if isinstance(value, OptionInfo) and not any(each.startswith("--") for each in value.param_decls or ()):
        value.param_decls = (f"--{name.rstrip('_').replace('_', '-')}", *(value.param_decls or ()))
    if isinstance(value, ParameterInfo):
        value.autocompletion = value.autocompletion or completion.BY_NAME.get(name)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


def settings(pairs: list[str] | None) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` pairs; numbers become numbers, true and false become booleans."""
    split = split_pairs(pairs, "--set", "NAME=VALUE, such as gamma=7,")
    return {name.replace("-", "_"): parse_value(value) for name, value in split.items()}


def split_pairs(pairs: Sequence[str] | None, name: str, form: str) -> dict[str, str]:
    """Split ``KEY=VALUE`` pairs of an option."""
    values = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"{name} takes {form} not {pair!r}.")
        values[key] = value
    return values


_SPLITTING = {"tp": "generate", "fsdp": "train"}
"""Devices that mean several processes which share the target, each with the command that has it."""


def _device(context: typer.Context, device: str | None) -> str | None:
    """Check that the command can share its target with other processes, of which the first one alone prints."""
    if device in _SPLITTING:
        name, user = context.command.name, _SPLITTING[device]
        if name != user:
            problem = f"The device {device} splits the target over processes, which `saccade {name}` cannot use"
            raise InputError(f"{problem}; give another device, or use `saccade {user}` or the Python API.")
        if device == "tp" and os.environ.get("RANK", "0") != "0":
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            screen.be_quiet()
    return device


@group("Models")
class TargetOptions:
    """The target, its number format, device and threads."""

    target: str | None = option(
        None, "Checkpoint folder, hub id, profile of `saccade tune`, or `pocket` (built-in).", "-t", metavar="PATH"
    )
    dtype: str = option(
        "auto", "Of the target: float32, bfloat16, float16 or auto: as stored, or float32 where that is as fast."
    )
    device: str | None = option(
        None, "cpu, cuda, cuda:1, auto (several), or tp and fsdp: split over torchrun's processes.", callback=_device
    )
    threads: int | None = option(
        None, "CPU threads; by default one for a small target, else as many as cores are idle (`train`: all)."
    )

    def named(self) -> str:
        """Return the target, which must be named."""
        if self.target is None:
            places = "a checkpoint folder or a hub id with --target, or --target pocket for the built-in pair"
            raise InputError(f"No model is named; give {places}.")
        return self.target

    def or_pocket(self) -> Self:
        """Return these options with the built-in pair where no target is named."""
        return replace(self, target=self.target or "pocket")


@group("Models")
class PairOptions(TargetOptions):
    """Target, drafter and heads."""

    drafter: str | None = option(
        None, "A smaller checkpoint of the same tokenizer, a trained head, or `pocket`.", "-d", metavar="PATH"
    )
    head: list[str] | None = option(
        None, "Another trained head, named NAME or like its folder; may be repeated.", metavar="[NAME=]FOLDER"
    )
    draft_dtype: str | None = option(
        None, "Of the drafter; by default as stored, but float32 for a small one on a CPU."
    )
    exact: bool = option(
        False, "Exact mode: lossless methods give plain decoding's tokens in every number format; slower."
    )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `saccade.load`."""
        arguments = {"method": None, **asdict(self), "target": self.named()}
        arguments["heads"] = screen.heads_by_name(arguments.pop("head") or [])
        arguments["device_map"] = arguments.pop("device")
        return arguments | settings(arguments.pop("set_", None))

    def load(self) -> VLM:
        """Load the models."""
        models = self.arguments()
        return screen.load_models(models.pop("target"), models.pop("drafter"), models.pop("method"), **models)


@group("Models")
class ModelOptions(PairOptions):
    """Target, drafter, heads, and the method with its options."""

    method: str | None = option(
        None, "See `saccade methods`; by default `auto`, a head's own, or `prompt-lookup` without a drafter.", "-m"
    )
    set_: list[str] | None = option(
        None, "An option of the method, such as `--set gamma=7`; may be repeated.", metavar="NAME=VALUE"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """Options of the method."""
        return settings(self.set_)


@group("Decoding")
class DecodingOptions:
    """Length and sampling of answers."""

    max_new_tokens: int | None = option(None, "Most tokens of an answer.", "-n")
    sample: bool = option(False, "Sample instead of greedy decoding.")
    temperature: float | None = option(None, "Below 1 sharpens, above 1 flattens, 0 is greedy; implies --sample.")
    top_p: float | None = option(None, "Keep the likeliest tokens up to this mass; implies --sample.")
    top_k: int | None = option(None, "Keep this many of the likeliest tokens; implies --sample.")
    min_p: float | None = option(None, "Keep tokens at least this likely, relative to the likeliest; implies --sample.")
    repetition_penalty: float | None = option(None, "Above 1 discourages repetition.")
    stop: list[str] | None = option(None, "End the answer after this string; may be repeated.")
    seed: int | None = option(None, "Seed of sampling.")

    def checked(self) -> dict[str, Any]:
        """Return the generation options, seed left out; what needs no model is checked before one is loaded."""
        from saccade.engine.row import check_given
        from saccade.inputs.processor import seeds_of

        options = self.options()
        check_given(options)
        if self.seed is not None:
            seeds_of(self.seed, 1)
        return options

    def options(self) -> dict[str, Any]:
        """Return the generation options, seed left out; the checkpoint fills those that are not set."""
        names = ("max_new_tokens", "repetition_penalty", "temperature", "top_p", "top_k", "min_p")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.stop:
            options["stop_strings"] = self.stop
        sampling = {"temperature", "top_p", "top_k", "min_p"}
        if self.temperature == 0:
            if self.sample:
                raise InputError("--temperature 0 is greedy decoding, which --sample is not; leave one of them out.")
            options = {name: value for name, value in options.items() if name not in sampling}
            options["do_sample"] = False
        elif self.sample or sampling & options.keys():
            options["do_sample"] = True
        return options


@group()
class MarkOptions:
    """Text and marks of an answer."""

    text_as_text: bool = option(
        False, "Encode control tokens in messages, such as `</s>` or `<image>`, as ordinary text."
    )
    marks: bool = option(
        False, "Mark accepted draft tokens: green, loosely accepted ones yellow; without colours ‹ › and « »."
    )


@group("Several machines")
class RayOptions:
    """Ray's cluster."""

    ray: str | None = option(
        None, "Run on Ray: on this machine, or on the cluster `auto` or HOST:PORT.", metavar="[ADDRESS]"
    )

    def check(self, name: str, value: int | None) -> None:
        """Raise InputError where an option for Ray is given without ``--ray``."""
        if self.ray is None and value is not None:
            raise InputError(f"{name} is for engines on Ray; give --ray with it, or leave it out.")


@group("Several machines")
class ActorOptions(RayOptions):
    """Engines of a batch job on Ray."""

    actors: int | None = option(None, "Engines on Ray; by default one per GPU, or per machine.", metavar="N")

    @contextmanager
    def started(
        self, models: ModelOptions, kind: Any, arguments: Callable[[Places], tuple[Any, ...]], ahead: int
    ) -> Iterator[Worker]:
        """Start actors that load the models; mistakes show before."""
        from saccade.jobs.actors import ActorModels, actors
        from saccade.ray_cluster import connected, places
        from saccade.vlm import check

        screen.quiet_libraries()
        check(**models.arguments())
        loading = ActorModels(models.arguments(), models.settings)
        with connected(str(self.ray), self.actors) as cluster:
            with_gpu = models.device != "cpu" and models.target != "pocket"
            room = places(cluster, self.actors, models.threads, with_gpu=with_gpu)
            with actors(cluster, room, loading, kind, arguments(room), ahead=ahead) as worker:
                yield worker


def with_local_ray(arguments: Sequence[str]) -> list[str]:
    """Give ``--ray`` its value where it has none: typer knows no options whose value may be left out."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    for number in range(end):
        follower = words[number + 1 : number + 2]
        if words[number] == "--ray" and (not follower or follower[0].startswith("-")):
            words[number] = "--ray=local"
    return words
