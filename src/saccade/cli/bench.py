"""`saccade bench`, fair comparisons that anyone can rerun, and `saccade tune`, the fastest method as a profile."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.datasets import DataOptions, tasks_of
from saccade.cli.option_groups import PairOptions, group, option, spread
from saccade.errors import InputError, SaccadeError
from saccade.files import check_folder, is_profile
from saccade.profile import Profile
from saccade.wording import count, duration

if TYPE_CHECKING:
    from saccade.bench.metrics import MethodResult
    from saccade.bench.preparing import Prepared
    from saccade.bench.records import RecordedRun
    from saccade.bench.suites import Suite

_CLEAR = 1.02
"""Speed over plain decoding below which plain decoding is chosen."""


@group("Size")
class SizeOptions:
    """Sizes in place of the suite's own."""

    per_task: int | None = option(None, "Prompts of every task.")
    repeats: int | None = option(None, "Timed answers per prompt and method.")
    turns: int | None = option(None, "User turns per conversation.")
    max_new_tokens: int | None = option(None, "Longest answer.", "-n")
    seed: int | None = option(None, "Seed of pictures and sampling.")


@group("Scores")
class ScoreOptions:
    """Grading of answers."""

    scorer: str | None = option(
        None, "match, vqa, rouge-l, choice, yes-no, anls, relaxed, or your own MODULE:FUNCTION.", metavar="NAME"
    )
    judge: str | None = option(
        None, "Endpoint of a model that grades the answers once they are all there.", metavar="FILE.toml"
    )


@spread
def bench(
    *,
    suite: str | None = option(
        None, "A built-in suite, or a .toml file; without it, list the suites.", "-s", metavar="NAME"
    ),
    methods: str | None = option(
        None, "Only these labels or methods, also with options, such as `small=sage:total=25`.", metavar="A,B,C"
    ),
    tasks: str | None = option(
        None, "Only these tasks of the suite, of the pocket world, or of `saccade datasets`.", metavar="A,B,C"
    ),
    data: Path | None = option(None, "Prompts of your own: JSON lines of LLaVA, OpenAI or Spec-Bench.", metavar="FILE"),
    dataset: list[str] | None = option(
        None, "Questions of a name of `saccade datasets`, a hub id, a folder or file.", metavar="NAME"
    ),
    reading: DataOptions,
    scores: ScoreOptions,
    sizes: SizeOptions,
    out: Path | None = option(None, "Folder of the records, by default `runs/NAME`.", metavar="FOLDER"),
    plan: bool = option(False, "Show the planned run and its duration."),
    as_json: bool = option(False, "Print the results as one JSON object instead of tables.", "--json"),
    models: PairOptions,
) -> None:
    """Compare methods with plain decoding: same models, same prompts, methods in turn, every answer recorded.

    Stop at any time: every answer is on disk, and the same command resumes. Lossless methods are checked against
    plain decoding's tokens as they run; in float32 and in exact mode a difference ends the run with exit code 1.

    Examples:

    - `saccade bench --suite quick`
    - `saccade bench --suite quick --methods chain,prompt-lookup --repeats 3 --out runs/mine`
    - `saccade bench --suite heads -t pocket --head hivis=runs/hivis/best --head eagle2=runs/eagle2/best`
    - `saccade bench --suite quick --dataset textvqa@hivis --dataset mmmu -t Qwen/Qwen2.5-VL-7B-Instruct --plan`
    - `saccade bench --suite quick --data prompts.jsonl -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct`
    """
    if suite is None and any((data, dataset, methods, tasks, models.target, models.drafter, out, plan)):
        raise InputError("No suite is named; add --suite quick, or another that `saccade bench` lists.")
    if suite is None:
        from saccade.bench import suites

        for name in suites.NAMES:
            known = suites.load(name)
            screen.show(f"{name}  {known.mirrors or 'no paper'}", f"    {known.title}")
        screen.show("Run one with `saccade bench --suite NAME`; add --plan to see its plan.")
        return
    given = {name: size for name, size in asdict(sizes).items() if size is not None}
    chosen = choose_suite(suite, methods, tasks, data, given)
    if dataset and (data is not None or tasks is not None):
        raise InputError("--dataset replaces the suite's tasks; leave out --data and --tasks.")
    chosen = chosen.with_(tasks=tasks_of(chosen.tasks, dataset or [], reading, given, scores.scorer))
    if scores.judge:
        from saccade.bench.judge import from_file

        chosen = chosen.with_(judge=from_file(scores.judge))
    folder = out or Path("runs") / chosen.name
    prepared = _prepared(chosen, folder, models.or_pocket())
    if plan:
        _plan(prepared, folder)
    else:
        show(run_suite(prepared, folder), as_json)


def choose_suite(name: str, methods: str | None, tasks: str | None, data: Path | None, sizes: dict[str, Any]) -> Suite:
    from saccade.bench.suites import TaskEntry, choose_methods, choose_tasks, load

    suite = load(name).with_(**sizes)
    if "per_task" in sizes:  # given here, it replaces what the suite says of a task
        suite = suite.with_(tasks=tuple(replace(task, count=task.count and suite.per_task) for task in suite.tasks))
    if data is not None:
        if tasks is not None:
            raise InputError("--data replaces the suite's tasks; leave out --tasks.")
        suite = suite.with_(tasks=(TaskEntry(name=data.stem, file=str(data)),))
    for words, choose in ((methods, choose_methods), (tasks, choose_tasks)):
        if words is not None:
            suite = choose(suite, [name.strip() for name in words.split(",") if name.strip()])
    return suite


def _prepared(suite: Suite, folder: Path, models: PairOptions) -> Prepared:
    """Gather a suite's questions and load the models; what is wrong with questions or folder shows before."""
    from saccade.bench.preparing import prepare
    from saccade.bench.questions import gather

    check_folder(folder, InputError, "give another --out folder")
    with screen.waiting("Reading the prompts"):
        questions = gather(suite)
    places = {"command": shlex.join(["saccade", *sys.argv[1:]])}
    return prepare(suite, models.load(), (models.named(), models.drafter), places, questions)


def _plan(prepared: Prepared, folder: Path) -> None:
    from saccade.bench.cost import estimate
    from saccade.bench.runner import earlier_run

    suite, earlier = prepared.suite, earlier_run(folder, prepared)
    with screen.waiting("Timing one plain answer per task"):
        expected = estimate(prepared)
    lines = [f"Suite {suite.name}: {suite.title}", suite.mirrors and f"Mirrors {suite.mirrors}", suite.note]
    lines.append("Prompts: " + ", ".join(f"{task} {len(group)}" for task, group in prepared.questions.items()))
    for method in prepared.config()["methods"]:
        chosen = {**method["options"], **({"head": method["head"]} if method["head"] else {})}
        options = " ".join(f"{k}={v}" for k, v in chosen.items())
        lines.append(f"Method {method['label']}: {method['name']} {options}".rstrip())
    lines += [f"Missing: {reason}" for reason in prepared.missing]
    decoding = " ".join(f"{k}={v}" for k, v in suite.sampling.items()) or "greedy"
    lines.append(f"Decoding: {decoding}, at most {suite.max_new_tokens} new tokens; seed {suite.seed}")
    if suite.judge:
        lines.append(_judging(suite.judge, expected.answers, folder))
    done = f", {len(earlier.records)} of them finished" if earlier else ""
    traced = count(expected.traced, "more answer")
    lines.append(f"Records: {expected.answers} in {folder}{done}; {traced} for the report's trees")
    lines.append(f"Time: {duration(expected.seconds)} if every method were as slow as plain decoding")
    screen.show(*(line for line in lines if line))


def _judging(table: Mapping[str, Any], answers: int, folder: Path) -> str:
    """Return a sentence on what a judge will cost."""
    from saccade.bench.records import stored_scores

    there = len(stored_scores(folder))
    known = f"; {count(there, 'score')} of earlier attempts" if there else ""
    requests = f"at most {count(answers, 'request')}, one per distinct answer to a prompt"
    return f"Judge: {table['model']} at {table['url']}, {requests}{known}"


def run_suite(prepared: Prepared, folder: Path) -> RecordedRun:
    """Run a suite behind a bar, which is drawn between answers only, outside the timed sections."""
    from saccade.bench.grading import JUDGE
    from saccade.bench.records import SCORES, stored_scores
    from saccade.bench.runner import Mismatch, Runner

    if prepared.suite.judge:
        screen.note(_judging(prepared.suite.judge, prepared.answers, folder))
    stopped = f"Stopped. The answers so far are in {folder}; the same command resumes the run."
    try:
        with screen.progress("", stopped, live=False) as bar:
            run = Runner(prepared, folder, lambda each: bar(each.done, each.total, each.doing)).run()
    except Mismatch as problem:
        print(f"saccade: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None
    grades = [scores for (by, _, _), scores in stored_scores(folder).items() if by == JUDGE]
    if not all(grades):
        missing = f"{sum(not scores for scores in grades)} of {count(len(grades), 'grade')} are missing"
        screen.note(f"{missing}: the judge's replies, which are in {folder / SCORES}, hold no number of its range.")
    return run


def show(run: RecordedRun, as_json: bool) -> None:
    from saccade.bench.metrics import by_method, cautions, headline
    from saccade.bench.report.tables import remarks, terminal

    if as_json:
        results = {label: asdict(result) for label, result in by_method(run.records).items()}
        words = {"run": str(run.folder), "headline": headline(run), "cautions": list(cautions(run))}
        print(json.dumps({**words, "methods": results}))
        return
    if first := headline(run):
        screen.show(f"{first}\n")
    for part in terminal(run):
        screen.out().print(part, "")
    screen.show(*remarks(run))
    screen.show(f"The run is in {run.folder}; open it with `saccade report {run.folder}`.")


@spread
def tune(
    *,
    data: Path | None = option(
        None, "Prompts of your own as JSON lines; by default pictures of the pocket world.", metavar="FILE"
    ),
    per_task: int = option(4, "Prompts (of every task, without --data)."),
    max_new_tokens: int = option(128, "Longest answer.", "-n"),
    save: Path = option("saccade.toml", "Profile to write.", metavar="FILE"),
    out: Path = option("runs/tune", "Where the answers are kept.", metavar="FOLDER"),
    models: PairOptions,
) -> None:
    """Measure lossless methods and draft lengths on your machine and prompts, and write the fastest to a profile.

    Methods take turns on every prompt; the fastest by the median of the ratios to plain decoding wins. Stop at any
    time: the same command resumes. The profile is a target: `saccade generate -t saccade.toml ...`, `saccade serve`,
    `chat`, `bench`, and `saccade.load("saccade.toml")` read it.

    Examples:

    - `saccade tune -t pocket`
    - `saccade tune -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct --data prompts.jsonl --per-task 16`
    """
    models = models.or_pocket()
    if is_profile(models.named()):
        raise InputError(f"{models.target} is a profile of `saccade tune`; give the checkpoint that it names.")
    if save.suffix != ".toml":
        raise InputError(f"The profile {save} must end in .toml, by which it is recognised; give --save NAME.toml.")
    suite = choose_suite("tune", None, None, data, {"per_task": per_task, "max_new_tokens": max_new_tokens})
    prepared = _prepared(suite, out, models)
    run = run_suite(prepared, out)
    show(run, as_json=False)
    profile = choose(prepared, run, models)
    profile.write(save)
    chosen = " ".join(f"{key}={value}" for key, value in profile.options.items())
    screen.show(f"Fastest: {profile.method} {chosen}".rstrip() + f"; written to {save}.")


def choose(prepared: Prepared, run: RecordedRun, models: PairOptions) -> Profile:
    """Return the profile of the fastest method of a run of the suite ``tune``."""
    from saccade.bench.metrics import by_method
    from saccade.methods import needs, options

    results = {label: result for label, result in by_method(run.records).items() if result.lossless}
    if not results:
        raise SaccadeError("The run has no answers to choose by; give more prompts.")
    best = max(results, key=lambda label: _speed(results[label]))
    if _speed(results[best]) < _CLEAR:
        best = "plain"
    entry = next(method for method in prepared.config()["methods"] if method["label"] == best)
    settings = {method.label: method.options for method in prepared.suite.methods}[best]
    measured = {
        "speedup": round(_speed(results[best]), 3),
        "prompts": results[best].prompts,
        **{key: str(value) for key, value in run.header.environment.items()},
    }
    is_unused = needs(options(entry["name"], settings)) == "nothing"
    return Profile(
        models.named(),
        entry["name"],
        None if is_unused else models.drafter,
        screen.heads_by_name(models.head or []),
        entry["head"],
        dict(settings),
        measured,
        prepared.vlm.target.exact,
    )


def _speed(result: MethodResult) -> float:
    return 1.0 if result.speedup is None else result.speedup.value
