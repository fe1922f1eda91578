"""The command line."""

from __future__ import annotations

import sys

import typer

from saccade.cli import chat, demo, doctor, generate, methods
from saccade.errors import SaccadeError

app = typer.Typer(
    name="saccade",
    help="Speculative decoding for vision-language models: several times faster, with the same answers.",
    epilog="Start with `saccade demo`; it needs no download. `saccade COMMAND --help` explains each command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("methods")(methods.methods)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from saccade import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line; what the user got wrong is one sentence on stderr and exit code 2."""
    try:
        app()
    except SaccadeError as problem:
        print(f"saccade: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
