"""The command line."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from saccade.cli import batch, bench, chat, generate, methods, serve, train
from saccade.cli.option_groups import option, spread, with_local_ray
from saccade.errors import InputError, SaccadeError
from saccade.methods.settings import as_setting

if "OMP_WAIT_POLICY" not in os.environ:  # which the count would override
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # threads wait for the next product, then sleep
atexit.register(gc.freeze)  # for the last collection, two seconds with torch, there is nothing left
IMPORTED = "SACCADE_IMPORT"
app = typer.Typer(
    name="saccade",
    help="Speculative decoding for vision-language models: faster, with the same answers.",
    epilog="Start with `saccade demo`; it needs no download. `saccade COMMAND --help` explains each command.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (
    *(generate.demo, generate.generate, chat.chat, batch.batch, serve.serve, methods.methods),
    *(bench.bench, bench.datasets, bench.tune, bench.report, bench.compare, batch.distill, train.train),
    *(methods.inspect, methods.export, methods.predict, methods.premises, methods.doctor),
):
    app.command(command.__name__)(spread(command))


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = option(False, "Print the version and exit.", "--version"),
    imported: list[str] | None = option(
        None,
        "Python module of yours that adds heads, trees or rules (`saccade.methods.add_tree`); before the command.",
        "--import",
        metavar="MODULE",
        envvar=IMPORTED,
    ),
) -> None:
    if imported:
        os.environ[IMPORTED] = " ".join(imported)  # for processes that this one starts
        sys.path.insert(0, os.getcwd())
        for name in imported:
            try:
                import_module(name)
            except ImportError as problem:
                raise InputError(
                    f"--import {name}: {problem}; give a module's name, from the folder that holds it."
                ) from problem
    if version:
        from saccade import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `saccade`, and exit; see `execute`."""
    execute(app, "saccade", with_local_ray(sys.argv[1:] if arguments is None else arguments))


def execute(commands: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a command line, and exit.

    Exit codes: 0; 2 and one sentence on stderr for what the user got wrong; 130 after Ctrl-C; 1 when the reader
    of a pipe has gone.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the prompt's check says it in a sentence
    try:
        code = commands(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at its end
        code = 1
    except SaccadeError as problem:
        print(f"saccade: {problem}", file=sys.stderr)
        code = 2
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        context = getattr(problem, "ctx", None)  # of typer's errors: an unknown command, a missing option
        command, words = context.command_path if context else "saccade", problem.format_message().split()
        takes = {each.name for each in context.command.params} if context else set()
        option = str(getattr(problem, "option_name", ""))
        hint = as_setting(option, arguments or sys.argv[1:]) if {"method", "options"} <= takes else ""
        print(f"saccade: {' '.join(words).rstrip('.?')}{hint}; see `{command} --help`.", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
