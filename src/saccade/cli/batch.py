"""`saccade batch`, an answer to every item, and `saccade distill`, the target's answers as training data."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.option_groups import (
    ActorOptions,
    DecodingOptions,
    ModelOptions,
    group,
    option,
    spread,
)
from saccade.errors import MethodError
from saccade.wording import count, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from saccade.distill.run import Preview
    from saccade.jobs.job import Survey
    from saccade.ray_cluster import Places
    from saccade.resumable import Report, Worker


@group("Items")
class ItemOptions:
    """Items, and their questions."""

    prompt: str | None = option(
        None, "Question for every item; `{name}`, `{stem}`, `{folder}` and `{FIELD}` of its row are filled in.", "-p"
    )
    system: str | None = option(None, "System message of items without one.")
    images_per_row: int = option(1, "Neighbouring pictures of a folder that share a question.", metavar="N")
    media_root: Path | None = option(
        None, "Folder of the media that rows name; by default that of their file.", metavar="FOLDER"
    )
    shard: str | None = option(None, "Part I of N, chosen by the items' ids, from 1.", metavar="I/N")
    limit: int | None = option(None, "Only the first so many items; later without it, the rest.")
    num_frames: int | None = option(None, "Frames sampled from a video; by default the checkpoint's.")
    fps: float | None = option(None, "Frames per second sampled from a video, likewise.")
    text_as_text: bool = option(
        False, "Encode control tokens in messages, such as `</s>` or `<image>`, as ordinary text."
    )


@group("Run")
class RunOptions:
    """One attempt at the job."""

    retry_failed: bool = option(False, "Try items again that failed in earlier attempts.")
    max_failures: int | None = option(None, "Stop after so many failed items of this attempt.", metavar="N")
    rows: int = option(8, "Answers that are generated at once, by every engine.", "-b")
    workers: int | None = option(None, "Threads that read media; by default one per core, at most 4.")


@spread
def batch(
    inputs: list[str] = typer.Argument(
        metavar="INPUT...", help="Folders, globs, or files: JSON lines, a JSON array, Parquet, tar (WebDataset)."
    ),
    out: Path = option(
        ..., "JSON lines, one record per item; `-` or a pipe gets each as its item ends.", "-o", metavar="FILE"
    ),
    plan: bool = option(False, "Count the items and show how they would run; loads no weights."),
    *,
    items: ItemOptions,
    attempt: RunOptions,
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
    - `saccade batch questions.jsonl -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct -b 32 -o out.jsonl
      --plan`
    - `saccade batch "shards/*.tar" -p "Is {txt} a fair caption?" --shard 2/8 -t TARGET -o part-2.jsonl`
    - `saccade batch photos -p "Describe the picture." -t TARGET -o captions.jsonl --ray=auto --actors 8`
    """
    target = models.named()
    several.check("--actors", several.actors)
    decoded = decoding.checked()
    models.arguments()  # a mistake shows before the items are read
    from saccade.engine.slots import KV_MEMORY_SHARE
    from saccade.inputs.processor import MediaOptions
    from saccade.jobs.item_sources import ItemSource
    from saccade.jobs.items import TemplateOptions
    from saccade.jobs.job import BatchJob, Shard, is_stream, preview, written
    from saccade.jobs.running import Attempt, ItemWorker, run

    root = None if items.media_root is None else items.media_root.expanduser()
    job = BatchJob(
        ItemSource(inputs, items.images_per_row, root, written(out)),
        TemplateOptions(items.prompt, items.system),
        MediaOptions(items.num_frames, items.fps, text_as_text=items.text_as_text),
        Shard.parse(items.shard),
        items.limit,
        decoding.seed or 0,
        decoded,
    )
    settings = Attempt(attempt.rows, attempt.workers, attempt.retry_failed, attempt.max_failures)
    with screen.waiting("Reading the items"):
        survey = preview(job, out, attempt.retry_failed)  # before models are loaded
    if plan:
        from saccade.vlm import check

        screen.quiet_libraries()
        check(**models.arguments())
        drafter = f" with {models.drafter}" if models.drafter else ""
        method = f", method {models.method}" if models.method else ""
        _plan(survey, out, f"{count(attempt.rows, 'answer')} at once, by {target}{drafter}{method}")
        return
    place, stopped = "", "Stopped."
    if not is_stream(out):
        place = f"; finished records are in {out}.journal/records.jsonl"
        stopped = f"Stopped. The answers so far are in {out}.journal; the same command resumes the run."
    screen.note(f"Loading {target} for {count(survey.items - survey.there, 'item')}{place}.")
    with ExitStack() as stack:
        worker: Worker
        if several.ray is None:
            worker = ItemWorker(models.load(), models.settings, job, settings)
        else:

            def arguments(room: Places) -> tuple[Any, ...]:
                return job, settings, KV_MEMORY_SHARE / (1 if room.gpus else room.per_machine)

            ahead = settings.max_rows + settings.threads
            worker = stack.enter_context(several.started(models, ItemWorker, arguments, ahead))
        with _progress(stopped) as update:
            report = run(worker, job, survey, out, settings, update)
    failed = f"; {count(report.failed, 'item')} failed" if report.failed else ""
    errors = f", those of failed requests in {report.errors}" if report.errors else ""
    place = f"The records of all {count(report.items, 'item')} are in {report.out}{errors}."
    _show(report, screen.note if is_stream(out) else screen.show, failed, place, "Failed")
    if report.all_failed:
        raise typer.Exit(1)


@contextmanager
def _progress(stopped: str) -> Iterator[Callable[[Report], None]]:
    """Show the progress of a resumable run: rates of this attempt, and failures."""
    with screen.progress("starting", stopped) as show:

        def update(progress: Report) -> None:
            words = "starting"
            new = progress.done - progress.there
            if new and progress.seconds:
                items, tokens = new / progress.seconds, progress.tokens / progress.seconds
                words = f"{items:.{1 if items < 100 else 0}f} items/s, {tokens:.0f} tokens/s"
            failed = f", {progress.failed} failed" if progress.failed else ""
            show(progress.done, progress.items, words + failed)

        yield update


def _note_problems(word: str, problems: Sequence[str], number: int) -> None:
    """Print the first problems, and how many more there are."""
    for problem in problems[:5]:
        screen.note(f"{word}: {problem}")
    if number > 5:
        screen.note(f"... and {number - 5} more.")


_KINDS = {
    "image": ("picture", ""),
    "images": ("group of pictures", "groups of pictures"),
    "video": ("video", ""),
    "text": ("text", ""),
    "request": ("request of OpenAI's batch format", "requests of OpenAI's batch format"),
    "unusable": ("unusable item", ""),
}


def _plan(survey: Survey, out: Path, how: str) -> None:
    kinds = ", ".join(count(survey.kinds[kind], *words) for kind, words in _KINDS.items() if survey.kinds[kind])
    failed = f", of them {survey.failed} failed" if survey.failed else ""
    there = f", {count(survey.there, 'record')} of an earlier attempt{failed}" if survey.there else ""
    time = "not known; answer some items, such as with --limit 20, and --plan will use their speed"
    if survey.seconds:
        left = survey.items - survey.there
        speed = f"{survey.timed / survey.seconds:.2g} items/s of the {count(survey.timed, 'record')} so far"
        time = f"about {duration(left * survey.seconds / survey.timed)} for {count(left, 'item')}, at the {speed}"
    screen.show(f"Items: {survey.items} ({kinds})", f"Run: {how}", f"Output: {out}{there}", f"Time: {time}")
    _note_problems("Failed", survey.problems, survey.kinds["unusable"])


def _show(report: Report, show: Callable[[str], None], left_out: str, place: str, word: str) -> None:
    rate = ""
    if report.answered and report.seconds:
        items, tokens = report.answered / report.seconds, report.tokens / report.seconds
        rate = f" ({items:.2g} items/s, {tokens:.0f} tokens/s)"
    before = f"; {report.there} finished before" if report.there else ""
    before += f", {report.failed_there} of them failed (--retry-failed tries again)" if report.failed_there else ""
    show(f"{count(report.answered, 'answer')} in {duration(report.seconds)}{rate}{before}{left_out}.")
    ends = ", ".join(f"{number} {screen.ENDS.get(end, end)}" for end, number in sorted(report.finishes.items()))
    if ends:
        show(f"Of them {ends}.")
    show(place)
    _note_problems(word, report.problems, report.failed)


@group("Decoding")
class AnswerOptions:
    """Decoding of the target's answers."""

    max_new_tokens: int = option(256, "Longest answer.", "-n")
    sampled_share: float = option(0.5, "Share of the questions answered by sampling, the others greedily.")
    temperature: float = option(1.0, "Of the sampled answers.")
    seed: int = option(0, "Decides which questions are sampled, and their draws.")


@group("Pocket sources")
class PocketOptions:
    """Samples of the built-in world."""

    count: int | None = option(None, "Samples of every task, 1000 by default.")
    first_seed: int | None = option(None, "First sample, from 1000000 (the default) on: evaluation draws below.")
    grammar: str | None = option(None, "`dense` by default, or `verbose` for easy template sentences.")


@spread
def distill(
    source: str = typer.Argument(
        metavar="PROMPTS",
        help="JSON lines, or one JSON array, with LLaVA conversations or OpenAI messages; or `pocket:TASK,TASK` or "
        "`pocket:all`, drawn from the built-in world.",
    ),
    out: Path = option(..., "Folder of the answers: of this configuration, or none.", "-o", metavar="FOLDER"),
    media_root: Path | None = option(
        None, "Folder of the images and videos; by default the prompts' own.", metavar="FOLDER"
    ),
    limit: int | None = option(None, "Answer only the first so many questions."),
    history: str = option(
        "reference", "Earlier answers of a conversation: the prompts' (`reference`) or the target's `own`."
    ),
    on_bad_line: str = option("stop", "`stop` at a line that cannot be used, or `skip` it."),
    preset: str | None = option(None, "Questions per batch for one GPU of this memory.", metavar="24gb|80gb"),
    plan: bool = option(False, "Answer a few questions and estimate the run."),
    batch: int | None = option(None, "Questions per batch; 8, or the preset's.", "-b"),
    *,
    models: ModelOptions,
    decoding: AnswerOptions,
    pocket: PocketOptions,
    several: ActorOptions,
) -> None:
    """Let the target answer a prompt set: training data for drafters, which must predict the target's own tokens.

    FOLDER/answers.jsonl gets one line per question: the messages, the answer as text and as token ids, its finish
    reason, and the temperature. Every assistant turn of a conversation is a question; duplicates with the same media
    are answered once. The method must be lossless: `plain` by default, `auto` with a drafter.

    Stop at any time, even by force: the same command resumes, and the file is the same as without the stop.

    Examples:

    - `saccade distill pocket:chart,receipt --count 500 -t pocket -o answers`
    - `saccade distill llava.jsonl --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -n 512 -b 32 -o answers --plan`
    - `saccade distill llava.json --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -o answers --preset 24gb`
    - `saccade distill llava.jsonl --media-root images -t TARGET -o answers --ray=auto --actors 8`
    """
    models.named()
    several.check("--actors", several.actors)
    from saccade import memory_plan, methods

    if models.method is None and models.drafter is None and not models.head:
        models = replace(models, method="plain")
    name = models.method
    if name is not None and not methods.is_lossless(methods.options(name, models.settings)):
        raise MethodError(f"Method {name} is lossy, so its answers are not the target's; choose a lossless one.")
    options: dict[str, Any] = {
        **asdict(decoding),
        **({} if preset is None else memory_plan.preset(preset).distill),
        **({} if batch is None else {"batch": batch}),
        "history": history,
        "limit": limit,
        **{word: value for word, value in asdict(pocket).items() if value is not None},
    }
    from saccade.distill.run import QuestionWorker, Setup, preview, run

    setup = Setup(source, out, media_root, on_bad_line, options)  # a mistake shows before models are loaded
    with ExitStack() as stack:
        worker: Worker
        if several.ray is not None and not plan:
            worker = stack.enter_context(several.started(models, QuestionWorker, lambda _: (setup,), 2))
        else:
            worker = answerer = QuestionWorker(models.load(), models.settings, setup)
            if plan:
                with screen.waiting("Reading the prompts and answering a few of them"):
                    expected = preview(answerer, setup)
                _plan_answers(expected, out)
                return
        with _progress(f"Stopped. The answers so far are in {out}; the same command resumes the run.") as update:
            report = run(worker, setup, update)
    left_out = f"; left out: {count(report.duplicates, 'duplicate')}, {count(report.failed, 'unusable line')}"
    _show(report, screen.show, left_out, f"The answers are in {report.out}/answers.jsonl.", "Skipped")


def _plan_answers(expected: Preview, out: Path) -> None:
    plan = expected.plan
    sampled = sum(question.sampled for question in plan.questions)
    questions = len(plan.questions)
    there = f", {expected.there} finished" if expected.there else ""
    screen.show(
        f"Questions: {questions} of {count(plan.conversations, 'conversation')}, "
        f"{count(len(plan.batches), 'batch', 'batches')}",
        f"Decoding: {questions - sampled} greedy, {sampled} sampled",
        f"Left out: {count(plan.duplicates, 'duplicate')}, {count(len(plan.problems), 'unusable line')}",
        f"Answers: {out}/answers.jsonl{there}",
        f"Time: about {duration(expected.seconds)}",
    )
    _note_problems("Skipped", plan.problems, len(plan.problems))
