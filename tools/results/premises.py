"""`python -m tools.results premises`: the premises of five papers, measured on a pair before anything is trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from saccade.bench import cost, questions
from saccade.bench.answering import answer_turns
from saccade.bench.metrics import Array
from saccade.bench.suites import parse
from saccade.cli import screen
from saccade.cli.option_groups import PairOptions, option, spread
from saccade.errors import InputError, SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.pocket import WORLD
from saccade.pocket.labels import LABEL_WORDS
from saccade.pocket.words import NUMBERS
from saccade.train.recipe import read_recipe
from saccade.train.warm_start import new_head
from saccade.vlm import VLM
from tools.results.expectations import PAPERS, dream, hivis, lvspec, sage, tabed
from tools.results.probe import GAMMA, Answer, Names, Probe

HEADS = ("hivis", "dream")  # heads whose steps are timed, with fresh weights
Found = tuple[dict[str, Any], str]  # numbers by name, and the expectation: win, level, lose, or why it was not measured
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def lexicon(decode: Callable[[list[int]], str]) -> Names:
    """The pocket world's words for what a picture shows, and digits."""
    words = {word.lower() for words in (*LABEL_WORDS.values(), NUMBERS) for word in words}

    def names(tokens: list[int]) -> Array:
        pieces = [decode([token]) for token in tokens]
        owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])  # by character
        found = np.zeros(len(tokens), bool)
        for match in re.finditer(r"[a-z]+|[0-9]+", "".join(pieces).lower()):
            if match[0].isdigit() or {match[0], match[0].removesuffix("s")} & words:
                found[owner[match.start() : match.end()]] = True
        return found

    return names


def measure(
    vlm: VLM, asked: Sequence[questions.Question], longest: int, update: Callable[..., None]
) -> tuple[dict[str, Found], int]:
    """Numbers and expectation by method, and the number of answers."""
    probe, answers, stats = Probe(vlm), list[Answer](), list[dict[str, Any]]()
    has_views, names = bool(probe.views), lexicon(vlm.processor.tokenizer.decode)
    answering = vlm.using("chain", gamma=GAMMA) if has_views else vlm.using("plain")
    options = {"max_new_tokens": longest, "do_sample": False}
    for number, question in enumerate(asked):
        update(number, len(asked), question.id)
        prompt = vlm.processor.prompt(question.turns[0].messages, options=MediaOptions(**question.reading))
        if prompt.media:
            record = answer_turns(answering, "", question, 0, options=options, seed=0)[0].record
            if len(record.tokens) > 2:
                stats.append(record.stats)
                answers.append(probe.read(prompt, record.tokens, names if question.task in WORLD else None))
                last = prompt
    if not answers:
        raise InputError("No prompt has a picture and an answer of three tokens; choose others with --prompts.")
    update(len(asked), len(asked), "timing steps")
    heads = {}
    for kind in HEADS:
        try:
            heads[kind] = new_head(vlm.target, read_recipe(kind)).eval().to(vlm.target.dtype)
        except SaccadeError as problem:
            screen.warn(f"{kind}: {problem}")
    draft = vlm.draft_model if has_views else None
    costs = cost.measure(vlm.target, last, draft, vlm.processor.text_only(last), (GAMMA + 1,), heads)
    lacks: Found = {}, "not measured: there is no draft VLM; give one with --drafter"
    found = {
        "HiViS": hivis(probe.moments),
        "SAGE": sage(answers) if has_views else lacks,
        "LVSpec": lvspec(answers) if has_views else lacks,
        "TABED": tabed(answers, probe.lacking) if has_views else lacks,
        "DREAM": dream(costs, answers if has_views else [], stats),
    }
    return found, len(answers)


@app.command()
@spread
def premises(
    *,
    prompts: str = option(
        "scene,chart,receipt,prose,video,story",
        "Pocket tasks, .jsonl files and data sets, as of `saccade bench`.",
        metavar="A,B,C",
    ),
    count: int = option(8, "Prompts of each.", min=1),
    max_new_tokens: int = option(128, "Longest answer.", "-n", min=3),
    seed: int = option(0, "Seed of the pocket's pictures.", min=0),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
    models: PairOptions,
) -> None:
    """Measure the five papers' premises on a pair, and say which method to expect to win.

    The target must take pictures; the built-in pair is the default. Without a draft VLM the modality gap and the cost
    of a head are measured. Nothing is trained.

    Example: `python -m tools.results premises -t Qwen/Qwen2.5-VL-32B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct`
    """
    tasks = [_task(each.strip()) for each in dict.fromkeys(prompts.split(","))]
    suite = parse({"tasks": tasks, "methods": ["plain"], "per_task": count, "seed": seed}, "premises", "--prompts")
    asked = [question for group in questions.gather(suite)[0].values() for question in group]
    vlm = screen.load_models(replace(models, target=models.target or "pocket"))
    if not vlm.target.family.visual_ids:
        raise InputError("The target takes no pictures, which the premises are about; give a VLM with --target.")
    with screen.progress("prompts") as update:
        found, answers = measure(vlm, asked, max_new_tokens, update)
    if as_json:
        keys = ("over", "premise", "rule")
        methods = {
            name: {**dict(zip(keys, PAPERS[name], strict=True)), "expected": expected, "measured": numbers}
            for name, (numbers, expected) in found.items()
        }
        line = json.dumps({"answers": answers, "methods": methods}, default=lambda e: [e.value, e.low, e.high])
        screen.show(re.sub(r"\bNaN\b", "null", line))
        return
    for name, (numbers, expected) in found.items():
        over, premise, rule = PAPERS[name]
        screen.facts(f"{name}: {premise}", {each: _worded(value) for each, value in numbers.items()})
        screen.show(f"  Expected: {expected}, over {over}; {rule}.", "")
    words = (f"{name} {expected.partition(':')[0]}" for name, (_, expected) in found.items())
    screen.show(f"From {answers} answers: {', '.join(words)}.")


def _task(name: str) -> dict[str, Any]:
    if name in WORLD:
        return {"task": name}
    source = "file" if name.endswith(".jsonl") else "dataset"
    return {"name": Path(name).stem, source: name, "turns": 1}


def _worded(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{each:.3g}" for each in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
