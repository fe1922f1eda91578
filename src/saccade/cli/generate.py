"""`saccade generate`, one question and its answer, and `saccade demo`, that of the built-in pair about a picture."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.option_groups import DecodingOptions, MarkOptions, ModelOptions, option, spread
from saccade.errors import InputError

if TYPE_CHECKING:
    from saccade.output import Output
    from saccade.pocket import Sample
    from saccade.vlm import VLM


@spread
def generate(
    prompt: str = typer.Argument(help="The question; `-` reads it from standard input."),
    image: list[str] | None = option(
        None, "Image of the prompt (file or data URI); may be repeated.", "-i", metavar="FILE"
    ),
    video: list[str] | None = option(
        None, "Video of the prompt (needs the video extra); may be repeated.", "-v", metavar="FILE"
    ),
    num_frames: int | None = option(None, "Frames sampled from a video; by default the checkpoint's."),
    as_json: bool = option(
        False, "Print one JSON object: models, method and its options, text, tokens, marks, statistics.", "--json"
    ),
    *,
    shown: MarkOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Answer one question about images, videos or text.

    The answer streams to standard output as its tokens are accepted, statistics go to standard error.

    Examples:

    - `saccade generate -t pocket -i chart.png "Read the values from the bar chart."`
    - `saccade generate -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct -i photo.jpg "Describe it."`
    - `torchrun --nproc-per-node 2 --no-python saccade generate -t Qwen/Qwen2.5-VL-72B-Instruct --device tp "Hello."`
    """
    from saccade.inputs.chat import check_unicode

    target = models.named()
    if prompt == "-" and models.device == "tp":
        raise InputError("Standard input cannot be read by several processes; give the question as an argument.")
    question = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not question.strip():
        raise InputError("The question is empty; give it as an argument, or - and write it to standard input.")
    check_unicode(question)
    images, videos = image or [], video or []
    screen.check_media(images, videos)
    options = {"seed": decoding.seed, "num_frames": num_frames, **decoding.checked()}
    vlm = models.load()
    stream = vlm.stream(question, images, videos, text_as_text=shown.text_as_text, **options)
    if as_json:
        output = screen.answer(stream, None)
        print(json.dumps({"target": target, **_configuration(vlm, models.drafter), **output.as_dict()}))
    else:
        output = screen.answer(stream, screen.Painter(vlm.processor.tokenizer, screen.out(), shown.marks))
        screen.note(screen.summary(output, vlm.method))
    if output.finish_reason == "interrupted":
        raise typer.Exit(130)


def _configuration(vlm: VLM, named: str | None) -> dict[str, Any]:
    """Return the drafter's folder or hub id, its head's name, every option of the method, and the dtypes."""
    from saccade import methods
    from saccade.loading import name_of
    from saccade.pocket import head_path

    drafter, draft_dtype = None, None
    if vlm.head is not None:
        drafter = named or str(head_path(vlm.head.kind))
        draft_dtype = _name(next(vlm.head.parameters()).dtype)
    elif vlm.draft_model is not None and methods.needs(vlm.options) == "draft model":
        drafter = name_of(vlm.draft_model.model)
        draft_dtype = _name(vlm.draft_model.dtype)
    return {
        "drafter": drafter,
        "head": vlm.head_name,
        "method": vlm.method,
        "options": vlm.options,
        "dtype": _name(vlm.target.dtype),
        "draft_dtype": draft_dtype,
        "exact": vlm.target.exact,
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


FRESH = 10**6
"""Seeds below this are held out from training, which draws from it on."""
LONG = ("chart", "line", "scene")
"""Tasks of one picture with the longest answers, of those that the built-in target reads well: reading the picture,
which no drafting shortens, is a small part of their time."""
TIE = 4
"""Relative roundings within which two logits count as equal: every layer adds one of its own."""


@spread
def demo(
    task: str | None = option(
        None, "chart, line or scene; also caption, count, detail, document, existence, prose, receipt, report, vet."
    ),
    seed: int | None = option(None, "Seed of the picture; by default a new one per run."),
    method: str = option("chain", "See `saccade methods`; a chain has 7 tokens.", "-m"),
    save: Path = option("saccade-demo.png", "File to save the picture as.", metavar="FILE"),
    repeats: int = option(2, "Timed runs per method; medians are shown."),
    dtype: str = option("auto", "Of the target: float32, bfloat16, float16, or auto: float32 on a CPU."),
    threads: int | None = option(None, "CPU threads; by default one."),
    exact: bool = option(False, "Exact mode: in every number format, tokens are those of plain decoding."),
) -> None:
    """Draw a picture, answer a question about it, and compare time and tokens with plain decoding.

    Uses the pair of small models that comes with the package; nothing is downloaded. Green tokens (or those
    between ‹ and ›) were drafted and accepted; yellow ones (« and ») were accepted by a lossy rule in place of the
    target's own token.
    """
    from saccade import cpu
    from saccade.loading import check_dtype
    from saccade.methods import options
    from saccade.pocket import WORLD, draw

    if repeats < 1:
        raise InputError(f"--repeats must be at least 1, not {repeats}.")
    tasks = sorted(name for name in WORLD if _shows_one_picture(draw(0, name)))
    if task is not None and task not in tasks:
        raise InputError(f"{task!r} is not a task of one picture; choose one of {', '.join(tasks)}.")
    seed = random.randrange(FRESH) if seed is None else seed
    if not 0 <= seed < FRESH:
        raise InputError(f"--seed must be from 0 to {FRESH - 1}; greater ones were used for training.")
    task = task or random.Random(seed).choice(LONG)
    sample = draw(seed, task)
    chain: dict[str, Any] = {"gamma": 7} if method == "chain" else {}  # the fastest for the built-in pair
    options(method, chain)  # what is unknown is refused before the picture takes an older one's place
    check_dtype(dtype)
    if save.is_dir():
        raise InputError(f"{save} is a folder; give --save a file, such as {save / 'saccade-demo.png'}.")
    try:
        sample.image.save(save)
    except (OSError, ValueError) as problem:
        raise InputError(f"Cannot save the picture as {save}: {problem}") from problem
    screen.show(f"A {task}: {save} (draw it again with --task {task} --seed {seed})")

    ours = screen.load_models("pocket", None, method, dtype=dtype, threads=threads, exact=exact, **chain)
    plain = ours.using("plain")
    with screen.waiting("Warming up"):
        for vlm in (plain, ours):
            vlm.generate(sample.question, [sample.image], max_new_tokens=8)
    screen.out().print(f"\nQuestion: {sample.question}\nAnswer:   ", end="", markup=False)
    stream = ours.stream(sample.question, [sample.image])
    screen.answer(stream, screen.Painter(ours.processor.tokenizer, screen.out(), marked=True))
    runs: dict[str, list[Output]] = {"plain": [], method: []}
    with screen.waiting("Timing both, in turn"):
        for _ in range(repeats):
            runs["plain"].append(plain.generate(sample.question, [sample.image]))
            runs[method].append(ours.generate(sample.question, [sample.image]))
    _report(sample, method, runs, _comparison(ours, sample, runs[method][0], runs["plain"][0]))
    if (busy := cpu.busy_cores()) >= 0.5:
        screen.show(
            f"Other programs keep {busy:.1f} of {os.cpu_count()} cores busy: times are longer, and vary more, "
            "than on an idle machine."
        )


def _shows_one_picture(sample: Sample) -> bool:
    return len(sample.images) == 1 and not sample.turns


def _comparison(vlm: VLM, sample: Sample, ours: Output, plain: Output) -> str:
    """A sentence on whether a method's tokens are plain decoding's, and why not."""
    import torch

    from saccade.bench.records import first_difference
    from saccade.bench.runner import logits_after
    from saccade.inputs.families.family import Prompt

    position, dtype = first_difference(ours.tokens, plain.tokens), vlm.target.dtype
    if position is None:
        return f"All {len(plain.tokens)} tokens are equal to plain decoding's."
    differ = f"Tokens differ from plain decoding's from token {position} on"
    if not ours.lossless:
        return f"{differ}."
    prompt = vlm.processor.prompt(sample.question, [sample.image])
    logits = logits_after(vlm.target, Prompt((*prompt.ids, *plain.tokens[:position]), prompt.media))
    best, second = logits.topk(2).values.tolist()
    must_equal = vlm.target.exact or dtype == torch.float32
    if must_equal or best - second > TIE * torch.finfo(dtype).eps * max(1, abs(best)):
        return f"{differ}, which is a defect: please report it with the output of `saccade doctor`."
    return (
        f"{differ}: the target's two best logits there, {best:.2f} and {second:.2f}, tie within {_name(dtype)}'s "
        "rounding, and a pass over several tokens rounds otherwise than one over one; --exact makes all tokens equal."
    )


def _report(sample: Sample, method: str, runs: dict[str, list[Output]], comparison: str) -> None:
    from rich.table import Table

    from saccade.pocket import score

    table = Table("", "seconds", "tokens/s", "speed-up", "target passes", "block efficiency", box=None, pad_edge=False)
    times = {name: median(output.stats.times.total for output in outputs) for name, outputs in runs.items()}
    for name, outputs in runs.items():
        stats = outputs[0].stats
        table.add_row(
            name if outputs[0].lossless else f"{name} (lossy)",
            f"{times[name]:.3f}",
            f"{stats.new_tokens / times[name]:.0f}",
            f"{times['plain'] / times[name]:.2f}x",
            str(stats.target_passes),
            f"{stats.block_efficiency:.2f}",
        )
    screen.show("")
    screen.out().print(table)
    ours, plain = runs[method][0], runs["plain"][0]
    if method != "plain" and times["plain"] < 2 * times[method]:
        spent = ours.stats.times
        read = (spent.vision + spent.prefill + spent.draft_prefill) / spent.total
        screen.show(
            f"Less than 2x: {read:.0%} of its time goes into reading the picture and {spent.draft / spent.total:.0%} "
            f"into drafting; {ours.stats.block_efficiency:.1f} tokens come of a pass."
        )
    screen.show(comparison)
    if not ours.lossless:
        screen.show(f"{method} is lossy: it may change the answer.")
    differs = ours.text != plain.text
    for name in (method, "plain") if differs else (method,):
        facts = score(sample.task, runs[name][0].text, sample.facts)
        values = ", ".join(f"{fact} {value:.0%}" for fact, value in facts.items())
        screen.show(f"Against the truth{f', {name}' if differs else ''}: {values}")
