"""Configuration of a server: models with their profiles, limits, and where it listens."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade import methods
from saccade.engine.batch import PREFILL_CHUNK
from saccade.engine.chunks import LONGEST_STEP
from saccade.errors import SaccadeError
from saccade.inputs.media import SERVER, MediaLimits
from saccade.target.media_cache import MEDIA_BYTES
from saccade.typed import check_keys, make

if TYPE_CHECKING:
    from saccade.vlm import VLM

KEYS_VARIABLE = "SACCADE_API_KEYS"
"""Environment variable with API keys, separated by commas."""
MIB = 2**20


class ConfigError(SaccadeError):
    """A server's configuration cannot be used."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server; every one protects it against its clients.

    Attributes:
        max_rows: rows of one running batch.
        max_queue: requests that wait for a row; further ones get 503.
        batches: running batches, one per model and method, that exist at once.
        kv_memory_mib: keys and values of all batches together, in equal shares; None: half of the free memory.
        media_cache_mib: features of images and videos of all batches together.
        prefill_chunk: most prompt tokens per step.
        longest_step: length of a step with a part of a prompt, over one without: the gap in other answers. Greater
            ones read prompts sooner.
        default_max_tokens: of an answer whose request sets none.
        max_tokens: greatest ``max_tokens``; None: the model's context.
        max_choices: greatest ``n``, over all prompts of a request.
        max_body_mib: size of a request.
        max_option: greatest value of a drafting option (``gamma``, ``total``) in a request.
        requests_per_key: concurrent requests per API key, or per address without keys; 0: no limit.
        requests_per_minute: per API key or address; 0: no limit.
        connections: open connections.
        header_seconds: time for the head of a request.
        body_seconds: time for its body.
        send_seconds: time that one write to a client may take.
        stream_buffer: steps of an answer that wait for a slow reader; beyond them the answer is cancelled.
        stuck_seconds: length of a step from which on ``/health`` answers 503.
        drain_delay_seconds: time between a signal and the end of accepting requests, in which ``/ready`` answers 503.
        drain_seconds: time for running answers at shutdown.
        prepare_threads: threads that tokenize.
        media_workers: processes that decode and resize at once, each the images and videos of one request.
        media_seconds: time for that.
        media_memory_mib: memory that one of them may take for it.
    """

    max_rows: int = 8
    max_queue: int = 64
    batches: int = 2
    kv_memory_mib: int | None = None
    media_cache_mib: int = MEDIA_BYTES // MIB
    prefill_chunk: int = PREFILL_CHUNK
    longest_step: float = LONGEST_STEP
    default_max_tokens: int = 1024
    max_tokens: int | None = None
    max_choices: int = 8
    max_body_mib: int = 32
    max_option: int = 64
    requests_per_key: int = 0
    requests_per_minute: int = 0
    connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    stream_buffer: int = 1024
    stuck_seconds: float = 300.0
    drain_delay_seconds: float = 0.0
    drain_seconds: float = 60.0
    prepare_threads: int = 2
    media_workers: int = 4
    media_seconds: float = 120.0
    media_memory_mib: int = 3072

    def __post_init__(self) -> None:
        may_be_zero = ("max_queue", "requests_per_key", "requests_per_minute", "media_cache_mib", "drain_delay_seconds")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is None:
                continue
            least = 0 if entry.name in may_be_zero else 1 if isinstance(value, int) else 0.01
            if value < least:
                raise ConfigError(f"limits.{entry.name} must be at least {least}, not {value}.")


@dataclass(frozen=True)
class ModelEntry:
    """A served model.

    Attributes:
        target: checkpoint folder, hub id or ``pocket``.
        name: of the model in requests; the target as given when empty.
        drafter, heads, head, method, options, dtype, draft_dtype, device, threads, exact: as in `saccade.load`.
        profiles: further named settings that a request may choose: name -> ``method`` and its options.
        open_methods: whether requests may choose any method that fits, with options of their own.
    """

    target: str
    name: str = ""
    drafter: str | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    draft_dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    exact: bool = False
    profiles: Mapping[str, Any] = field(default_factory=dict)
    open_methods: bool = True

    @property
    def label(self) -> str:
        """Name in requests."""
        return self.name or self.target

    def check(self) -> Callable[[], VLM]:
        """Report every mistake that shows without weights, and return the function that loads the model.

        Raises:
            SaccadeError: as `saccade.load`, or a profile names an unknown method or option.
        """
        from saccade.vlm import check

        for name, profile in self.profiles.items():
            where = f"profile {name}"
            if not isinstance(profile, Mapping) or not isinstance(profile.get("method"), str):
                raise ConfigError(f"The {where} must be a table with a method, such as method = 'chain'.")
            if name == "off" or name in methods.METHODS:
                raise ConfigError(
                    f"The {where} has the name of a method, which requests could not tell apart; rename it."
                )
            with _naming(where):
                methods.options(profile["method"], {k: v for k, v in profile.items() if k not in ("method", "head")})
        return check(
            self.target,
            self.drafter,
            self.method,
            heads=dict(self.heads),
            head=self.head,
            dtype=self.dtype,
            draft_dtype=self.draft_dtype,
            device_map=self.device,
            threads=self.threads,
            exact=self.exact,
            **self.options,
        )


@dataclass(frozen=True)
class ServerConfig:
    """A server.

    Attributes:
        models: at least one; the first serves requests that name none.
        host, port: place to listen; port 0 takes a free one.
        api_key_file: file with one key per line; those of the environment variable are accepted beside them.
        allowed_hosts: values of the Host header that are served; empty: any, but only loopback names on a loopback
            address, so that no web site reaches the server through a name of its own.
        limits: see `Limits`.
        media: accepted places, formats and sizes of images and videos; paths are never read.
        text_as_text: whether control tokens and placeholders in the text of requests are encoded as text.
        share_prefixes: whether requests of different API keys reuse each other's prompts and media, which tells by
            time and ``cached_tokens`` what another key has sent; without keys all requests do.
        reuse_prefixes: whether requests reuse anything of earlier ones at all.
        access_log: whether standard error has a line per request: time, method, path, status, seconds, new tokens.
        vllm_metrics: whether ``/metrics`` has vLLM's names beside its own.
        file: that it was read from, for messages; empty for one of the command line.
    """

    models: tuple[ModelEntry, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    limits: Limits = Limits()
    media: MediaLimits = SERVER
    text_as_text: bool = True
    share_prefixes: bool = False
    reuse_prefixes: bool = True
    access_log: bool = False
    vllm_metrics: bool = True
    file: str = ""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("No model is named; give --target, or [[models]] in the configuration.")
        labels = [model.label for model in self.models]
        twice = next((name for name in labels if labels.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"Two models are named {twice!r}; give one of them another name.")
        if self.media.paths:
            raise ConfigError("A server reads no paths for its clients; leave out media.paths.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"The port must be from 0 to 65535, not {self.port}.")

    def check(self) -> list[Callable[[], VLM]]:
        """Check every model as `ModelEntry.check` does, and return the functions that load them.

        Raises:
            ConfigError: a model cannot be served; the message names it and the file.
            SaccadeError: likewise, of the one model of a command line.
        """
        loaders = []
        for model in self.models:
            with _naming(f"{self.file}, model {model.label}") if self.file else nullcontext():
                loaders.append(model.check())
        return loaders

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted names in the Host header, in small letters; empty for any."""
        found = self.allowed_hosts or (("localhost", "127.0.0.1", "::1", self.host) if self.is_loopback else ())
        return tuple(name.lower() for name in found)

    def keys(self) -> tuple[str, ...]:
        """Return the API keys of file and environment.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        found = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as problem:
                raise ConfigError(
                    f"Cannot read the API keys in {self.api_key_file}: {_reason(problem)}; give a text file with one "
                    "key per line."
                ) from problem
            own = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not own:
                raise ConfigError(f"The file {self.api_key_file} holds no API key; write one per line.")
            found += own
        return tuple(dict.fromkeys(key for key in found if key))


def read_config(path: str | Path) -> ServerConfig:
    """Read a configuration: tables ``server``, ``limits``, ``media`` and ``models`` (one ``[[models]]`` per model).

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or a value of the wrong type or out of range.
    """
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
    lists = _lists(_table(table, "media", where), ("domains", "formats", "containers", "codecs"), "media", where)
    media = make(MediaLimits, lists, where, prefix="media.", error=ConfigError)
    server = _lists(_table(table, "server", where), ("allowed_hosts",), "server", where)
    known = [entry.name for entry in fields(ServerConfig) if entry.name not in ("models", "limits", "media", "file")]
    check_keys(server, known, where, prefix="server.", error=ConfigError)
    values = {"models": models, "limits": limits, "media": media, "file": where, **server}
    return make(ServerConfig, values, where, prefix="server.", error=ConfigError)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Begin the message of an error with the place of the mistake."""
    try:
        yield
    except SaccadeError as problem:
        raise ConfigError(f"{place}: {problem}") from problem


def _reason(problem: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read."""
    return (isinstance(problem, OSError) and problem.strerror) or "it is not UTF-8 text"


def _lists(table: Mapping[str, Any], names: Sequence[str], prefix: str, where: str) -> dict[str, Any]:
    """A table whose lists of names are tuples."""
    found = dict(table)
    for name in names:
        given = found.get(name, [])
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise ConfigError(f"{where}: {prefix}.{name} must be a list of names, not {given!r}.")
        if name in found:
            found[name] = tuple(given)
    return found


def override(config: ServerConfig, server: Mapping[str, Any], limits: Mapping[str, Any]) -> ServerConfig:
    """Return a configuration with the values of the command line that are given (not None)."""
    of_server = {name: value for name, value in server.items() if value is not None}
    of_limits = {name: value for name, value in limits.items() if value is not None}
    return replace(config, **of_server, limits=replace(config.limits, **of_limits))


def plan(config: ServerConfig) -> str:
    """Describe a server in lines of text, without loading anything."""
    limits, keys = config.limits, config.keys()
    lines = [
        f"listen    http://{config.host}:{config.port}"
        + (f", {len(keys)} API keys" if keys else ", no API key: open to everyone who reaches it"),
        f"rows      {limits.max_rows} per batch, {limits.batches} batches, {limits.max_queue} requests may wait",
        f"memory    keys and values {_mib(limits.kv_memory_mib)}, media cache {limits.media_cache_mib} MiB",
    ]
    for model in config.models:
        parts = [f"target {model.target}"]
        parts += [f"drafter {model.drafter}"] * bool(model.drafter)
        parts += [f"heads {', '.join(model.heads)}"] * bool(model.heads)
        parts += [f"method {model.method or 'by default'}"]
        parts += [f"{name}={value}" for name, value in model.options.items()]
        lines.append(f"model     {model.label}: {', '.join(parts)}")
        lines += [f"  profile {name}: {_profile(profile)}" for name, profile in model.profiles.items()]
    return "\n".join(lines)


def _profile(profile: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in profile.items())


def _mib(value: int | None) -> str:
    return "half of the free memory" if value is None else f"{value} MiB"


def _table(table: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {name} must be a table, not {found!r}.")
    return found
