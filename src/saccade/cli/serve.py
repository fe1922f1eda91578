"""`saccade serve`: an OpenAI-compatible server."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from saccade.cli import screen
from saccade.cli.option_groups import ModelOptions, RayOptions, group, option, set_options
from saccade.errors import InputError
from saccade.model_spec import ModelSpec
from saccade.serve.configuration import Limits, ModelEntry, ServerConfig, override, read_config
from saccade.serve.configuration import plan as describe

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@group("Server", ServerConfig, Limits)
class ServerOptions(RayOptions):
    replicas: int | None = option(None, "Replicas on Ray; by default one per GPU, or per machine.", metavar="N")


def serve(
    *,
    config: str | None = option(None, "TOML file of server and models; other options override it.", metavar="FILE"),
    name: str | None = option(None, "Name of the model in requests; the target by default.", rich_help_panel="Models"),
    lora: list[str] = option([], "A LoRA of PEFT; may be repeated.", metavar="NAME=FOLDER", rich_help_panel="Models"),
    models: ModelOptions,
    chosen: ServerOptions,
    plan: bool = option(False, "Check all but weights, print what would be served, and load nothing."),
) -> None:
    """Serve models to any OpenAI client, several answers at once, each the same as alone.

    Answers: `/v1/chat/completions`, `/v1/completions`, `/v1/messages` (Anthropic's), `/v1/responses` (kept as
    `/v1/responses/{name}`, `/v1/responses/{name}/input_items`, `/v1/responses/{name}/cancel`). Counts and facts:
    `/v1/messages/count_tokens`, `/v1/responses/input_tokens`, `/tokenize`, `/detokenize`, `/v1/models`, `/version`.
    For supervisors: `/health`, `/ping`, `/ready`, `/metrics`. A page for browsers: `/`. Requests choose their method
    with the field `speculation` (`"off"`, or `{"method": "sage"}`). Ctrl-C or SIGTERM lets running answers finish; a
    second one ends at once. With `--ray`, SIGHUP reads the configuration again and replaces the replicas in turn.

    Examples:

    - `saccade serve -t pocket`
    - `saccade serve -t Qwen/Qwen2.5-VL-32B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct --api-key-file keys.txt`
    - `saccade serve --config serve.toml --plan`
    - `saccade serve --config serve.toml --ray=auto --replicas 4`
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise InputError(f"The server needs {', '.join(missing)}; run `pip install saccade[serve]`.")
    adapters = dict(text.partition("=")[::2] for text in lora)
    if len(adapters) < len(lora):
        raise InputError("Two adapters have the same name; give every --lora NAME=FOLDER another one.")
    if config is None and models.target is None:
        raise InputError("No model is named; give --target, such as --target pocket, or --config.")
    if config is not None and (name is not None or lora or models != ModelSpec(None)):
        raise InputError(f"--name and options of models are for a --target; the models of {config} have their own.")

    def read() -> ServerConfig:
        if config is not None:
            base = read_config(Path(config))
        else:
            base = ServerConfig((ModelEntry(**{**vars(models), "adapters": adapters}, name=name or ""),))
        return override(base, set_options(chosen))

    configuration = read()
    screen.quiet_libraries()
    if plan:
        configuration.check(complete=False)
        print(describe(configuration))
    elif chosen.ray is not None:
        from saccade.ray_cluster import check_address, load_ray

        check_address(chosen.ray)
        load_ray(chosen.ray)
        from saccade.serve.replicas import serve_on_ray

        serve_on_ray(read, chosen.ray, chosen.replicas)
    else:
        from saccade.serve import server

        server.serve(configuration)
