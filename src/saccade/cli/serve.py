"""`saccade serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.cli.option_groups import Placing, spread
from saccade.errors import InputError

_OPTIONS = {"options": "set", "heads": "head"}
"""Fields of a model that options of other names give."""
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@spread
def serve(
    *,
    target: args.Target = None,
    drafter: args.Drafter = None,
    method: args.MethodName = None,
    set_: args.Settings = None,
    head: args.Heads = None,
    placing: Placing,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model in requests; the target by default.", rich_help_panel="Models"),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with tables server, limits, media and models, for several models and profiles; options "
            "below override it.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on, 127.0.0.1 by default: this machine alone.", rich_help_panel="Server"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="8000 by default; 0 takes a free one.", rich_help_panel="Server")
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="API keys, one per line; SACCADE_API_KEYS has more, separated by commas. Without any, no key is "
            "required.",
            rich_help_panel="Server",
        ),
    ] = None,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="API keys share cached prompts and pictures; by default each has its own, or one could learn what "
            "another has sent.",
            rich_help_panel="Server",
        ),
    ] = False,
    no_prefix_reuse: Annotated[
        bool,
        typer.Option(
            "--no-prefix-reuse",
            help="Reuse nothing of earlier requests, as some benchmarks demand.",
            rich_help_panel="Server",
        ),
    ] = False,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log",
            help="A line per request on standard error: time, method, path, status, seconds, new tokens.",
            rich_help_panel="Server",
        ),
    ] = False,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Answers that run at once, 8 by default.", rich_help_panel="Server"),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(help="Requests that may wait, 64 by default; further ones get 503.", rich_help_panel="Server"),
    ] = None,
    kv_memory: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            help="Keys and values of target and draft model; by default half of the free memory.",
            rich_help_panel="Server",
        ),
    ] = None,
    ray: args.Ray = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Replicas on Ray: by default one per GPU, without GPUs one per machine.",
            rich_help_panel="Several machines",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Check everything, print what would be served, and load nothing.")
    ] = False,
) -> None:
    """Serve models to any OpenAI client, several answers at once, each the same as alone.

    Requests choose their method with the field `speculation` (`"off"`, or `{"method": "sage"}`), and are answered on
    `/v1/chat/completions` and `/v1/completions`. `/metrics` is for Prometheus, `/health` and `/ready` for supervisors.
    Ctrl-C or SIGTERM lets running answers finish; a second one ends at once. With `--ray`, SIGHUP reads the
    configuration again and replaces the replicas one after the other.

    Examples:

    `saccade serve -t pocket`

    `saccade serve -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct --api-key-file keys.txt --host 0.0.0.0`

    `saccade serve --config serve.toml --plan`

    `saccade serve --config serve.toml --ray=auto --replicas 4`
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise InputError(
            f"The server needs {', '.join(missing)}, which this environment lacks; run `pip install saccade[serve]`."
        )
    args.check_ray(ray, "--replicas", replicas)
    from saccade.serve.configuration import ModelEntry, ServerConfig, override, read_config
    from saccade.serve.configuration import plan as describe

    own: dict[str, Any] = {
        "name": name,
        "drafter": drafter,
        "method": method,
        "options": args.settings(set_),
        "heads": screen.heads_by_name(head or []),
        **asdict(placing),
        "exact": placing.exact or None,
    }
    if config is not None and target is not None:
        raise InputError("Both --config and --target name models; give one of them.")
    if config is not None and (given := [name for name, value in own.items() if value not in (None, {}, "auto")]):
        options = " and ".join("--" + _OPTIONS.get(each, each).replace("_", "-") for each in given)
        raise InputError(f"{options}: the models of {config} have their own; write it there, or name a --target.")
    if config is None and target is None:
        raise InputError("No model is named; give --target, such as --target pocket, or --config.")

    def read() -> ServerConfig:
        if target is not None:
            base = ServerConfig((ModelEntry(target, **{k: v for k, v in own.items() if v is not None}),))
        else:
            base = read_config(Path(str(config)))
        return override(
            base,
            {
                "host": host,
                "port": port,
                "api_key_file": api_key_file,
                "share_prefixes": share_prefixes or None,
                "reuse_prefixes": False if no_prefix_reuse else None,
                "access_log": access_log or None,
            },
            {"max_rows": max_rows, "max_queue": max_queue, "kv_memory_mib": kv_memory},
        )

    found = read()
    screen.quiet_libraries()
    if plan:
        found.check()
        print(describe(found))
        return
    if ray is not None:
        from saccade.ray_cluster import check_address, load_ray

        check_address(ray)
        load_ray(ray)
        from saccade.serve.replicas import serve_on_ray

        serve_on_ray(read, ray, replicas)
        return
    from saccade.serve import server

    server.serve(found)
