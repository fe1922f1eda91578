"""`saccade bench`: fair comparisons that anyone can rerun."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import completion, screen
from saccade.cli import data_options as of
from saccade.cli.option_groups import Placing, spread
from saccade.errors import InputError
from saccade.files import check_folder
from saccade.wording import count, duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from saccade.bench.preparing import Prepared
    from saccade.bench.questions import Gathered
    from saccade.bench.records import Run
    from saccade.bench.runner import Progress, Spent
    from saccade.bench.suites import Suite

_SIZES = "Size"


@spread
def bench(
    *,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            "-s",
            metavar="NAME",
            autocompletion=completion.suites,
            help="A built-in suite, or the path of a .toml or .yaml file; without it, list the built-in suites.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,C",
            autocompletion=completion.several_methods,
            help="Only these: the suite's own labels, or `saccade methods`, also with options and a label of yours, "
            "such as `small=sage:total=25`.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="A,B,C",
            autocompletion=completion.tasks,
            help="Only these: the suite's own, tasks of the pocket world, or names of `saccade datasets`.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Use your own prompts instead: JSON lines with LLaVA conversations, OpenAI messages, or questions "
            "with turns (Spec-Bench, MMSpec).",
        ),
    ] = None,
    dataset: of.Datasets = None,
    reading: of.DataOptions,
    scorer: Annotated[
        str | None,
        typer.Option(
            "--scorer",
            metavar="NAME",
            help="Score of the answers: match, vqa, rouge-l, choice, yes-no, anls, relaxed, or your own as "
            "MODULE:FUNCTION, called with answer, reference and row.",
            rich_help_panel="Scores",
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            metavar="FILE.toml",
            help="Let a model behind an OpenAI-compatible endpoint grade the answers once they are all there: url, "
            "model, key_env, template, low, high, pictures.",
            rich_help_panel="Scores",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="Folder of the records, `runs/NAME` by default. A run of the same configuration resumes; other "
            "content is an error.",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the planned run and its duration.")] = False,
    per_task: Annotated[int | None, typer.Option(help="Prompts of every task.", rich_help_panel=_SIZES)] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed answers per prompt and method.", rich_help_panel=_SIZES)
    ] = None,
    turns: Annotated[int | None, typer.Option(help="User turns per conversation.", rich_help_panel=_SIZES)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", help="Longest answer.", rich_help_panel=_SIZES)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of pictures and sampling.", rich_help_panel=_SIZES)] = None,
    target: args.Target = None,
    drafter: args.Drafter = None,
    head: args.Heads = None,
    placing: Placing,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object instead of tables.")
    ] = False,
) -> None:
    """Compare methods with plain decoding: same models, same prompts, methods in turn, every answer recorded.

    Stop at any time: every answer is on disk, and the same command resumes. Lossless methods are checked against
    plain decoding's tokens as they run; in float32 and in exact mode a difference ends the run with exit code 1.

    Examples:

    `saccade bench --suite quick`

    `saccade bench --suite quick --methods chain,prompt-lookup --repeats 3 --out runs/mine`

    `saccade bench --suite heads -t pocket --head hivis=runs/hivis/best --head eagle2=runs/eagle2/best`

    `saccade bench --suite quick --dataset textvqa@hivis --dataset mmmu -t Qwen/Qwen2.5-VL-7B-Instruct --plan`

    `saccade bench --suite quick --data prompts.jsonl -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct`
    """
    if suite is None:
        _list(data, dataset, methods, tasks, target, drafter, out, plan)
        return
    sizes = {
        "per_task": per_task,
        "repeats": repeats,
        "turns": turns,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    sizes = {name: size for name, size in sizes.items() if size is not None}
    reading = replace(reading, extra={"--scorer": scorer, "--judge": judge})
    chosen = choose_suite(suite, methods, tasks, data, sizes)
    if dataset and (data is not None or tasks is not None):
        raise InputError("--dataset replaces the suite's tasks; leave out --data and --tasks.")
    chosen = chosen.with_(tasks=of.tasks_of(chosen.tasks, dataset or [], reading, sizes))
    from saccade.bench.judge import from_file
    from saccade.bench.preparing import prepare

    chosen = chosen.with_(judge=from_file(judge)) if judge else chosen
    folder = out or Path("runs") / chosen.name
    gathered = gather(chosen, folder)
    name = target or "pocket"
    vlm = screen.load_models(
        name,
        drafter,
        None,
        heads=head or [],
        **placing.models(),
    )
    prepared = prepare(chosen, vlm, (name, drafter), {"command": command()}, gathered)
    if plan:
        _plan(prepared, folder)
    else:
        run, spent = run_suite(prepared, folder)
        show(run, spent, as_json)


def _list(*named: object) -> None:
    """Print the built-in suites, unless a run was asked for."""
    from saccade.bench import suites

    if any(named):
        raise InputError("No suite is named; add --suite quick, or another that `saccade bench` lists.")
    console = screen.out()
    for name in suites.NAMES:
        suite = suites.load(name)
        console.print(f"[bold]{name}[/bold]  {suite.mirrors or 'no paper'}", soft_wrap=True)
        console.print(f"    {suite.title}", markup=False, soft_wrap=True)
    console.print("Run one with `saccade bench --suite NAME`; add --plan to see its plan.", markup=False)


def choose_suite(name: str, methods: str | None, tasks: str | None, data: Path | None, sizes: dict[str, Any]) -> Suite:
    from saccade.bench.suites import TaskEntry, choose_methods, choose_tasks, load

    suite = load(name).with_(**sizes)
    if "per_task" in sizes:  # said here, it replaces what the suite says of a task
        suite = suite.with_(tasks=tuple(replace(task, count=task.count and suite.per_task) for task in suite.tasks))
    if data is not None:
        if tasks is not None:
            raise InputError("--data replaces the suite's tasks; leave out --tasks.")
        suite = suite.with_(tasks=(TaskEntry(name=data.stem, file=str(data)),))
    if methods is not None:
        suite = choose_methods(suite, _names(methods))
    if tasks is not None:
        suite = choose_tasks(suite, _names(tasks))
    return suite


def gather(suite: Suite, folder: Path) -> Gathered:
    """Gather a suite's questions; what is wrong with them, or with the folder, shows before models are loaded."""
    check_folder(folder, InputError, "give another --out folder")
    with screen.waiting("Reading the prompts"):
        from saccade.bench import questions

        return questions.gather(suite)


def command() -> str:
    """Return the command line of this process, which the report shows as the way to repeat a run."""
    return shlex.join(["saccade", *sys.argv[1:]])


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _plan(prepared: Prepared, folder: Path) -> None:
    from saccade.bench.cost import estimate
    from saccade.bench.records import stored_scores
    from saccade.bench.runner import earlier_run

    suite, earlier = prepared.suite, earlier_run(folder, prepared)
    with screen.waiting("Timing one plain answer per task"):
        expected = estimate(prepared)
    console = screen.out()

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(f"Suite {suite.name}: {suite.title}")
    for text in (suite.mirrors and f"Mirrors {suite.mirrors}", suite.note):
        if text:
            line(text)
    line("Prompts: " + ", ".join(f"{task} {len(group)}" for task, group in prepared.questions.items()))
    for method in prepared.config()["methods"]:
        chosen = {**method["options"], **({"head": method["head"]} if method["head"] else {})}
        options = " ".join(f"{k}={v}" for k, v in chosen.items())
        line(f"Method {method['label']}: {method['name']} {options}".rstrip())
    for reason in prepared.missing:
        line(f"Missing: {reason}")
    decoding = " ".join(f"{k}={v}" for k, v in suite.sampling.items()) or "greedy"
    line(f"Decoding: {decoding}, at most {suite.max_new_tokens} new tokens; seed {suite.seed}")
    done = f", {len(earlier.records)} of them finished" if earlier else ""
    traced = count(expected.traced, "more answer")
    if suite.judge:
        line(judging(suite.judge, expected.answers, len(stored_scores(folder))))
    line(f"Records: {expected.answers} in {folder}{done}; {traced} for the report's trees")
    line(f"Time: {duration(expected.seconds)} if every method were as slow as plain decoding")


def judging(table: Mapping[str, Any], answers: int, there: int) -> str:
    """Say what a judge will cost."""
    known = f"; {count(there, 'score')} of earlier attempts" if there else ""
    return (
        f"Judge: {table['model']} at {table['url']}, at most {count(answers, 'request')}, one per distinct answer to a "
        f"prompt{known}"
    )


def run_suite(prepared: Prepared, folder: Path) -> tuple[Run, Spent]:
    from saccade.bench.grading import JUDGE
    from saccade.bench.records import SCORES, stored_scores
    from saccade.bench.runner import Mismatch, Runner

    if prepared.suite.judge:
        screen.note(judging(prepared.suite.judge, prepared.answers, len(stored_scores(folder))))
    try:
        with _progress() as update:
            runner = Runner(prepared, folder, update)
            run = runner.run()
    except Mismatch as problem:
        print(f"saccade: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        screen.note(f"Stopped. The answers so far are in {folder}; the same command resumes the run.")
        raise
    grades = [scores for (by, _, _), scores in stored_scores(folder).items() if by == JUDGE]
    if not all(grades):
        without = sum(not scores for scores in grades)
        screen.note(
            f"{without} of {count(len(grades), 'grade')} are missing: the judge's replies, which are in "
            f"{folder / SCORES}, hold no number of its range."
        )
    return run, runner.spent


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Progress bar on stderr, drawn between answers only, outside the timed sections."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("")

        def update(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress.doing)
            bar.refresh()

        yield update


def show(run: Run, spent: Spent, as_json: bool) -> None:
    from saccade.bench.metrics import by_method, cautions, headline
    from saccade.bench.report.tables import remarks, terminal

    if as_json:
        results = {label: asdict(result) for label, result in by_method(run.records).items()}
        words = {"headline": headline(run), "cautions": list(cautions(run))}
        print(json.dumps({"run": str(run.folder), **words, "methods": results}))
        return
    console = screen.out()
    if first := headline(run):
        console.print(f"{first}\n", markup=False, soft_wrap=True)
    for part in terminal(run):
        console.print(part)
        console.print()
    for remark in remarks(run):
        console.print(remark, markup=False, soft_wrap=True)
    if spent.total:
        console.print(
            f"{duration(spent.total)}, of which {spent.harness:.1%} is overhead of the harness.",
            soft_wrap=True,
        )
    console.print(
        f"The run is in {run.folder}; open it with `saccade report {run.folder}`.",
        markup=False,
        soft_wrap=True,
    )
