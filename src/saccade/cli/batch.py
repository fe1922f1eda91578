"""`saccade batch`, an answer to every item, and `saccade distill`, the target's answers as training data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from saccade.cli import screen
from saccade.cli.option_groups import (
    ActorOptions,
    DecodingOptions,
    ModelOptions,
    ReadingOptions,
    group,
    named,
    option,
    place_of,
    set_options,
)
from saccade.errors import InputError, MethodError
from saccade.files import is_profile
from saccade.wording import count, duration

if TYPE_CHECKING:
    from saccade.distill.run import Preview
    from saccade.jobs.job import Survey
    from saccade.resumable import Report


@group("Items")
class ItemOptions:
    prompt: str | None = option(None, "Question for every item; `{name}`, `{stem}`, `{FIELD}` are filled in.", "-p")
    system: str | None = option(None, "System message of items without one.")
    images_per_row: int = option(1, "Neighbouring pictures of a folder that share a question.", metavar="N")
    media_root: Path | None = option(None, "Folder of the media; by default that of their file.", metavar="FOLDER")
    shard: str | None = option(None, "Part I of N, chosen by the items' ids, from 1.", metavar="I/N")
    limit: int | None = option(None, "Only the first so many items; later without it, the rest.")


@group("Run")
class AttemptOptions:
    retry_failed: bool = option(False, "Try items again that failed in earlier attempts.")
    max_failures: int | None = option(None, "Stop after so many failed items of this attempt.", metavar="N")
    max_rows: int = option(8, "Answers that are generated at once, by every engine.", "--rows", "-b")
    workers: int | None = option(None, "Threads that read media; by default one per core, at most 4.")


def batch(
    inputs: list[str] = typer.Argument(
        metavar="INPUT...", help="Folders, globs, or files: JSON lines, a JSON array, Parquet, tar (WebDataset)."
    ),
    out: Path = option(..., "JSON lines, a record per item; `-` or a pipe gets each as it ends.", "-o", metavar="FILE"),
    plan: bool = option(False, "Count the items and show how they would run; loads no weights."),
    *,
    items: ItemOptions,
    reading: ReadingOptions,
    attempt: AttemptOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    several: ActorOptions,
) -> None:
    """Answer every item of a folder or a data set: captions, labels, answers to questions.

    A row of JSON lines, JSON or Parquet has a `prompt` and an `image` (or `images`, `video`, `videos`), or is a LLaVA
    conversation, OpenAI messages, or a request of OpenAI's batch format, whose answers then have OpenAI's form too.

    Records are in the order of the input; until all are there, they are in `FILE.journal/records.jsonl`. Stop at any
    time, even by force: the same command resumes, unless it writes to a pipe. An item that cannot be answered gets a
    record with the reason; the exit code is 1 where all failed.

    Examples:

    - `saccade batch photos -p "Describe the picture." -t pocket -o captions.jsonl`
    - `saccade batch questions.jsonl -t Qwen/Qwen2.5-VL-7B-Instruct -b 32 -o out.jsonl --plan`
    - `saccade batch "shards/*.tar" -p "Is {txt} a fair caption?" --shard 2/8 -t TARGET -o part-2.jsonl`
    - `saccade batch photos -p "Describe the picture." -t TARGET -o captions.jsonl --ray=auto --actors 8`
    """
    decoded = decoding.checked()
    named(models)  # a mistake shows before the items are read
    from saccade.engine.slots import KV_MEMORY_SHARE
    from saccade.inputs.processor import MediaOptions
    from saccade.jobs.items import ItemSource, TemplateOptions
    from saccade.jobs.job import BatchJob, Shard, is_stream, preview, written
    from saccade.jobs.running import Attempt, ItemWorker, is_of, run
    from saccade.profile import read_profile

    media_root = items.media_root and items.media_root.expanduser()
    source = ItemSource(inputs, items.images_per_row, media_root, written(out))
    template, media = TemplateOptions(items.prompt, items.system), MediaOptions(**asdict(reading))
    job = BatchJob(source, template, media, Shard.parse(items.shard), items.limit, decoding.seed or 0, decoded)
    settings = Attempt(**asdict(attempt))
    with screen.waiting("Reading the items"):
        survey = preview(job, out, attempt.retry_failed)  # before models are loaded
    if plan:
        screen.check_models(models, complete=False)
        _plan(survey, out, f"{count(attempt.max_rows, 'answer')} at once, by {models.target}")
        return
    target = read_profile(models.target).target if is_profile(models.target) else place_of(models.target)
    sampling = screen.sampled(target, decoded, decoding.seed or 0)
    screen.note_sampling(sampling, decoded)
    journal = None if is_stream(out) else Path(f"{out}.journal")
    finished = f"; finished records are in {journal}/records.jsonl" if journal else ""
    is_done = survey.there == survey.items and is_of(job, out, target, models.method, models.options)
    loading = f"Loading {models.target} for {count(survey.items - survey.there, 'item')}{finished}."
    screen.note("Every item has a record, so that no model is loaded." if is_done else loading)
    shares = lambda room: (KV_MEMORY_SHARE / (1 if room.gpus else room.per_machine),)  # noqa: E731
    ahead = settings.max_rows + settings.threads
    loaded = several.worker(models, ItemWorker, job, settings, ahead=ahead, shares=shares)
    with nullcontext() if is_done else loaded as worker, screen.progress("starting", journal) as show:
        report = run(worker, job, survey, out, settings, lambda now: show(now.done, now.items, _rates(now)))
    errors = f", those of failed requests in {report.errors}" if report.errors else ""
    place = f"The records of all {count(report.items, 'item')} are in {report.out}{errors}."
    _show(report, screen.note if is_stream(out) else screen.show, "", place, "Failed")
    if report.all_failed:
        raise typer.Exit(1)


def _plan(survey: Survey, out: Path, how: str) -> None:
    kinds = ", ".join(f"{kind} {number}" for kind, number in survey.kinds.items())
    failed = f", of them {survey.failed} failed" if survey.failed else ""
    there = f", {count(survey.there, 'record')} of an earlier attempt{failed}" if survey.there else ""
    time = "not known; answer some items, such as with --limit 20, and --plan will use their speed"
    if survey.seconds:
        left, rate = survey.items - survey.there, survey.timed / survey.seconds
        time = f"about {duration(left / rate)} for {count(left, 'item')}, at {rate:.2g} items/s as so far"
    screen.show(f"Items: {survey.items} ({kinds})", f"Run: {how}", f"Output: {out}{there}", f"Time: {time}")
    _note_problems("Failed", survey.problems, survey.kinds["unusable"])


def _rates(report: Report) -> str:
    new = report.done - report.there
    rates = "starting"
    if new and report.seconds:
        rates = f"{new / report.seconds:.2g} items/s, {report.tokens / report.seconds:.0f} tokens/s"
    return f"{rates}, {report.failed} failed" if report.failed else rates


def _show(report: Report, show: Callable[[str], None], left_out: str, place: str, word: str) -> None:
    """Print what an attempt did."""
    rates = f" ({_rates(report)})" if report.done > report.there else ""
    before = f"; {report.there} finished before" if report.there else ""
    before += f", {report.failed_there} of them failed (--retry-failed tries again)" if report.failed_there else ""
    show(f"{count(report.answered, 'answer')} in {duration(report.seconds)}{rates}{before}{left_out}.")
    ends = ", ".join(f"{number} {screen.ENDS.get(end, end)}" for end, number in sorted(report.finishes.items()))
    if ends:
        show(f"Of them {ends}.")
    show(place)
    _note_problems(word, report.problems, report.failed)


def _note_problems(word: str, problems: Sequence[str], number: int) -> None:
    """Print the first problems, and how many more there are."""
    for problem in problems[:5]:
        screen.note(f"{word}: {problem}")
    if number > 5:
        screen.note(f"... and {number - 5} more.")


@group("Questions and answers")
class AnswerOptions:
    limit: int | None = option(None, "Answer only the first so many questions.")
    history: str | None = option(None, "Earlier answers: `reference` (the default), or the target's `own`.")
    batch: int | None = option(None, "Questions per batch; 8, or the preset's.", "-b")
    max_new_tokens: int | None = option(None, "Longest answer, 256 by default.", "-n")
    sampled_share: float | None = option(None, "Share of the questions answered by sampling, 0.5 by default.")
    temperature: float | None = option(None, "Of the sampled answers, 1.0 by default.")
    seed: int | None = option(None, "Decides which questions are sampled, and their draws.")
    count: int | None = option(None, "Samples of every pocket task, 1000 by default.")
    first_seed: int | None = option(None, "First pocket sample, 1000000 by default: evaluation draws below.")
    grammar: str | None = option(None, "Of pocket answers: `dense` by default, or `verbose`, easy template sentences.")


def distill(
    source: str = typer.Argument(
        metavar="PROMPTS",
        help="JSON lines or array of LLaVA conversations or OpenAI messages, `pocket:TASK,TASK` or `pocket:all`.",
    ),
    out: Path = option(..., "Folder of the answers: of this configuration, or none.", "-o", metavar="FOLDER"),
    media_root: Path | None = option(None, "Folder of the media; by default the prompts' own.", metavar="FOLDER"),
    on_bad_line: str = option("stop", "`stop` at a line that cannot be used, or `skip` it."),
    preset: str | None = option(None, "Questions per batch for one GPU of this memory.", metavar="24gb|80gb"),
    plan: bool = option(False, "Answer a few questions and estimate the run."),
    throughput: float | None = option(None, "Answer tokens a second, for a --plan without the model.", min=1e-6),
    *,
    models: ModelOptions,
    answers: AnswerOptions,
    several: ActorOptions,
) -> None:
    """Let the target answer a prompt set: training data for drafters, which must predict the target's own tokens.

    FOLDER/answers.jsonl gets one line per question: the messages, the answer as text and as token ids, its finish
    reason, and the temperature. Every assistant turn of a conversation is a question; duplicates with the same media
    are answered once. The method must be lossless: `plain` by default, `auto` with a drafter.

    Stop at any time, even by force: the same command resumes, and the file is the same as without the stop.

    Examples:

    - `saccade distill pocket:chart,receipt --count 500 -t pocket -o answers`
    - `saccade distill llava.json --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -o answers --preset 24gb --plan`
    - `saccade distill llava.jsonl --media-root images -t TARGET -o answers --ray=auto --actors 8`
    """
    named(models)  # a mistake shows before the prompts are read
    from saccade import memory_plan, methods

    if models.method is None and models.drafter is None and not models.heads:
        models = replace(models, method="plain")
    if models.method and not methods.is_lossless(methods.options(models.method, models.options)):
        raise MethodError(f"Method {models.method} is lossy: its answers are not the target's; choose a lossless one.")
    options = {**({} if preset is None else memory_plan.preset(preset).distill), **set_options(answers)}
    from saccade.distill.run import QuestionWorker, Setup, preview, reckoned, run

    setup = Setup(source, out, media_root, on_bad_line, options)  # a mistake shows before models are loaded
    if throughput is not None:
        if not plan:
            raise InputError("--throughput is for --plan; add it, or leave --throughput out.")
        _plan_answers(reckoned(setup, throughput), out, setup.options.max_new_tokens)
        return
    if plan:
        answerer = QuestionWorker(screen.load_models(models), setup)
        with screen.waiting("Reading the prompts and answering a few of them"):
            expected = preview(answerer, setup)
        _plan_answers(expected, out, setup.options.max_new_tokens)
        return
    with several.worker(models, QuestionWorker, setup) as worker, screen.progress("starting", out) as show:
        report = run(worker, setup, lambda now: show(now.done, now.items, _rates(now)))
    left_out = f"; left out: {count(report.duplicates, 'duplicate')}, {count(report.failed, 'unusable line')}"
    _show(report, screen.show, left_out, f"The answers are in {report.out}/answers.jsonl.", "Skipped")


def _plan_answers(expected: Preview, out: Path, most: int) -> None:
    plan = expected.plan
    conversations, batches = count(plan.conversations, "conversation"), count(len(plan.batches), "batch", "batches")
    there = f", {expected.there} finished" if expected.there else ""
    sampled = sum(question.sampled for question in plan.questions)
    screen.show(
        f"Questions: {len(plan.questions)} of {conversations}, {batches}; {sampled} sampled",
        f"Left out: {count(plan.duplicates, 'duplicate')}, {count(len(plan.problems), 'unusable line')}",
        f"Answers: {out}/answers.jsonl{there}",
        f"Memory: {expected.memory / 1e9:.2f} GB" if expected.memory else "Memory: not measured without the model",
        f"Disk: about {expected.disk(most) / 1e6:.1f} MB",
        f"Time: about {duration(expected.seconds)}",
    )
    _note_problems("Skipped", plan.problems, len(plan.problems))
