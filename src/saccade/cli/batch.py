"""`saccade batch`: an answer to every item of a folder or a data set."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.cli.option_groups import Decoding, Placing, spread
from saccade.errors import InputError
from saccade.wording import count as counted
from saccade.wording import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from saccade.jobs.job import Survey
    from saccade.resumable import Report, RunProgress, Worker

_ITEMS, _RUN = "Items", "Run"


@spread
def batch(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="A folder of pictures and videos, a glob, or a file of JSON lines, a JSON array, Parquet or tar "
            "(WebDataset); or several of these.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="JSON lines, one record per item, in the order of the input; until all are there, they are in "
            "`FILE.journal/records.jsonl`, one whole line each. `-` or a pipe gets every record as its item ends; such "
            "a run cannot be resumed.",
        ),
    ],
    target: args.Target = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Question for every item. `{name}`, `{stem}`, `{folder}` are of its file, `{FIELD}` is any field of "
            "its row; `{{` and `}}` are braces.",
            rich_help_panel=_ITEMS,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message of items without one.", rich_help_panel=_ITEMS)
    ] = None,
    images_per_row: Annotated[
        int,
        typer.Option(
            metavar="N", help="Neighbouring pictures of a folder that share a question.", rich_help_panel=_ITEMS
        ),
    ] = 1,
    media_root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the images and videos that rows name; by default that of their file.",
            rich_help_panel=_ITEMS,
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Part I of N, chosen by the items' ids, from 1.", rich_help_panel=_ITEMS),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Only the first so many items; later without it, the rest.", rich_help_panel=_ITEMS),
    ] = None,
    num_frames: Annotated[
        int | None,
        typer.Option(help="Frames sampled from a video; by default the checkpoint's.", rich_help_panel=_ITEMS),
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="Frames per second sampled from a video, likewise.", rich_help_panel=_ITEMS)
    ] = None,
    text_as_text: args.TextAsText = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Count the items and show how they would run; loads no weights.")
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Try items again that failed in earlier attempts.", rich_help_panel=_RUN),
    ] = False,
    max_failures: Annotated[
        int | None,
        typer.Option(metavar="N", help="Stop after so many failed items of this attempt.", rich_help_panel=_RUN),
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", "-b", help="Answers that are generated at once.", rich_help_panel=_RUN)
    ] = 8,
    workers: Annotated[
        int | None,
        typer.Option(help="Threads that read media; by default one per core, at most 4.", rich_help_panel=_RUN),
    ] = None,
    ray: args.Ray = None,
    engines: Annotated[
        int | None,
        typer.Option(
            "--actors",
            metavar="N",
            help="Engines on Ray, each with `--rows` rows: by default one per GPU, without GPUs one per machine.",
            rich_help_panel="Several machines",
        ),
    ] = None,
    *,
    drafter: args.Drafter = None,
    method: args.MethodName = None,
    head: args.Heads = None,
    set_: args.Settings = None,
    placing: Placing,
    decoding: Decoding,
) -> None:
    """Answer every item of a folder or a data set: captions, labels, answers to questions.

    A row of JSON lines, JSON or Parquet has a `prompt` and an `image` (or `images`, `video`, `videos`), or is a LLaVA
    conversation, OpenAI messages, or a request of OpenAI's batch format, whose answers then have OpenAI's form too.

    Stop at any time, even by force: the same command resumes. An item that cannot be answered gets a record with the
    reason; the exit code is 1 where all failed.

    Examples:

    `saccade batch photos -p "Describe the picture." -t pocket -o captions.jsonl`

    `saccade batch questions.jsonl -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct -b 32 -o out.jsonl
    --plan`

    `saccade batch "shards/*.tar" -p "Is {txt} a fair caption?" --shard 2/8 -t TARGET -o part-2.jsonl`

    `saccade batch photos -p "Describe the picture." -t TARGET -o captions.jsonl --ray=auto --actors 8`
    """
    if target is None:
        raise InputError(
            "No model is named; give a checkpoint folder or a hub id with --target, or --target pocket for the "
            "built-in pair."
        )
    args.check_ray(ray, "--actors", engines)
    decoded = decoding.options()
    settings = args.settings(set_)
    decoding.check()
    from saccade.inputs.processor import MediaOptions
    from saccade.jobs.item_sources import ItemSource
    from saccade.jobs.item_worker import ItemWorker, media_threads
    from saccade.jobs.items import PromptOptions
    from saccade.jobs.job import BatchJob, Shard, is_stream, preview, written
    from saccade.jobs.running import Attempt, run

    root = None if media_root is None else media_root.expanduser()
    job = BatchJob(
        ItemSource(inputs, images_per_row, root, written(out)),
        PromptOptions(prompt, system),
        MediaOptions(num_frames, fps, text_as_text=text_as_text),
        Shard.parse(shard),
        limit,
        decoding.seed or 0,
        decoded,
    )
    attempt, streams = Attempt(rows, workers, retry_failed, max_failures=max_failures), is_stream(out)
    with screen.waiting("Reading the items"):
        found = preview(job, out, retry_failed)  # before models are loaded
    if plan:
        from saccade.vlm import check

        screen.quiet_libraries()
        check(target, drafter, method, heads=screen.heads_by_name(head or []), **placing.models(), **settings)
        _plan(found, out, f"{counted(rows, 'answer')} at once, {_models(target, drafter, method)}")
        return
    kept = f"{out}.journal"
    place = "" if streams else f"; finished records are in {kept}/records.jsonl"
    screen.note(f"Loading {target} for {counted(found.items - found.there, 'item')}{place}.")
    with ExitStack() as stack:
        worker: Worker
        if ray is None:
            vlm = screen.load_models(target, drafter, method, heads=head, **placing.models(), **settings)
            worker = ItemWorker(vlm, settings, job, rows, workers)
        else:
            from saccade.engine.slots import KV_MEMORY_SHARE
            from saccade.jobs.actors import ActorModels, actors
            from saccade.ray_cluster import connected, places
            from saccade.vlm import check

            cluster = stack.enter_context(connected(ray, engines))

            heads = screen.heads_by_name(head or [])
            screen.quiet_libraries()
            models = placing.models()
            check(target, drafter, method, heads=heads, **models, **settings)  # a mistake shows before actors start
            room = places(cluster, engines, placing.threads, with_gpu=placing.device != "cpu" and target != "pocket")
            named = {"target": target, "drafter": drafter, "method": method, "heads": heads}
            loading, threads = ActorModels({**named, **models, **settings}, settings), media_threads(workers)
            kv_share = KV_MEMORY_SHARE / (1 if room.gpus else room.per_machine)
            arguments = (job, rows, threads, kv_share)
            started = actors(cluster, room, loading, ItemWorker, arguments, ahead=rows + threads)
            worker = stack.enter_context(started)
        try:
            with screen.long_progress("starting") as show:
                report = run(worker, job, found, out, replace(attempt, progress=_shown(show)))
        except KeyboardInterrupt:
            there = f"The answers so far are in {kept}; the same command resumes the run."
            screen.note("Stopped." if streams else f"Stopped. {there}")
            raise
    _show(report, screen.note if streams else _print)
    if report.all_failed:
        raise typer.Exit(1)


def _models(target: str, drafter: str | None, method: str | None) -> str:
    by = f" with {drafter}" if drafter else ""
    return f"by {target}{by}" + (f", method {method}" if method else "")


def _shown(show: Callable[[int, int, str], None]) -> Callable[[RunProgress], None]:
    """Update of the bar: rates of this attempt, and failures."""

    def update(progress: RunProgress) -> None:
        words = "starting"
        if progress.answered and progress.seconds:
            rates = progress.answered / progress.seconds, progress.tokens / progress.seconds
            words = f"{rates[0]:.{1 if rates[0] < 100 else 0}f} items/s, {rates[1]:.0f} tokens/s"
        failed = f", {progress.failed} failed" if progress.failed else ""
        show(progress.done, progress.total, words + failed)

    return update


_KINDS = {
    "image": ("picture", ""),
    "images": ("group of pictures", "groups of pictures"),
    "video": ("video", ""),
    "text": ("text", ""),
    "request": ("request of OpenAI's batch format", "requests of OpenAI's batch format"),
    "unusable": ("unusable item", ""),
}


def _plan(found: Survey, out: Path, how: str) -> None:
    kinds = ", ".join(counted(found.kinds[kind], *words) for kind, words in _KINDS.items() if found.kinds[kind])
    there = f", of them {found.failed} failed" if found.failed else ""
    lines = [
        f"Items: {found.items} ({kinds})",
        f"Run: {how}",
        f"Output: {out}" + (f", {counted(found.there, 'record')} of an earlier attempt{there}" if found.there else ""),
    ]
    left = found.items - found.there
    if found.seconds:
        speed = f"{found.timed / found.seconds:.2g} items/s of the {counted(found.timed, 'record')} so far"
        lines.append(
            f"Time: about {duration(left * found.seconds / found.timed)} for {counted(left, 'item')}, at the {speed}"
        )
    else:
        lines.append("Time: not known; answer some items, such as with --limit 20, and --plan will use their speed")
    for line in lines:
        _print(line)
    _problems(found.problems, found.kinds["unusable"])


def _print(line: str) -> None:
    screen.out().print(line, markup=False, soft_wrap=True)


def _show(report: Report, say: Callable[[str], None]) -> None:
    rate = ""
    if report.answered and report.seconds:
        items, tokens = report.answered / report.seconds, report.tokens / report.seconds
        rate = f" ({items:.2g} items/s, {tokens:.0f} tokens/s)"
    before = f"; {report.there} finished before" if report.there else ""
    before += f", {report.failed_there} of them failed (--retry-failed tries again)" if report.failed_there else ""
    ends = ", ".join(f"{number} {_ENDS.get(end, end)}" for end, number in sorted(report.finishes.items()))
    failed = f", {counted(report.failed, 'item')} failed" if report.failed else ""
    lines = [
        f"{counted(report.answered, 'answer')} in {duration(report.seconds)}{rate}{failed}{before}.",
        *([f"Of them {ends}."] if ends else []),
        f"The records of all {counted(report.items, 'item')} are in {report.out}"
        + (f", those of failed requests in {report.errors}." if report.errors else "."),
    ]
    for line in lines:
        say(line)
    _problems(report.problems, report.failed)


_ENDS = {"eos": "complete", "length": "cut at the limit", "stop": "ended by a stop string"}


def _problems(problems: list[str], number: int) -> None:
    for problem in problems:
        screen.note(f"Failed: {problem}")
    if number > len(problems):
        screen.note(f"... and {number - len(problems)} more.")
