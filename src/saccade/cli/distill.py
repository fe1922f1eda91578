"""`saccade distill`: the target's answers to a prompt set, as training data of drafters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.cli.option_groups import Placing, spread
from saccade.errors import InputError, MethodError
from saccade.wording import count as counted
from saccade.wording import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from saccade.distill.run import Preview
    from saccade.resumable import Report, RunProgress

_POCKET = "Pocket sources"
_SHOWN = 5


@spread
def distill(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            help="JSON lines, or one JSON array, with LLaVA conversations or OpenAI messages; or `pocket:TASK,TASK` or "
            "`pocket:all`, drawn from the built-in world.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder of the answers. A run of the same configuration resumes; any other content is an error.",
        ),
    ],
    target: args.Target = None,
    media_root: Annotated[
        Path | None,
        typer.Option(
            "--media-root",
            metavar="FOLDER",
            help="Folder of the images and videos; by default the prompts' own.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Answer only the first so many questions.")] = None,
    history: Annotated[
        str,
        typer.Option(
            help="Earlier answers of a conversation: `reference`, those of the prompts, or the target's `own`."
        ),
    ] = "reference",
    on_bad_line: Annotated[str, typer.Option(help="`stop` at a line that cannot be used, or `skip` it.")] = "stop",
    preset: args.Preset = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Show the number of questions and the estimated time, from a few answers. With --preset nothing is "
            "run: memory and disk are computed from the target's configuration, without weights or a GPU.",
        ),
    ] = False,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Questions per batch; 8, or the preset's.")] = None,
    ray: args.Ray = None,
    engines: Annotated[
        int | None,
        typer.Option(
            "--actors",
            metavar="N",
            help="Engines on Ray: by default one per GPU, without GPUs one per machine.",
            rich_help_panel="Several machines",
        ),
    ] = None,
    *,
    drafter: args.Drafter = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Any lossless one of `saccade methods`; `plain` by default, `auto` with a drafter.",
            rich_help_panel="Models",
        ),
    ] = None,
    set_: args.Settings = None,
    placing: Placing,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Longest answer.", rich_help_panel="Decoding")
    ] = 256,
    sampled_share: Annotated[
        float,
        typer.Option(
            help="Share of the questions answered by sampling, the others greedily: 0 to 1.",
            rich_help_panel="Decoding",
        ),
    ] = 0.5,
    temperature: Annotated[float, typer.Option(help="Of the sampled answers.", rich_help_panel="Decoding")] = 1.0,
    seed: Annotated[
        int,
        typer.Option(help="Decides which questions are sampled, and their draws.", rich_help_panel="Decoding"),
    ] = 0,
    count: Annotated[
        int | None, typer.Option(help="Samples of every task, 1000 by default.", rich_help_panel=_POCKET)
    ] = None,
    first_seed: Annotated[
        int | None,
        typer.Option(
            help="Number of the first sample, from 1000000 (the default) on: evaluation draws below.",
            rich_help_panel=_POCKET,
        ),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(help="`dense` by default, or `verbose` for easy template sentences.", rich_help_panel=_POCKET),
    ] = None,
) -> None:
    """Let the target answer a prompt set: training data for drafters, which must predict the target's own tokens.

    FOLDER/answers.jsonl gets one line per question: the messages, the answer as text and as token ids, its finish
    reason, and the temperature. Every assistant turn of a conversation is a question; duplicates with the same media
    are answered once.

    Stop at any time, even by force: the same command resumes, and the file is the same as without the stop.

    Examples:

    `saccade distill pocket:chart,receipt --count 500 -t pocket -o answers`

    `saccade distill llava.jsonl --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -n 512 -b 32 -o answers --plan`

    `saccade distill llava.json --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -o answers --preset 24gb --plan`

    `saccade distill llava.jsonl --media-root images -t TARGET -o answers --ray=auto --actors 8`
    """
    if target is None:
        raise InputError(
            "No model is named; give a checkpoint folder or a hub id with --target, or --target pocket for the "
            "built-in pair."
        )
    args.check_ray(ray, "--actors", engines)
    from saccade import methods

    name = method or ("plain" if drafter is None else None)
    from saccade import memory_plan

    fitted = {} if preset is None else memory_plan.preset(preset).distill
    pocket = {"count": count, "first_seed": first_seed, "grammar": grammar}
    settings = args.settings(set_)
    if name is not None and not methods.is_lossless(methods.options(name, settings)):
        raise MethodError(f"Method {name} is lossy, so its answers are not the target's; choose a lossless one.")
    chosen: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampled_share": sampled_share,
        "temperature": temperature,
        "seed": seed,
        **fitted,
        **({} if batch is None else {"batch": batch}),
        "history": history,
        "limit": limit,
        **{word: value for word, value in pocket.items() if value is not None},
    }
    from saccade.distill.run import QuestionWorker, Setup, preview, run

    if plan and preset is not None:
        from saccade.distill.forecast import forecast
        from saccade.pocket import target_path

        screen.quiet_libraries()
        text, problems = forecast(
            target_path() if target == "pocket" else target,
            source,
            memory_plan.preset(preset),
            media_root=media_root,
            on_bad_line=on_bad_line,
            dtype=placing.dtype,
            **chosen,
        )
        print(text)
        _problems(problems, len(problems))
        return
    setup = Setup(source, out, media_root, on_bad_line, chosen)  # a mistake shows before models are loaded
    if ray is not None and not plan:
        from saccade.jobs.actors import ActorModels, actors
        from saccade.ray_cluster import connected, places
        from saccade.vlm import check

        screen.quiet_libraries()
        models = placing.models()
        check(target, drafter, name, **models, **settings)  # a mistake shows before actors start
        loading = ActorModels({"target": target, "drafter": drafter, "method": name, **models, **settings}, settings)
        with connected(ray, engines) as cluster:
            room = places(cluster, engines, placing.threads, with_gpu=placing.device != "cpu" and target != "pocket")
            with actors(cluster, room, loading, QuestionWorker, (setup,), ahead=2) as started:
                report = _shown(partial(run, started, setup), out)
        _show(report)
        return
    vlm = screen.load_models(target, drafter, name, **placing.models(), **settings)
    worker = QuestionWorker(vlm, settings, setup)
    if plan:
        with screen.waiting("Reading the prompts and answering a few of them"):
            expected = preview(worker, setup)
        _plan(expected, out)
        return
    _show(_shown(partial(run, worker, setup), out))


def _shown(run: Callable[..., Report], out: Path) -> Report:
    """Run behind a bar."""
    try:
        with screen.long_progress("reading the prompts") as show:

            def update(progress: RunProgress) -> None:
                rate = f"{progress.tokens / progress.seconds:.0f} tokens/s" if progress.seconds else "generating"
                show(progress.done, progress.total, rate)

            return run(progress=update)
    except KeyboardInterrupt:
        screen.note(f"Stopped. The answers so far are in {out}; the same command resumes the run.")
        raise


def _plan(expected: Preview, out: Path) -> None:
    console = screen.out()
    plan = expected.plan
    sampled = sum(question.sampled for question in plan.questions)
    questions = len(plan.questions)
    lines = [
        f"Questions: {questions} of {counted(plan.conversations, 'conversation')}, "
        f"{counted(len(plan.batches), 'batch', 'batches')}",
        f"Decoding: {questions - sampled} greedy, {sampled} sampled",
        f"Left out: {counted(plan.duplicates, 'duplicate')}, {counted(len(plan.problems), 'unusable line')}",
        f"Answers: {out}/answers.jsonl" + (f", {expected.there} finished" if expected.there else ""),
        f"Time: about {duration(expected.seconds)}",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    _problems(plan.problems, len(plan.problems))


def _show(report: Report) -> None:
    earlier = f"; {report.there} finished before" if report.there else ""
    rate = f", {report.tokens / report.seconds:.0f} tokens/s" if report.answered else ""
    ends = ", ".join(f"{count} {_ENDS[end]}" for end, count in sorted(report.finishes.items()))
    lines = [
        f"{counted(report.answered, 'answer')} in {duration(report.seconds)}{rate}{earlier}; left out: "
        f"{counted(report.duplicates, 'duplicate')}, {counted(report.failed, 'unusable line')}.",
        *([f"Of them {ends}."] if ends else []),
        f"The answers are in {report.out}/answers.jsonl.",
    ]
    for line in lines:
        screen.out().print(line, markup=False, soft_wrap=True)
    _problems(report.problems, report.failed)


_ENDS = {
    "eos": "complete",
    "length": "cut at the limit",
    "stop": "ended by a stop string",
    "visual": "cut before a placeholder of an image",
}


def _problems(problems: list[str], number: int) -> None:
    for problem in problems[:_SHOWN]:
        screen.note(f"Skipped: {problem}")
    if number > _SHOWN:
        screen.note(f"... and {number - _SHOWN} more.")
