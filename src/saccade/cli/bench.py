"""`saccade bench`, fair comparisons that anyone can rerun; `tune`, `report`, `compare` and `datasets` around it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.option_groups import PairOptions, group, method_names, option, set_options, split_pairs
from saccade.errors import InputError
from saccade.files import check_folder, is_profile, write_file
from saccade.model_spec import ModelSpec
from saccade.options import FrameOptions
from saccade.profile import write_profile
from saccade.wording import count, duration, listed, unknown_name

if TYPE_CHECKING:
    from saccade.bench.compare import Comparison
    from saccade.bench.preparing import Prepared
    from saccade.bench.records import RecordedRun
    from saccade.bench.suites import Suite, TaskEntry
    from saccade.data.catalogue import DataSet

_CLEAR = 1.02  # speed over plain decoding below which plain decoding is chosen


@group("Data sets")
class DataOptions(FrameOptions):
    subset: str | None = option(None, "Subset (configuration) of it.", metavar="NAME")
    split: str | None = option(None, "Split of it.", metavar="NAME")
    columns: list[str] | None = option(None, "Column of a part; `+` joins several.", metavar="PART=COLUMN")
    template: str | None = option(None, "Prompt with fields of a row, such as `<image> {question}`.", metavar="TEXT")
    system: str | None = option(None, "System message.", metavar="TEXT")
    where: list[str] | None = option(None, "Only rows with this value. May be repeated.", metavar="COLUMN=VALUE")
    shuffle: int | None = option(None, "Draw rows at random, which loads the whole split.", metavar="SEED")
    media_root: str | None = option(None, "Folder of the images and videos that rows name.", metavar="FOLDER")

    def changes(self) -> dict[str, Any]:
        """Fields of a `saccade.data.catalogue.DataSet` in place of its own, ``columns`` among them."""
        values = asdict(self)
        values["prompt"], values["media"] = values.pop("template"), values.pop("media_root")
        values["columns"] = split_pairs(self.columns, "--columns", "PART=COLUMN,")
        values["where"] = split_pairs(self.where, "--where", "COLUMN=VALUE,")
        return {name: value for name, value in values.items() if value not in (None, {})}

    def data(self, name: str) -> DataSet:
        """Return the data set of a name, with these changes."""
        from saccade.data import catalogue

        changes = self.changes()
        columns = changes.pop("columns", {})
        data = catalogue.find(name)
        data = data.without_frames() if {"num_frames", "fps"} & set(changes) else data
        return data.with_columns(columns).with_(**changes)


@group("Size")
class SizeOptions:
    per_task: int | None = option(None, "Prompts of every task.")
    repeats: int | None = option(None, "Timed answers per prompt and method.")
    turns: int | None = option(None, "User turns per conversation.")
    max_new_tokens: int | None = option(None, "Longest answer.", "-n")
    seed: int | None = option(None, "Seed of pictures and sampling.")


def _suites(incomplete: str) -> list[str]:
    from saccade.bench import suites

    return [name for name in suites.NAMES if name.startswith(incomplete)]


@group("Suite")
class SuiteOptions:
    suite: str | None = option(
        None, "Built-in suite or .toml file; without it, list them.", "-s", autocompletion=_suites
    )
    methods: str | None = option(
        None, "Only these labels or methods, such as `sage:total=25`.", metavar="A,B,C", autocompletion=method_names
    )
    tasks: str | None = option(None, "Only these tasks of the suite or the pocket world.", metavar="A,B,C")
    data: Path | None = option(None, "Prompts of your own: JSON lines of LLaVA, OpenAI or Spec-Bench.", metavar="FILE")
    dataset: list[str] | None = option(None, "A name of `saccade datasets`, hub id, folder or file.", metavar="NAME")
    scorer: str | None = option(None, "match, vqa, rouge-l, choice, yes-no, anls, relaxed, or MODULE:FUNCTION.")
    judge: str | None = option(None, "Endpoint of a model that grades the answers at the end.", metavar="FILE.toml")

    def chosen(self, sizes: SizeOptions, reading: DataOptions) -> Suite:
        """Return the suite; what is wrong with it shows before models are loaded."""
        from saccade.bench import judge, scorers
        from saccade.bench.suites import TaskEntry, choose_methods, choose_tasks, load

        suite = load(str(self.suite)).with_(**set_options(sizes))
        datasets = self.dataset or []
        if sum((self.data is not None, self.tasks is not None, bool(datasets))) > 1:
            raise InputError("--data, --dataset and --tasks each replace the suite's tasks; give one of them.")
        if len(set(datasets)) < len(datasets):
            raise InputError("A data set is named twice; name each once.")
        for words, choose in ((self.methods, choose_methods), (self.tasks, choose_tasks)):
            if words is not None:
                suite = choose(suite, [word.strip() for word in words.split(",") if word.strip()])
        entries = list(suite.tasks)
        if datasets:
            names = [Path(name).stem if Path(name).expanduser().exists() else Path(name).name for name in datasets]
            entries = [TaskEntry(name=name, dataset=each) for name, each in zip(names, datasets, strict=True)]
        if self.data is not None:
            entries = [TaskEntry(name=self.data.stem, file=str(self.data))]
        changes = reading.changes()
        if self.scorer is not None:
            scorers.check(self.scorer)
            changes["scorer"] = self.scorer
        if changes and all(entry.task is not None for entry in entries):
            raise InputError("Options of data sets and scorers need --dataset or --data; name one.")
        if self.judge:
            suite = suite.with_(judge=judge.from_file(self.judge))
        return suite.with_(tasks=tuple(_changed(entry, changes, sizes, reading) for entry in entries))


def _changed(entry: TaskEntry, changes: Mapping[str, Any], sizes: SizeOptions, reading: DataOptions) -> TaskEntry:
    sized: dict[str, Any] = {"count": sizes.per_task, "max_new_tokens": sizes.max_new_tokens, "turns": sizes.turns}
    if entry.task is not None:
        changes, sized["turns"] = {}, None
    elif entry.dataset is not None:
        reading.data(entry.dataset)
    elif odd := sorted({"columns", "prompt", "where", "shuffle", "subset", "split"} & set(changes)):
        raise InputError(
            f"--{odd[0].replace('prompt', 'template')} is for --dataset; the prompts of --data are complete."
        )
    return replace(entry, **changes, **{name: size for name, size in sized.items() if size is not None})


def bench(
    *,
    chosen: SuiteOptions,
    reading: DataOptions,
    sizes: SizeOptions,
    out: Path | None = option(None, "Folder of the records, by default `runs/NAME`.", metavar="FOLDER"),
    plan: bool = option(False, "Show the planned run and its duration."),
    as_json: bool = option(False, "Print the results as one JSON object instead of tables.", "--json"),
    models: PairOptions,
) -> None:
    """Compare methods with plain decoding: same models, same prompts, methods in turn, every answer recorded.

    Every answer is on disk: the same command resumes, a larger --per-task adds prompts. Lossless methods are checked
    against plain decoding as they run; in float32 and in exact mode a differing token ends the run with exit code 1.

    Examples:

    - `saccade bench --suite quick`
    - `saccade bench --suite quick --methods chain,prompt-lookup --repeats 3 --out runs/mine`
    - `saccade bench --suite heads -t pocket --head hivis=runs/hivis/best --head eagle2=runs/eagle2/best`
    - `saccade bench --suite quick --dataset textvqa@hivis --dataset mmmu -t Qwen/Qwen2.5-VL-7B-Instruct --plan`
    - `saccade bench --suite quick --data prompts.jsonl -t Qwen/Qwen2.5-VL-32B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct`
    """
    if chosen.suite is None:
        if chosen != SuiteOptions() or models.target or models.drafter or out or plan:
            raise InputError("No suite is named; add --suite quick, or another that `saccade bench` lists.")
        from saccade.bench import suites

        for name in suites.NAMES:
            known = suites.load(name)
            screen.show(f"{name}  {known.mirrors or 'no paper'}", f"    {known.title}")
        return
    suite = chosen.chosen(sizes, reading)
    folder = out or Path("runs") / suite.name
    prepared = _prepared(suite, folder, replace(models, target=models.target or "pocket"))
    if plan:
        _plan(prepared, folder)
    else:
        show(run_suite(prepared, folder), as_json)


def _prepared(suite: Suite, folder: Path, models: ModelSpec) -> Prepared:
    """Gather a suite's questions and load the models; what is wrong with questions or folder shows before."""
    from saccade.bench.preparing import prepare
    from saccade.bench.questions import gather

    check_folder(folder, InputError, "give another --out folder")
    with screen.waiting("Reading the prompts"):
        questions = gather(suite)
    command = shlex.join(["saccade", *sys.argv[1:]])
    return prepare(suite, screen.load_models(models), models, {"command": command}, questions)


def _plan(prepared: Prepared, folder: Path) -> None:
    from saccade.bench.cost import estimate
    from saccade.bench.runner import earlier_run

    suite, earlier = prepared.suite, earlier_run(folder, prepared)
    with screen.waiting("Timing one plain answer per task"):
        expected = estimate(prepared)
    lines = [f"Suite {suite.name}: {suite.title}", suite.mirrors and f"Mirrors {suite.mirrors}", suite.note]
    lines.append("Prompts: " + ", ".join(f"{task} {len(group)}" for task, group in prepared.questions.items()))
    for label, vlm in prepared.methods.items():
        head = f"head {vlm.head_name} " if vlm.head_name else ""
        lines.append(f"Method {label}: {vlm.method} {head}{_pairs(vlm.options)}".rstrip())
    lines += [f"Missing: {reason}" for reason in prepared.missing]
    lines.append(
        f"Decoding: {_pairs(suite.sampling) or 'greedy'}, at most {suite.max_new_tokens} new tokens; seed {suite.seed}"
    )
    if suite.judge:
        requests = f"at most {count(expected.answers, 'request')}, one per distinct answer to a prompt"
        lines.append(f"Judge: {suite.judge['model']} at {suite.judge['url']}, {requests}")
    done = f", {len(earlier.records)} of them finished" if earlier else ""
    traced = count(expected.traced, "more answer")
    lines.append(f"Records: {expected.answers} in {folder}{done}; {traced} for the report's trees")
    lines.append(f"Time: {duration(expected.seconds)} if every method were as slow as plain decoding")
    screen.show(*filter(None, lines))


def _pairs(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def run_suite(prepared: Prepared, folder: Path) -> RecordedRun:
    """Run a suite after a bar, which is drawn between answers only, outside the timed sections."""
    from saccade.bench.grading import JUDGE
    from saccade.bench.records import SCORES, stored_scores
    from saccade.bench.runner import Mismatch, Runner

    try:
        with screen.progress("", folder, live=False) as bar:
            run = Runner(prepared, folder, lambda each: bar(each.done, each.total, each.doing)).run()
    except Mismatch as problem:
        screen.warn(str(problem))
        raise typer.Exit(1) from None
    grades = [scores for (by, _, _), scores in stored_scores(folder).items() if by == JUDGE]
    if not all(grades):
        missing = f"{sum(not scores for scores in grades)} of {count(len(grades), 'grade')} are missing"
        screen.note(f"{missing}: the judge's replies, which are in {folder / SCORES}, hold no number of its range.")
    return run


def show(run: RecordedRun, as_json: bool) -> None:
    from saccade.bench.compare import cautions, headline
    from saccade.bench.metrics import by_method
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


def tune(
    *,
    data: Path | None = option(None, "Prompts of your own; by default pictures of the pocket world.", metavar="FILE"),
    save: Path = option("saccade.toml", "Profile to write.", metavar="FILE"),
    out: Path = option("runs/tune", "Where the answers are kept.", metavar="FOLDER"),
    sizes: SizeOptions,
    models: PairOptions,
) -> None:
    """Measure lossless methods and draft lengths on your machine and prompts, and write the fastest to a profile.

    Methods take turns on every prompt; the fastest by the median of the ratios to plain decoding is written, and
    `tune` says which others these prompts cannot tell from it. Stop at any time: the same command resumes. The profile
    is a target: `saccade generate -t saccade.toml ...`, `saccade serve`, `chat`, `bench`, and
    `saccade.load("saccade.toml")` read it.

    Examples:

    - `saccade tune -t pocket`
    - `saccade tune -t Qwen/Qwen2.5-VL-32B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct --data prompts.jsonl --per-task 16`
    """
    models = replace(models, target=models.target or "pocket")
    if is_profile(models.target):
        raise InputError(f"{models.target} is a profile of `saccade tune`; give the checkpoint that it names.")
    if save.suffix != ".toml":
        raise InputError(f"The profile {save} must end in .toml, by which it is recognised; give --save NAME.toml.")
    check_folder(save.parent, InputError, "give another --save file")
    suite = SuiteOptions(suite="tune", data=data).chosen(sizes, DataOptions())
    prepared = _prepared(suite, out, models)
    run = run_suite(prepared, out)
    show(run, as_json=False)
    models, measured = choose(prepared, run, models)
    write_profile(save, models, measured)
    chosen, level = f"{models.method} {_pairs(models.options)}".rstrip(), measured.get("level_with")
    if level:
        screen.show(f"Fastest by its median: {chosen}; level with it by these prompts: {level}.")
        screen.show(f"It is written to {save}; more prompts (--per-task) may decide.")
    else:
        screen.show(f"Fastest: {chosen}; written to {save}.")


def choose(prepared: Prepared, run: RecordedRun, models: ModelSpec) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the fastest method of a run of the suite ``tune``, and what was measured: those level with it among it."""
    from saccade.bench.compare import compare_methods
    from saccade.bench.metrics import by_method
    from saccade.methods import needs

    results = {label: result for label, result in by_method(run.records).items() if result.lossless}
    speeds = {label: result.speedup.value if result.speedup else 1.0 for label, result in results.items()}
    best = max(speeds, key=speeds.__getitem__)
    best = "plain" if speeds[best] < _CLEAR else best
    vlm = prepared.methods[best]
    undecided = [label for label in compare_methods(run, best).undecided if label in results]
    measured: dict[str, Any] = {"speedup": round(speeds[best], 3), "prompts": results[best].prompts}
    measured |= {"level_with": listed(undecided)} if undecided else {}
    measured |= {key: str(value) for key, value in run.header.environment.items()}
    drafter = None if needs(vlm.options) == "nothing" else models.drafter
    options = next(dict(method.options) for method in prepared.suite.methods if method.label == best)
    models = replace(models, drafter=drafter, method=vlm.method, head=vlm.head_name, options=options)
    return replace(models, exact=vlm.target.exact), measured


def report(
    runs: list[Path] = typer.Argument(metavar="RUN...", help="Folders made by `saccade bench`."),
    out: Path | None = option(None, "The page; by default `report.html` in the first folder.", "-o", metavar="FILE"),
    markdown: Path | None = option(None, "The tables; beside the page by default, ending in .md.", metavar="FILE"),
    prompts: int = option(4, "Most prompts per run in the token view.", min=0),
) -> None:
    """Write one self-contained HTML page (no network), and beside it its tables as Markdown, CSV and LaTeX.

    The page shows comparison tables with intervals, speed-ups as bars, speed against quality where some are lossy,
    acceptance by depth, time per stage, and the answers token by token with the draft trees of every step. Needs the
    `report` extra.

    Example: `saccade report runs/quick`
    """
    from saccade.bench.records import read
    from saccade.bench.report.page import render
    from saccade.bench.report.tables import comma_separated, contents, document, latex

    out = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    if out.suffix in (".md", ".csv", ".tex"):
        raise InputError(f"{out} is the name of the page's tables; give --out a name that ends in .html.")
    for path in filter(None, (out, markdown)):
        check_folder(path.parent, InputError, "choose another file")
    with screen.waiting("Drawing"):
        content = contents([read(folder) for folder in runs])
        texts = {out: render(content, prompts), markdown or out.with_suffix(".md"): document(content)}
        texts |= {out.with_suffix(".csv"): comma_separated(content), out.with_suffix(".tex"): latex(content)}
    for run in content:
        screen.warn(*run.run.problems)
    for path, text in texts.items():
        write_file(path, text, advice="choose another file with --out")
        print(path)


def compare(
    a: Path = typer.Argument(metavar="A", help="Folder made by `saccade bench`: before."),
    b: Path | None = typer.Argument(None, metavar="B", help="Another one: after; without it, A's methods."),
    against: str | None = option(None, "Method that A's others are compared with.", metavar="METHOD"),
    absolute: bool = option(False, "Judge seconds instead of seconds relative to plain decoding."),
    level: float = option(0.95, "Confidence of all verdicts together.", min=0.5, max=0.9999),
    margin: float = option(0.02, "Share of time below which a difference does not count.", min=0, max=0.9999),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
    fail_if_slower: bool = option(False, "Exit with code 1 when a method became slower."),
) -> None:
    """Show what changed from run A to run B, or how A's methods differ, and whether it exceeds the noise.

    A method is faster or slower when the whole interval of its time ratio (B over A) lies beyond the margin; the
    intervals are corrected for the number of methods. Prompts in both runs are compared with themselves.

    Without B, the methods of run A are compared with its fastest lossless one, or with the one of `--against`, prompt
    by prompt; those that the prompts cannot tell from it are level with it.

    Examples:

    - `saccade compare runs/quick`
    - `saccade compare runs/before runs/after --fail-if-slower`
    """
    from saccade.bench.compare import compare as compare_runs
    from saccade.bench.records import read

    if b is None:
        if absolute or fail_if_slower:
            raise InputError("--absolute and --fail-if-slower are for two runs; name another one after the first.")
        _compare_methods(a, against, level, margin, as_json)
        return
    if against is not None:
        raise InputError("--against is for the methods of one run; two runs are compared method by method.")
    before, after = read(a), read(b)
    screen.warn(*before.problems, *after.problems)
    changes = compare_runs(before, after, relative=not absolute, level=level, margin=margin)
    if not changes.changes:
        raise InputError(f"The runs in {a} and {b} have no method in common; there is nothing to compare.")
    if as_json:
        print(json.dumps({"a": str(a), "b": str(b), **asdict(changes), "slower": changes.slower}))
    else:
        columns = ["method", "verdict", "seconds B/A", "relative to plain", "other tokens", "accepted in A, B", "score"]
        rows = []
        for each in changes.changes:
            ratios = [each.time or "-", each.relative or "-", f"{each.answers - each.equal} of {each.answers}"]
            rows.append([each.method, each.verdict, *ratios, _pair(each.accepted_length), _pair(each.score)])
        screen.table(columns, rows)
        screen.show(*_remarks(changes))
    if fail_if_slower and changes.slower:
        raise typer.Exit(1)


def _compare_methods(folder: Path, against: str | None, level: float, margin: float, as_json: bool) -> None:
    """Show how the methods of one run differ."""
    from saccade.bench.compare import compare_methods
    from saccade.bench.records import read

    run = read(folder)
    screen.warn(*run.problems)
    lossless = {record.method: record.lossless for record in run.records}
    if len(lossless) < 2:
        raise InputError(f"The run in {folder} has fewer than two methods; there is nothing to compare.")
    if against not in (None, *lossless):
        raise InputError(f"The run in {folder} has no method {unknown_name(against, lossless)}.")
    compared = compare_methods(run, against, level=level, margin=margin)
    yardstick = next(each for each in compared.changes if each.verdict == "yardstick")
    name, undecided = yardstick.method, compared.undecided
    if as_json:
        words = {"run": str(folder), "against": name, "slower": compared.slower, "undecided": undecided}
        print(json.dumps({**asdict(compared), **words}))
        return
    rows = []
    for each in compared.changes:
        shown = each.method if lossless[each.method] else f"{each.method} (lossy)"
        verdict = f"level with {name}" if each.verdict == "no difference" else each.verdict
        tokens = f"{each.answers - each.equal} of {each.answers}"
        pairs = [f"{pair[1]:.3f}" if pair else "-" for pair in (each.accepted_length, each.score)]
        rows.append([shown, verdict, each.relative or "-", tokens, *pairs])
    screen.table(["method", "verdict", f"seconds/{name}'s", "other tokens", "accepted", "score"], rows)
    if undecided:
        screen.show(f"{name} is level with {listed(undecided)}, as far as these prompts tell.")
    measure = f"time per token over that of {name}, same prompt and repeat"
    confidence = "" if against else f"the fastest method is among those not slower with {level:.0%} confidence"
    screen.show(*_remarks(compared, measure, confidence))


def _remarks(comparison: Comparison, measure: str = "", confidence: str = "") -> Iterator[str]:
    """Yield the sentences below the table."""
    changes = comparison.changes
    for number in sorted({change.prompts for change in changes}):
        yield f"{count(number, 'prompt')}, each compared with itself."
    of_runs = "time per token relative to plain decoding of the same run" if comparison.relative else "time per token"
    confidence = confidence or f"all verdicts hold together with {comparison.level:.0%} confidence"
    yield f"Judged by {measure or of_runs}; {confidence}; differences below {comparison.margin:.0%} do not count."
    if any(change.verdict == "too few prompts" for change in changes):
        yield f"Verdicts on so many methods need {comparison.fewest} prompts; run more prompts, or fewer methods."
    plain = next((change.time for change in changes if change.verdict == "yardstick"), None)
    if not measure and plain is not None and abs(plain.value - 1) > comparison.margin:
        yield f"Plain decoding took {plain.value:.2f} times as long in B; --absolute judges seconds."
    for run, methods in comparison.only.items():
        if methods:
            yield f"Only in {run}: {', '.join(methods)}."
    for name, before, after in comparison.settings:
        yield f"Differs: {name}: {before} in A, {after} in B."


def _pair(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:.3f}, {values[1]:.3f}"


def datasets(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Show how its rows become questions."),
    write: Path | None = option(None, "Load its questions, and write `FOLDER/prompts.jsonl`.", metavar="FOLDER"),
    limit: int | None = option(None, "Write only the first so many questions."),
    *,
    reading: DataOptions,
) -> None:
    """List data sets that are known by name, and the papers that use them; nothing is downloaded without `--write`.

    `NAME@PAPER` is a data set with what that paper says of its own use: prompt, number of questions, frames, longest
    answer.

    Examples:

    - `saccade datasets textvqa@hivis`
    - `saccade datasets textvqa --split train --limit 5000 --write textvqa`
    """
    from saccade.data import catalogue

    if name is None and (write is not None or reading.changes()):
        raise InputError("No data set is named; give one, such as `saccade datasets textvqa`.")
    if name is None:
        for known in catalogue.names():
            data = catalogue.find(known)
            papers = ", ".join(f"{catalogue.PAPERS[word]} (@{word})" for word in data.papers) or "no paper"
            screen.show(f"{known}  {papers}: {data.title}")
        return
    data = reading.data(name)
    if write is not None:
        from saccade.data import reading as rows

        check_folder(write, InputError, "give another folder")
        with screen.waiting(f"Reading {data.path}"):
            written = rows.write(data, write, limit)
        screen.show(f"{count(written, 'question')} in {write / rows.FILE}.")
        return
    screen.show(f"{name}: {data.title or 'no ready mapping'}")
    for field, value in asdict(data).items():
        if field not in ("name", "title", "papers", "source") and value not in (None, "", (), {}):
            screen.show(f"  {field}: {' + '.join(value) if isinstance(value, tuple) else value}")
    if data.source:
        screen.show(f"  source: columns are as read by {data.source}; not compared with the hub")
    for paper, uses in data.papers.items():
        changes = screen.worded({**catalogue.changes_of(data, paper), "note": uses.get("note", "none")})
        screen.show(f"{data.name}@{paper} ({catalogue.PAPERS[paper]}): {changes}")
