"""`saccade tune`: the fastest lossless method on this machine, for these models and prompts, written to a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import arguments as args
from saccade.cli import bench, screen
from saccade.cli.option_groups import Placing, spread
from saccade.errors import InputError, SaccadeError
from saccade.profile import Profile, is_profile

if TYPE_CHECKING:
    from saccade.bench.metrics import MethodResult
    from saccade.bench.preparing import Prepared
    from saccade.bench.records import Run

_CLEAR = 1.02
"""Speed over plain decoding below which plain decoding is chosen."""


@spread
def tune(
    *,
    target: args.Target = "pocket",
    drafter: args.Drafter = None,
    head: args.Heads = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prompts of your own as JSON lines; by default pictures of the pocket world."
        ),
    ] = None,
    per_task: Annotated[int, typer.Option(help="Prompts (of every task, without --data).")] = 4,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer.")] = 128,
    save: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write.")] = Path("saccade.toml"),
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the answers are kept.")] = Path("runs/tune"),
    placing: Placing,
) -> None:
    """Measure lossless methods and draft lengths on your machine and prompts, and write the fastest to a profile.

    Methods take turns on every prompt; the fastest by the median of the ratios to plain decoding wins. Stop at any
    time: the same command resumes. The profile is a target: `saccade generate -t saccade.toml ...`, `saccade serve`,
    `chat`, `bench`, and `saccade.load("saccade.toml")` read it.

    Examples:

    `saccade tune -t pocket`

    `saccade tune -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct --data prompts.jsonl --per-task 16`
    """
    name = target or "pocket"
    if is_profile(name):
        raise InputError(f"{name} is a profile, the outcome of `saccade tune`; give the checkpoint that it names.")
    if save.suffix != ".toml":
        raise InputError(f"The profile {save} must end in .toml, by which it is recognised; give --save NAME.toml.")
    sizes = {"per_task": per_task, "max_new_tokens": max_new_tokens}
    suite = bench.choose_suite("tune", None, None, data, sizes)
    from saccade.bench.preparing import prepare

    gathered = bench.gather(suite, out)
    vlm = screen.load_models(name, drafter, None, heads=head or [], **placing.models())
    found = bench.places("tune", data, name, drafter, head, placing.device)
    prepared = prepare(suite, vlm, (name, drafter), found, gathered)
    run, spent = bench.run_suite(prepared, out)
    bench.show(run, spent, as_json=False)
    profile = choose(prepared, run, name, drafter, head or [])
    profile.write(save)
    chosen = " ".join(f"{key}={value}" for key, value in profile.options.items())
    screen.out().print(f"Fastest: {profile.method} {chosen}".rstrip() + f"; written to {save}.", markup=False)


def choose(prepared: Prepared, run: Run, target: str, drafter: str | None, heads: list[str]) -> Profile:
    """Return the profile of the fastest method of a run of the suite ``tune``."""
    from saccade.bench.metrics import by_method
    from saccade.methods import needs, options

    results = {label: found for label, found in by_method(run.records).items() if found.lossless}
    if not results:
        raise SaccadeError("The run has no answers to choose by; give more prompts.")
    best = max(results, key=lambda label: _speed(results[label]))
    if _speed(results[best]) < _CLEAR:
        best = "plain"
    entry = next(method for method in prepared.config()["methods"] if method["label"] == best)
    given = {method.label: method.options for method in prepared.suite.methods}[best]
    measured = {
        "speedup": round(_speed(results[best]), 3),
        "prompts": results[best].prompts,
        **{key: str(value) for key, value in run.header.environment.items()},
    }
    named: dict[str, str] = {}
    for text in heads:
        name, _, folder = text.rpartition("=")
        named[name or Path(folder).name] = folder
    unused = needs(options(entry["name"], given)) == "nothing"
    return Profile(
        target,
        entry["name"],
        None if unused else drafter,
        named,
        entry["head"],
        dict(given),
        measured,
        prepared.vlm.target.exact,
    )


def _speed(result: MethodResult) -> float:
    return 1.0 if result.speedup is None else result.speedup.value
