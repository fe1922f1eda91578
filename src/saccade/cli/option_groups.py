"""Options as dataclasses: each is declared once, and a command that takes the dataclass takes all of its options."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.models import OptionInfo

from saccade.cli import screen
from saccade.errors import InputError, SaccadeError
from saccade.methods import METHODS, check
from saccade.model_spec import ModelSpec
from saccade.options import FrameOptions, in_tables
from saccade.wording import parse_value, renamed

if TYPE_CHECKING:
    from saccade.ray_cluster import Places
    from saccade.resumable import Worker

T = TypeVar("T")


def option(default: Any, words: str, *names: str, **settings: Any) -> Any:
    """Declare an option with its help, as the default of a parameter of a command, or of a field of a group.

    Its long name is that of the parameter unless ``names`` has one.
    """
    return typer.Option(default, *names, help=words, **settings)


@dataclass_transform(frozen_default=True)
def group(panel: str | None = None, *configurations: type) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass of options, which are a panel of the help.

    Fields of ``configurations`` that have help are further options, None where they are not set.
    """

    def made(kind: type[T]) -> type[T]:
        helps = {name: in_tables(hint)[1] for name, hint in get_type_hints(kind, include_extras=True).items()}
        options = {name: option(getattr(kind, name), words) for name, words in helps.items() if words}
        for each in configurations:
            for name, hint in get_type_hints(each, include_extras=True).items():
                field_type, words = in_tables(hint)
                if words:
                    names, form = _FORMS.get(name, ((), {}))
                    options[name] = option(None, words.format(default=getattr(each, name)), *names, **form)
                    kind.__annotations__[name] = field_type | None
        options |= {name: value for name, value in vars(kind).items() if isinstance(value, OptionInfo)}
        for name, value in options.items():
            value.rich_help_panel = value.rich_help_panel or panel
            setattr(kind, name, value.default)
        kind.OPTIONS = {**getattr(kind, "OPTIONS", {}), **options}  # type: ignore[attr-defined]
        return dataclass(frozen=True)(kind)

    return made


def set_options(options: Any) -> dict[str, Any]:
    """Return the options of a group that are set."""
    return {name: value for name, value in asdict(options).items() if value is not None}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of a command that is a group by the group's options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: _group_of(hint) for name, hint in hints.items()}
    parameters = list[inspect.Parameter]()
    for name, parameter in inspect.signature(command).parameters.items():
        made, options = groups[name]
        parameters += options if made else [_parameter(name, parameter.default, hints[name])]

    @functools.wraps(command)
    def spread_command(**values: Any) -> None:
        try:
            for name, (made, options) in groups.items():
                if made is not None:
                    values[name] = made(**{each.name: values.pop(each.name) for each in options})
            command(**values)
        except SaccadeError as problem:
            if DecodingOptions not in hints.values():  # others' names are keys of files
                raise
            raise SaccadeError(renamed(str(problem), NAMES)) from problem

    del spread_command.__wrapped__
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread_command


def _group_of(hint: Any) -> tuple[Callable[..., Any] | None, list[inspect.Parameter]]:
    """Return what makes a group of its options, and these as parameters of a command; None for a single option."""
    if getattr(hint, "__origin__", None) is ModelSpec:
        return _models, _model_options(hint.__metadata__)
    types = get_type_hints(hint) if hasattr(hint, "OPTIONS") else {}
    options = [_parameter(name, value, types[name]) for name, value in getattr(hint, "OPTIONS", {}).items()]
    return hint if types else None, options


def _parameter(name: str, default: Any, kind: Any) -> inspect.Parameter:
    if isinstance(default, OptionInfo) and not any(word.startswith("--") for word in default.param_decls or ()):
        default.param_decls = (f"--{name.rstrip('_').replace('_', '-')}", *(default.param_decls or ()))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def method_names(incomplete: str) -> list[tuple[str, str]]:
    """Complete the last method of a list with commas in a shell, without loading torch."""
    before, comma, last = incomplete.rpartition(",")
    return [(f"{before}{comma}{name}", each.summary) for name, each in METHODS.items() if name.startswith(last)]


def settings(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` pairs, numbers and true and false as such."""
    split = split_pairs(pairs, "--set", "NAME=VALUE, such as gamma=7,")
    return {name.replace("-", "_"): parse_value(value) for name, value in split.items()}


def split_pairs(pairs: Sequence[str] | None, name: str, form: str) -> dict[str, str]:
    """Split ``KEY=VALUE`` pairs of an option."""
    values = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"{name} takes {form} not {pair!r}.")
        values[key] = value
    return values


def _device(context: typer.Context, device: str | None) -> str | None:
    """Check that the command can share its target with other processes, of which the first one alone prints."""
    name, user = context.command.name, {"tp": "generate", "fsdp": "train"}.get(str(device))
    if user not in (None, name):
        problem = f"The device {device} splits the target over processes, which `saccade {name}` cannot use"
        raise InputError(f"{problem}; give another device, or use `saccade {user}` or the Python API.")
    if device == "tp" and os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        screen.notes.quiet = True
    return device


def place_of(model: str) -> str:
    """Folder or hub id of a model, of which `pocket` is the built-in target."""
    from saccade.pocket import target_path

    return str(target_path()) if model == "pocket" else model


_FORMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "target": (("-t",), {"metavar": "PATH"}),
    "device": ((), {"callback": _device}),
    "drafter": (("-d",), {"metavar": "PATH"}),
    "heads": (("--head",), {"metavar": "[NAME=]FOLDER"}),
    "method": (("-m",), {"autocompletion": method_names}),
    "options": (("--set",), {"metavar": "NAME=VALUE"}),
    "api_key_file": ((), {"metavar": "FILE"}),
    "reuse_prefixes": (("--reuse-prefixes/--no-prefix-reuse",), {}),
    "kv_memory_mib": (("--kv-memory",), {"metavar": "MIB"}),
}
"""Names and settings of options of a `ModelSpec` or a server's configuration that its fields do not have."""
PANEL = {"rich_help_panel": "Models"}


TargetOptions = Annotated[ModelSpec, "target", "dtype", "device", "threads"]
PairOptions = Annotated[TargetOptions, "drafter", "heads", "draft_dtype", "exact", "executor", "weights"]
ModelOptions = Annotated[PairOptions, "method", "options"]
"""Models, and the fields of a `ModelSpec` that are options of a command."""


def _model_options(names: Sequence[str]) -> list[inspect.Parameter]:
    """Return fields of a `ModelSpec` as options; one that is a table gets an entry each time that it is given."""
    hints, parameters = get_type_hints(ModelSpec, include_extras=True), list[inspect.Parameter]()
    for name in names:
        entry = ModelSpec.__dataclass_fields__[name]
        words, form = _FORMS.get(name, ((), {}))
        kind, meaning = in_tables(hints[name])
        kind = kind if entry.default_factory is MISSING else list[str] | None
        default = None if entry.default is MISSING else entry.default
        parameters.append(_parameter(name, option(default, meaning, *words, **PANEL, **form), kind))
    if "options" in names:
        meaning = "Earlier answers of method `suffix`, kept across runs."
        store = option(None, meaning, "--suffix-store", metavar="FILE", **PANEL)
        parameters.append(_parameter("store", store, str | None))
    return parameters


def _models(heads: Sequence[str] | None = None, options: Sequence[str] | None = None, **values: Any) -> ModelSpec:
    store = values.pop("store", None)
    chosen = settings(options) | ({} if store is None else {"store": store})
    check(values.get("method"), chosen)
    return ModelSpec(**values, heads=heads_by_name(heads or ()), options=chosen)


def named(models: ModelSpec) -> ModelSpec:
    """Return models whose target must be named."""
    if models.target is None:
        raise InputError("No model is named; give a checkpoint folder or a hub id with --target, or pocket.")
    return models


def heads_by_name(heads: Sequence[str]) -> dict[str, str]:
    """Return the folders by name, of FOLDER or NAME=FOLDER each."""
    by_name: dict[str, str] = {}
    for text in heads:
        name, equals, folder = text.partition("=")
        if not (equals and name and folder) or Path(text).is_dir():
            name, folder = Path(text).expanduser().resolve().name, text
        if name in by_name:
            raise InputError(f"Two heads are named {name!r}; give one of them another name: --head NAME=FOLDER.")
        by_name[name] = folder
    return by_name


_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_NAMES = ("max_new_tokens", *_SAMPLING[1:], "repetition_penalty")
NAMES = {r"\bstop_strings\b": "--stop", r"(?<=option )store\b": "store (--suffix-store)"} | {
    rf"(?<![\w.-]){name}\b": f"--{name.replace('_', '-')}" for name in _NAMES
}
"""Names of Python's options in messages -> the command line's."""


@group("Decoding")
class DecodingOptions:
    max_new_tokens: int | None = option(None, "Most tokens of an answer.", "-n")
    sample: bool = option(False, "Sample; by default as the checkpoint's generation_config says, else greedy.")
    temperature: float | None = option(None, "Below 1 sharpens, above 1 flattens, 0 is greedy; implies --sample.")
    top_p: float | None = option(None, "Keep the likeliest tokens up to this mass; implies --sample.")
    top_k: int | None = option(None, "Keep this many of the likeliest tokens; implies --sample.")
    min_p: float | None = option(None, "Keep tokens at least this likely, relative to the likeliest; implies --sample.")
    repetition_penalty: float | None = option(None, "Above 1 discourages repetition.")
    stop: list[str] | None = option(None, "End the answer after this string; may be repeated.")
    seed: int | None = option(None, "Seed of sampling; by default another one every time, 0 for batches.")

    def checked(self) -> dict[str, Any]:
        """Return the generation options, seed left out; what needs no model is checked before one is loaded."""
        from saccade.engine.row import check_given
        from saccade.inputs.processor import seeds_of

        if self.temperature == 0 and self.sample:
            raise InputError("--temperature 0 is greedy decoding, which --sample is not; leave one of them out.")
        greedy = self.temperature == 0
        left_out = ("sample", "stop", "seed", *(_SAMPLING if greedy else ()))
        options = {name: value for name, value in set_options(self).items() if name not in left_out}
        if self.stop:
            options["stop_strings"] = self.stop
        if greedy:
            options["do_sample"] = False
        elif self.sample or any(name in options for name in _SAMPLING):
            options["do_sample"] = True
        check_given(options)
        if self.seed is not None:
            seeds_of(self.seed, 1)
        return options


@group("Media and text")
class ReadingOptions(FrameOptions):
    text_as_text: bool = option(False, "Encode control tokens in messages, such as `</s>`, as ordinary text.")


@group("Several machines")
class RayOptions:
    ray: str | None = option(None, "Run on Ray: here, or on the cluster `auto` or HOST:PORT.", metavar="[ADDRESS]")

    def __post_init__(self) -> None:
        for name in ("actors", "replicas"):
            if self.ray is None and getattr(self, name, None) is not None:
                raise InputError(f"--{name} is for engines on Ray; give --ray with it, or leave it out.")


@group("Several machines")
class ActorOptions(RayOptions):
    actors: int | None = option(None, "Engines on Ray; by default one per GPU, or per machine.", metavar="N")

    @contextmanager
    def worker(
        self,
        models: ModelSpec,
        kind: Callable[..., Worker],
        *arguments: Any,
        ahead: int = 2,
        shares: Callable[[Places], tuple[Any, ...]] = lambda _: (),  # further arguments of actors that share a machine
    ) -> Iterator[Worker]:
        """Load the models here, or in actors on Ray; mistakes show before."""
        if self.ray is None:
            yield kind(screen.load_models(models), *arguments)
            return
        from saccade.jobs.actors import ActorModels, actors
        from saccade.ray_cluster import connected, places

        screen.check_models(models)
        with connected(self.ray, self.actors) as cluster:
            with_gpu = models.device != "cpu" and models.target != "pocket"
            room = places(cluster, self.actors, models.threads, with_gpu=with_gpu)
            with actors(cluster, room, ActorModels(models), kind, (*arguments, *shares(room)), ahead=ahead) as worker:
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
