"""`saccade demo`: one answer of the built-in pair about a new picture, compared with plain decoding."""

from __future__ import annotations

import os
import random
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from saccade.cli import screen
from saccade.cli.option_groups import option, spread
from saccade.errors import InputError

if TYPE_CHECKING:
    from saccade.output import Output
    from saccade.pocket import Sample
    from saccade.vlm import VLM

FRESH = 10**6
"""Seeds below this are held out from training, which draws from it on."""
_WARM_UP = 8
"""New tokens of the answers before the timed ones: prefill, drafts and commits have run by then."""
LONG = ("chart", "line", "scene")
"""Tasks of one picture with the longest answers, of those that the built-in target reads well: reading the picture,
which no drafting shortens, is a small part of their time."""
GAMMA = 7
"""Draft tokens of a chain, with which it was fastest for the built-in pair (docs/measurements.md)."""
PROMISED = 2.0
"""Times plain decoding's speed below which the demo says why."""
TIE = 4
"""Relative roundings within which two logits count as equal: every layer adds one of its own."""


@spread
def demo(
    task: str | None = option(
        None,
        "chart, line or scene, by default one of these at random; also caption, count, detail, document, existence, "
        "prose, receipt, report or vet.",
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
    chain: dict[str, Any] = {"gamma": GAMMA} if method == "chain" else {}
    options(method, chain)  # what is unknown is refused before the picture takes an older one's place
    check_dtype(dtype)
    if save.is_dir():
        raise InputError(f"{save} is a folder; give --save a file, such as {save / 'saccade-demo.png'}.")
    try:
        sample.image.save(save)
    except (OSError, ValueError) as problem:
        raise InputError(f"Cannot save the picture as {save}: {problem}") from problem
    console = screen.out()
    console.print(f"A {task}: {save} (draw it again with --task {task} --seed {seed})", markup=False)

    ours = screen.load_models("pocket", None, method, dtype=dtype, threads=threads, exact=exact, **chain)
    plain = ours.using("plain")
    with screen.waiting("Warming up"):
        for vlm in (plain, ours):
            vlm.generate(sample.question, [sample.image], max_new_tokens=_WARM_UP)

    console.print(f"\nQuestion: {sample.question}\nAnswer:   ", end="", markup=False)
    stream = ours.stream(sample.question, [sample.image])
    screen.answer(stream, screen.Painter(ours.processor.tokenizer, console, marked=True))
    runs: dict[str, list[Output]] = {"plain": [], method: []}
    with screen.waiting("Timing both, in turn"):
        for _ in range(repeats):
            runs["plain"].append(_answer(plain, sample))
            runs[method].append(_answer(ours, sample))
    _report(console, sample, method, runs, _comparison(ours, sample, runs[method][0], runs["plain"][0]))
    if (busy := cpu.busy_cores()) >= 0.5:
        console.print(
            f"Other programs keep {busy:.1f} of {os.cpu_count()} cores busy: times are longer, and vary more, "
            "than on an idle machine."
        )


def _shows_one_picture(sample: Sample) -> bool:
    return len(sample.images) == 1 and not sample.turns


def _answer(vlm: VLM, sample: Sample) -> Output:
    output: Output = vlm.generate(sample.question, [sample.image])
    return output


def _comparison(vlm: VLM, sample: Sample, ours: Output, plain: Output) -> str:
    """A sentence on whether a method's tokens are plain decoding's, and why not."""
    import torch

    from saccade.bench.records import first_difference
    from saccade.bench.runner import logits_after
    from saccade.inputs.prompt import Prompt

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
    name = str(dtype).removeprefix("torch.")
    return (
        f"{differ}: the target's two best logits there, {best:.2f} and {second:.2f}, tie within {name}'s rounding, "
        "and a pass over several tokens rounds otherwise than a pass over one; --exact makes all tokens equal."
    )


def _report(console: Any, sample: Sample, method: str, runs: dict[str, list[Output]], comparison: str) -> None:
    from rich.table import Table

    from saccade.pocket import score

    table = Table("", "seconds", "tokens/s", "speed-up", "target passes", "block efficiency", box=None, pad_edge=False)
    base = median(o.stats.times.total for o in runs["plain"])
    for name, outputs in runs.items():
        seconds = median(o.stats.times.total for o in outputs)
        stats = outputs[0].stats
        table.add_row(
            name if outputs[0].lossless else f"{name} (lossy)",
            f"{seconds:.3f}",
            f"{stats.new_tokens / seconds:.0f}",
            f"{base / seconds:.2f}x",
            str(stats.target_passes),
            f"{stats.block_efficiency:.2f}",
        )
    console.print()
    console.print(table)
    seconds = median(o.stats.times.total for o in runs[method])
    if method != "plain" and base < PROMISED * seconds:
        console.print(_why(runs["plain"], runs[method]), markup=False)
    ours, plain = runs[method][0], runs["plain"][0]
    console.print(comparison, markup=False)
    if not ours.lossless:
        console.print(f"{method} is lossy: it may change the answer.", markup=False)
    for name in (method, "plain") if ours.text != plain.text else (method,):
        facts = score(sample.task, runs[name][0].text, sample.facts)
        whose = f", {name}" if ours.text != plain.text else ""
        console.print(
            f"Against the truth{whose}: " + ", ".join(f"{n} {value:.0%}" for n, value in facts.items()),
            markup=False,
        )


def _why(plain: list[Output], ours: list[Output]) -> str:
    """A sentence on what keeps a method below twice plain decoding's speed."""

    def typical(name: str, outputs: list[Output]) -> float:
        return median(float(getattr(o.stats.times, name)) for o in outputs)

    stats, total = ours[0].stats, typical("total", ours)
    reading = sum(typical(name, ours) for name in ("vision", "prefill", "draft_prefill"))
    passes = [typical("verify", o) / max(1, o[0].stats.target_passes) for o in (ours, plain)]
    drafted = 1 + stats.drafted_tokens / max(1, stats.target_passes)
    read, drafting = reading / total, typical("draft", ours) / total
    parts = [f"{read:.0%} of its time goes into reading the picture and {drafting:.0%} into drafting"]
    if passes[1]:
        parts.append(
            f"a pass over {drafted:.0f} tokens takes {passes[0] / passes[1]:.1f} times as long as over one here"
        )
    parts.append(f"{stats.block_efficiency:.1f} tokens come of a pass")
    return f"Less than {PROMISED:.0f}x: {'; '.join(parts)}."
