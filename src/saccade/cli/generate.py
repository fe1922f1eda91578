"""`saccade generate`, one question and its answer, and `saccade demo`, that of the built-in pair about a picture."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.account import account, plain_pass
from saccade.cli.option_groups import DecodingOptions, ModelOptions, ReadingOptions, named, option
from saccade.errors import InputError
from saccade.model_spec import ModelSpec

if TYPE_CHECKING:
    from saccade.output import Output
    from saccade.pocket import Sample
    from saccade.vlm import VLM


def generate(
    prompt: str = typer.Argument(help="The question; `-` reads it from standard input."),
    image: list[str] | None = option(None, "Image (file or data URI); may be repeated.", "-i", metavar="FILE"),
    video: list[str] | None = option(None, "Video (extra `video`); may be repeated.", "-v", metavar="FILE"),
    prediction: Path | None = option(None, "Text that the answer is expected to be, such as OCR's.", metavar="FILE"),
    marks: bool = option(False, "Mark accepted draft tokens: green or ‹ ›, loosely accepted ones yellow or « »."),
    as_json: bool = option(False, "Print one JSON object: models, method, text, tokens, marks, statistics.", "--json"),
    *,
    reading: ReadingOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Answer one question about images, videos or text.

    The answer streams to standard output as its tokens are accepted. Speed, accepted draft tokens and time saved go to
    standard error; for the last of these, a few passes of plain decoding are timed after the answer. Where the
    checkpoint's generation_config samples, so does this command, and says so; `--temperature 0` is greedy.

    Examples:

    - `saccade generate -t pocket -i chart.png "Read the values from the bar chart."`
    - `saccade generate -t Qwen/Qwen2.5-VL-32B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct -i photo.jpg "Describe it."`
      (cost ratio .10, by `saccade predict`)
    - `torchrun --nproc-per-node 2 --no-python saccade generate -t Qwen/Qwen2.5-VL-72B-Instruct --device tp "Hello."`
    """
    from saccade.inputs.processor import check_unicode

    if prompt == "-" and models.device == "tp":
        raise InputError("Standard input cannot be read by several processes; give the question as an argument.")
    question = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not question.strip():
        raise InputError("The question is empty; give it as an argument, or - and write it to standard input.")
    check_unicode(question)
    expected = None if prediction is None else _text(prediction)
    screen.check_media(image or [], video or [])
    decoded = decoding.checked()
    vlm = screen.load_models(named(models))
    if expected is not None and vlm.engine.drafter is None:
        raise InputError(f"The method {vlm.method} drafts from no prediction; leave --prediction out, or -m.")
    sampling = screen.sampled(vlm.target.model.generation_config, decoded, decoding.seed)
    options = {"seed": sampling.get("seed"), **asdict(reading), **decoded}
    stream = vlm.stream(question, image or [], video or [], prediction=expected, **options)  # or refuses to
    if not as_json:
        screen.note_sampling(sampling, decoded)
    painter = None if as_json else screen.Painter(vlm.processor.tokenizer, screen.out(), marks)
    output = screen.answer(stream, painter)
    if as_json:
        print(json.dumps({"target": models.target, **_configured(vlm, models.drafter, sampling), **output.as_dict()}))
    else:
        screen.note(account([output], vlm.method, plain_pass(vlm, options, output)))
    if output.finish_reason == "interrupted":
        raise typer.Exit(130)


def _configured(vlm: VLM, given: str | None, sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the drafter's folder or hub id, its head's name, every option of the method, and what runs."""
    from saccade import methods
    from saccade.loading import name_of
    from saccade.pocket import head_path

    drafter = dtype = None
    if vlm.head is not None:
        drafter, dtype = given or str(head_path(vlm.head.kind)), _name(next(vlm.head.parameters()).dtype)
    elif vlm.draft_model is not None and methods.needs(vlm.options) == "draft model":
        drafter, dtype = name_of(vlm.draft_model.model), _name(vlm.draft_model.dtype)
    chosen = {"drafter": drafter, "head": vlm.head_name, "method": vlm.method, "options": vlm.options}
    dtypes = {"dtype": _name(vlm.target.dtype), "draft_dtype": dtype, "weights": vlm.target.weights}
    return {**chosen, **dtypes, "exact": vlm.target.exact, "executor": vlm.target.executor.name, "sampling": sampling}


def _text(file: Path) -> str:
    """Text of a file without the line break at its end, which answers lack."""
    try:
        return file.read_text("utf-8").removesuffix("\n")
    except (OSError, ValueError) as problem:
        raise InputError(f"Cannot read the prediction {file} ({problem}); give a text file in UTF-8.") from None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


FRESH = 10**6  # seeds below this are held out from training, which draws from it on
LONG = ("chart", "line", "scene")  # tasks with long answers, of whose time reading the picture is a small part
TASKS = (*LONG, "caption", "count", "detail", "document", "existence", "prose", "receipt", "report", "vet")


def demo(
    task: str | None = option(None, f"Picture: {', '.join(TASKS)}; by default one with a long answer."),
    seed: int | None = option(None, "Seed of the picture; by default a new one per run.", min=0, max=FRESH - 1),
    method: str = option("chain", "See `saccade methods`; a chain has 7 tokens.", "-m"),
    save: Path = option("saccade-demo.png", "File to save the picture as.", metavar="FILE"),
    repeats: int = option(2, "Timed runs per method; medians are shown.", min=1),
    dtype: str = option("auto", "Of the target: float32, bfloat16, float16, or auto: float32 on a CPU."),
) -> None:
    """Draw a picture, answer a question about it, and compare time and tokens with plain decoding.

    Uses the pair of small models that comes with the package; nothing is downloaded. Green tokens (or those
    between ‹ and ›) were drafted and accepted; yellow ones (« and ») were accepted by a lossy rule in place of the
    target's own token.
    """
    from saccade.loading import check_dtype
    from saccade.methods import options
    from saccade.pocket import draw

    if task not in (None, *TASKS):
        raise InputError(f"{task!r} is not a task of one picture; choose one of {', '.join(TASKS)}.")
    seed = random.randrange(FRESH) if seed is None else seed
    task = task or random.Random(seed).choice(LONG)
    sample = draw(seed, task)
    chain: dict[str, Any] = {"gamma": 7} if method == "chain" else {}  # the fastest for the built-in pair
    options(method, chain)  # what is unknown is refused before the picture takes an older one's place
    check_dtype(dtype)
    try:
        sample.image.save(save)
    except (OSError, ValueError) as problem:
        raise InputError(f"Cannot save the picture as {save}: {problem}; give --save a file.") from problem
    screen.show(f"A {task}: {save} (draw it again with --task {task} --seed {seed})")

    ours = screen.load_models(ModelSpec("pocket", method=method, dtype=dtype, options=chain))
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
    _report(sample, method, runs, _name(ours.target.dtype))


def _report(sample: Sample, method: str, runs: dict[str, list[Output]], dtype: str) -> None:
    from saccade.bench.records import first_difference
    from saccade.pocket import score

    times = {name: median(output.stats.times.total for output in outputs) for name, outputs in runs.items()}
    rows = []
    for name, (first, *_) in runs.items():
        label, stats, seconds = name if first.lossless else f"{name} (lossy)", first.stats, times[name]
        speeds = [f"{seconds:.3f}", f"{stats.new_tokens / seconds:.0f}", f"{times['plain'] / seconds:.2f}x"]
        rows.append([label, *speeds, stats.target_passes, f"{stats.block_efficiency:.2f}"])
    screen.show("")
    screen.table(["", "seconds", "tokens/s", "speed-up", "target passes", "block efficiency"], rows)
    ours, plain = runs[method][0], runs["plain"][0]
    position = first_difference(ours.tokens, plain.tokens)
    if position is None:
        screen.show(f"All {len(plain.tokens)} tokens are equal to plain decoding's.")
    else:
        why = f"as they may at ties in {dtype}; in float32 all are equal"
        if not ours.lossless:
            why = f"{method} is lossy"
        elif dtype == "float32":
            why = "which is a defect: report it with the output of `saccade doctor`"
        screen.show(f"Tokens differ from plain decoding's from token {position} on; {why}.")
    answers = {"": ours} if ours.text == plain.text else {f", {method}": ours, ", plain": plain}
    for name, output in answers.items():
        facts = score(sample.task, output.text, sample.facts)
        values = ", ".join(f"{fact} {value:.0%}" for fact, value in facts.items())
        screen.show(f"Against the truth{name}: {values}")
