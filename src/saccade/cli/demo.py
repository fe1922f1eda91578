"""`saccade demo`: one answer of the built-in pair about a new picture, compared with plain decoding."""

from __future__ import annotations

import os
import random
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.errors import InputError

if TYPE_CHECKING:
    from saccade.output import Output
    from saccade.pocket import Sample
    from saccade.vlm import VLM

FRESH = 10**6
"""Seeds below this are held out from training, which draws from it on."""
_WARM_UP = 8
"""New tokens of the answers before the timed ones: prefill, drafts and commits have run by then."""
READ_WELL = ("caption", "chart", "line", "receipt", "scene")
"""Tasks of one picture on which the built-in target is most accurate."""


def demo(
    task: Annotated[
        str | None,
        typer.Option(
            help="caption, chart, line, receipt or scene, one of these at random by default; also count, detail, "
            "document, existence or vet."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the picture; by default a new one per run.")] = None,
    method: Annotated[str, typer.Option("--method", "-m", help="See `saccade methods`.")] = "chain",
    save: Annotated[Path, typer.Option(metavar="FILE", help="File to save the picture as.")] = Path("saccade-demo.png"),
    repeats: Annotated[int, typer.Option(help="Timed runs per method; medians are shown.")] = 2,
    threads: args.Threads = None,
    exact: args.Exact = False,
) -> None:
    """Draw a picture, answer a question about it, and compare time and tokens with plain decoding.

    Uses the pair of small models that comes with the package; nothing is downloaded. Green tokens (or those
    between ‹ and ›) were drafted and accepted; yellow ones (« and ») were accepted by a lossy rule in place of the
    target's own token.
    """
    from saccade import cpu
    from saccade.pocket import WORLD, draw

    if repeats < 1:
        raise InputError(f"--repeats must be at least 1, not {repeats}.")
    trained = (name for name in WORLD if WORLD[name].share)
    tasks = sorted(name for name in trained if _shows_one_picture(draw(0, name)))
    if task is not None and task not in tasks:
        raise InputError(f"{task!r} is not a task of one picture; choose one of {', '.join(tasks)}.")
    seed = random.randrange(FRESH) if seed is None else seed
    if not 0 <= seed < FRESH:
        raise InputError(f"--seed must be from 0 to {FRESH - 1}; greater ones were used for training.")
    task = task or random.Random(seed).choice(READ_WELL)
    sample = draw(seed, task)
    try:
        sample.image.save(save)
    except (OSError, ValueError) as problem:
        raise InputError(f"Cannot save the picture as {save}: {problem}") from problem
    console = screen.out()
    console.print(f"A new {task}: {save} (draw it again with --task {task} --seed {seed})", markup=False)

    ours = screen.load_models("pocket", None, method, threads=threads, exact=exact)
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
    _report(console, sample, method, runs)
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


def _report(console: Any, sample: Sample, method: str, runs: dict[str, list[Output]]) -> None:
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
    from saccade.bench.check import first_difference

    ours, plain = runs[method][0], runs["plain"][0]
    if ours.tokens == plain.tokens:
        console.print(f"All {len(plain.tokens)} tokens are equal to plain decoding's.")
    else:
        same = first_difference(ours.tokens, plain.tokens)
        console.print(f"Tokens differ from plain decoding's from token {same} on.")
    if not ours.lossless:
        console.print(f"{method} is lossy: it may change the answer.", markup=False)
    for name in (method, "plain") if ours.text != plain.text else (method,):
        facts = score(sample.task, runs[name][0].text, sample.facts)
        whose = f", {name}" if ours.text != plain.text else ""
        console.print(
            f"Against the truth{whose}: " + ", ".join(f"{n} {value:.0%}" for n, value in facts.items()),
            markup=False,
        )
