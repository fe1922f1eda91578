"""Configuration of a server: models with their profiles, limits, and where it listens."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from saccade import methods
from saccade.errors import SaccadeError
from saccade.model_spec import ModelSpec
from saccade.options import LONGEST_STEP, MEDIA_BYTES, PREFILL_CHUNK, SERVER, MediaLimits, check_keys, make

if TYPE_CHECKING:
    from saccade.vlm import VLM

KEYS_VARIABLE = "SACCADE_API_KEYS"  # environment variable with API keys, separated by commas
MIB = 2**20
_LISTS = {"allowed_hosts", "domains", "formats", "containers", "codecs"}  # keys whose values are lists of names


class ConfigError(SaccadeError):
    """A server's configuration cannot be used."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server; every one protects it against its clients. Those with help are options of `saccade serve`."""

    max_rows: Annotated[int, "Answers that run at once, {default} by default."] = 8  # in one running batch
    max_queue: Annotated[int, "Requests that may wait, {default} by default; further ones get 503."] = 64
    batches: int = 2  # running batches, one per model and method, that exist at once
    kv_memory_mib: Annotated[int | None, "For keys and values; half of the free."] = None  # in equal shares of batches
    media_cache_mib: int = MEDIA_BYTES // MIB  # features of images and videos of all batches together
    prefill_chunk: int = PREFILL_CHUNK  # most prompt tokens per step
    longest_step: float = LONGEST_STEP  # length of a step with a part of a prompt, over one without
    default_max_tokens: int = 1024  # of an answer whose request sets none
    max_tokens: int | None = None  # greatest `max_tokens`; None: the model's context
    max_choices: int = 8  # greatest `n`, over all prompts of a request
    max_body_mib: int = 32  # size of a request
    max_option: int = 64  # greatest value of a drafting option (`gamma`, `total`) in a request
    requests_per_key: int = 0  # concurrent requests per API key, or per address without keys; 0: no limit
    requests_per_minute: int = 0  # per API key or address; 0: no limit
    connections: int = 1024  # open connections
    header_seconds: float = 10.0  # time for the head of a request
    body_seconds: float = 60.0  # time for its body
    stored_responses: int = 1000  # answers of `/v1/responses` that are kept for later turns; 0: none
    stored_responses_mib: int = 256  # memory of their conversations together; the oldest answers are dropped first
    send_seconds: float = 60.0  # time that one write to a client may take
    stream_buffer: int = 1024  # steps of an answer that wait for a slow reader; beyond them the answer is cancelled
    stuck_seconds: float = 300.0  # length of a step from which on `/health` answers 503
    drain_delay_seconds: float = 0.0  # time between a signal and the end of accepting requests
    drain_seconds: float = 60.0  # time for running answers at shutdown
    prepare_threads: int = 2  # threads that tokenize
    media_workers: int = 4  # processes that decode and resize at once, each the images and videos of one request
    media_seconds: float = 120.0  # time for that
    media_memory_mib: int = 3072  # memory that one of them may take for it

    def __post_init__(self) -> None:
        may_be_zero = ["max_queue", "requests_per_key", "requests_per_minute", "media_cache_mib", "drain_delay_seconds"]
        may_be_zero += ["stored_responses"]
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = 0 if entry.name in may_be_zero else 1 if isinstance(value, int) else 0.01
            if value is not None and value < least:
                raise ConfigError(f"limits.{entry.name} must be at least {least}, not {value}.")


@dataclass(frozen=True)
class ModelEntry(ModelSpec):
    """A served model."""

    name: str = ""  # of the model in requests; the target as given when empty
    profiles: Mapping[str, Any] = field(default_factory=dict)  # further named settings that a request may choose
    open_methods: bool = True  # whether requests may choose any method that fits, with options of their own

    @property
    def label(self) -> str:
        return self.name or self.target

    def check(self, complete: bool = True) -> Callable[[], VLM]:
        """Report every mistake that shows before weights are read, and return the function that loads the model.

        ``complete``: whether these have to be there.
        """
        from saccade.vlm import check

        for name, folder in self.adapters.items():
            if not (name and folder and isinstance(folder, str)):
                raise ConfigError(f"The adapter {name!r} must be a name with a folder, such as NAME=FOLDER.")
        for name, profile in self.profiles.items():
            where = f"profile {name}"
            if not isinstance(profile, Mapping) or not isinstance(profile.get("method"), str):
                raise ConfigError(f"The {where} must be a table with a method, such as method = 'chain'.")
            if name == "off" or name in methods.METHODS:
                raise ConfigError(
                    f"The {where} has the name of a method, which requests could not tell apart; rename it."
                )
            with _naming(f"{where}: "):
                methods.options(profile["method"], {k: v for k, v in profile.items() if k not in ("method", "head")})
        return check(self, complete)


@dataclass(frozen=True)
class ServerConfig:
    models: tuple[ModelEntry, ...]  # at least one; the first serves requests that name none
    host: Annotated[str, "Address to listen on, {default} by default: this machine alone."] = "127.0.0.1"
    port: Annotated[int, "{default} by default; 0 takes a free one."] = 8000
    api_key_file: Annotated[str | None, "API keys, one per line; SACCADE_API_KEYS has more."] = None
    allowed_hosts: tuple[str, ...] = ()  # values of the Host header that are served
    limits: Limits = Limits()  # see `Limits`
    media: MediaLimits = SERVER  # accepted places, formats and sizes of images and videos; paths are never read
    text_as_text: bool = True  # whether control tokens and placeholders in the text of requests are encoded as text
    share_prefixes: Annotated[bool, "API keys share cached prompts, so that one could learn of another's."] = False
    reuse_prefixes: Annotated[bool, "Of earlier requests; on."] = True  # whether anything of earlier requests is reused
    access_log: Annotated[bool, "A line per request on standard error."] = False
    vllm_metrics: bool = True  # whether `/metrics` has vLLM's names beside its own
    file: str = ""  # that it was read from, for messages; empty for one of the command line

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("No model is named; give --target, or [[models]] in the configuration.")
        twice = next((name for name in self.labels if self.labels.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"Two models are named {twice!r}; give one of them another name.")
        if self.media.paths:
            raise ConfigError("A server reads no paths for its clients; leave out media.paths.")
        for model in () if self.reuse_prefixes else self.models:
            settings = [model.options, *model.profiles.values()]
            if any("store" in each for each in settings):
                raise ConfigError(
                    f"The suffix store of the model {model.label} would keep nothing, because no request may use "
                    "another one's answer; leave out --suffix-store (option store), or --no-prefix-reuse "
                    "(reuse_prefixes = false)."
                )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"The port must be from 0 to 65535, not {self.port}.")

    @property
    def labels(self) -> list[str]:
        """Names by which requests choose a model, each followed by those of its adapters."""
        return [name for model in self.models for name in (model.label, *model.adapters)]

    def check(self, complete: bool = True) -> list[Callable[[], VLM]]:
        """Check every model as `ModelEntry.check` does, and return the functions that load them."""
        loaders = []
        for model in self.models:
            with _naming(f"{self.file}, model {model.label}: " if self.file else ""):
                loaders.append(model.check(complete))
        return loaders

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted names in the Host header, in small letters; empty for any."""
        names = self.allowed_hosts or (("localhost", "127.0.0.1", "::1", self.host) if self.is_loopback else ())
        return tuple(name.lower() for name in names)

    def keys(self) -> tuple[str, ...]:
        keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as problem:
                raise ConfigError(
                    f"Cannot read the API keys in {self.api_key_file}: {_reason(problem)}; give a text file with one "
                    "key per line."
                ) from problem
            listed = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not listed:
                raise ConfigError(f"The file {self.api_key_file} holds no API key; write one per line.")
            keys += listed
        return tuple(dict.fromkeys(key for key in keys if key))


def read_config(path: str | Path) -> ServerConfig:
    """Read a configuration: tables ``server``, ``limits``, ``media`` and ``models`` (one ``[[models]]`` per model)."""
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"Cannot read the configuration {where}: {_reason(problem)}; give a TOML file, or name a --target."
        ) from problem
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{where} is not valid TOML: {problem}.") from problem
    check_keys(table, ("server", "limits", "media", "models"), where, error=ConfigError)
    entries = table.get("models", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}: models must be tables, each under a line [[models]].")
    models = tuple(
        make(ModelEntry, entry, where, prefix=f"models[{number}].", error=ConfigError)
        for number, entry in enumerate(entries)
    )
    limits = make(Limits, _table(table, "limits", where), where, prefix="limits.", error=ConfigError)
    media = make(MediaLimits, _table(table, "media", where), where, prefix="media.", error=ConfigError)
    server = _table(table, "server", where)
    known = [entry.name for entry in fields(ServerConfig) if entry.name not in ("models", "limits", "media", "file")]
    check_keys(server, known, where, prefix="server.", error=ConfigError)
    values = {"models": models, "limits": limits, "media": media, "file": where, **server}
    return make(ServerConfig, values, where, prefix="server.", error=ConfigError)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Put the place of a mistake before the message of an error."""
    try:
        yield
    except SaccadeError as problem:
        raise ConfigError(f"{place}{problem}") from problem


def _reason(problem: OSError | UnicodeDecodeError) -> str:
    return (isinstance(problem, OSError) and problem.strerror) or "it is not UTF-8 text"


def _table(tables: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A table whose lists of names are tuples."""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} must be a table, not {table!r}.")
    table = dict(table)
    for key in _LISTS & table.keys():
        if not isinstance(table[key], list) or not all(isinstance(each, str) for each in table[key]):
            raise ConfigError(f"{where}: {name}.{key} must be a list of names, not {table[key]!r}.")
        table[key] = tuple(table[key])
    return table


def override(config: ServerConfig, values: Mapping[str, Any]) -> ServerConfig:
    """Return a configuration with other values of its fields and of its limits; those of other names are ignored."""
    server = {name: value for name, value in values.items() if name in ServerConfig.__dataclass_fields__}
    limits = {name: value for name, value in values.items() if name in Limits.__dataclass_fields__}
    return replace(config, **server, limits=replace(config.limits, **limits))


def plan(config: ServerConfig) -> str:
    """Describe a server in lines of text, without loading anything."""
    limits, keys = config.limits, config.keys()
    access = f"{len(keys)} API keys" if keys else "no API key: open to everyone who reaches it"
    memory = "half of the free memory" if limits.kv_memory_mib is None else f"{limits.kv_memory_mib} MiB"
    lines = [
        f"listen    http://{config.host}:{config.port}, {access}",
        f"rows      {limits.max_rows} per batch, {limits.batches} batches, {limits.max_queue} requests may wait",
        f"memory    keys and values {memory}, media cache {limits.media_cache_mib} MiB",
    ]
    for model in config.models:
        parts = {"target": model.target, "drafter": model.drafter, "heads": ", ".join(model.heads)}
        words = [f"{name} {value}" for name, value in parts.items() if value]
        words += [f"method {model.method or 'by default'}", *_settings(model.options)]
        lines.append(f"model     {model.label}: {', '.join(words)}")
        lines += [f"  adapter {name}: {folder}" for name, folder in model.adapters.items()]
        lines += [f"  profile {name}: {', '.join(_settings(each))}" for name, each in model.profiles.items()]
    return "\n".join(lines)


def _settings(table: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in table.items()]
