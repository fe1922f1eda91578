"""`saccade distill`: the target's answers to a prompt set, as training data of drafters."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.batch import endings, note_problems, run_progress
from saccade.cli.option_groups import ActorOptions, ModelOptions, group, option, preset_option, spread
from saccade.errors import MethodError
from saccade.wording import count as counted
from saccade.wording import duration

if TYPE_CHECKING:
    from saccade.distill.run import Preview
    from saccade.resumable import Report, Worker


@group("Decoding")
class AnswerOptions:
    """Decoding of the target's answers."""

    max_new_tokens: int = option(256, "Longest answer.", "-n")
    sampled_share: float = option(0.5, "Share of the questions answered by sampling, the others greedily: 0 to 1.")
    temperature: float = option(1.0, "Of the sampled answers.")
    seed: int = option(0, "Decides which questions are sampled, and their draws.")


@group("Pocket sources")
class PocketOptions:
    """Samples of the built-in world."""

    count: int | None = option(None, "Samples of every task, 1000 by default.")
    first_seed: int | None = option(
        None, "Number of the first sample, from 1000000 (the default) on: evaluation draws below."
    )
    grammar: str | None = option(None, "`dense` by default, or `verbose` for easy template sentences.")


@spread
def distill(
    source: str = typer.Argument(
        metavar="PROMPTS",
        help="JSON lines, or one JSON array, with LLaVA conversations or OpenAI messages; or `pocket:TASK,TASK` or "
        "`pocket:all`, drawn from the built-in world.",
    ),
    out: Path = option(
        ...,
        "Folder of the answers. A run of the same configuration resumes; any other content is an error.",
        "-o",
        metavar="FOLDER",
    ),
    media_root: Path | None = option(
        None, "Folder of the images and videos; by default the prompts' own.", metavar="FOLDER"
    ),
    limit: int | None = option(None, "Answer only the first so many questions."),
    history: str = option(
        "reference", "Earlier answers of a conversation: `reference`, those of the prompts, or the target's `own`."
    ),
    on_bad_line: str = option("stop", "`stop` at a line that cannot be used, or `skip` it."),
    preset: str | None = preset_option(),
    plan: bool = option(
        False,
        "Show the number of questions and the estimated time, from a few answers. With --preset nothing is run: memory "
        "and disk are computed from the target's configuration, without weights or a GPU.",
    ),
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

    `saccade distill pocket:chart,receipt --count 500 -t pocket -o answers`

    `saccade distill llava.jsonl --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -n 512 -b 32 -o answers --plan`

    `saccade distill llava.json --media-root images -t Qwen/Qwen2.5-VL-7B-Instruct -o answers --preset 24gb --plan`

    `saccade distill llava.jsonl --media-root images -t TARGET -o answers --ray=auto --actors 8`
    """
    target = models.named()
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
            dtype=models.dtype,
            **options,
        )
        print(text)
        note_problems("Skipped", problems, len(problems))
        return
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
                _plan(expected, out)
                return
        with run_progress(f"Stopped. The answers so far are in {out}; the same command resumes the run.") as update:
            report = run(worker, setup, update)
    _show(report)


def _plan(expected: Preview, out: Path) -> None:
    plan = expected.plan
    sampled = sum(question.sampled for question in plan.questions)
    questions = len(plan.questions)
    there = f", {expected.there} finished" if expected.there else ""
    screen.show(
        f"Questions: {questions} of {counted(plan.conversations, 'conversation')}, "
        f"{counted(len(plan.batches), 'batch', 'batches')}",
        f"Decoding: {questions - sampled} greedy, {sampled} sampled",
        f"Left out: {counted(plan.duplicates, 'duplicate')}, {counted(len(plan.problems), 'unusable line')}",
        f"Answers: {out}/answers.jsonl{there}",
        f"Time: about {duration(expected.seconds)}",
    )
    note_problems("Skipped", plan.problems, len(plan.problems))


def _show(report: Report) -> None:
    earlier = f"; {report.there} finished before" if report.there else ""
    rate = f", {report.tokens / report.seconds:.0f} tokens/s" if report.answered else ""
    screen.show(
        f"{counted(report.answered, 'answer')} in {duration(report.seconds)}{rate}{earlier}; left out: "
        f"{counted(report.duplicates, 'duplicate')}, {counted(report.failed, 'unusable line')}.",
        *endings(report),
        f"The answers are in {report.out}/answers.jsonl.",
    )
    note_problems("Skipped", report.problems, report.failed)
