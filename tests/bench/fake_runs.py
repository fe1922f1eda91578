"""Benchmark runs without models: plausible answers, trees, times and scores, written as the runner writes them.

What a method answers and accepts depends on the prompt only; `seed` moves nothing but the clock. So two runs that
differ in `seed` are two runs of one configuration.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from saccade.bench.records import FILE, Header, LineFile, Record, RecordedRun
from saccade.output import Stats, Times

TEXT = """a the of on and red blue green small large circle square triangle left right above below chart bar axis
value receipt total item price shows reads next to with behind three four seven picture"""
WORDS = TEXT.split()
HOSTILE = "</script><script>window.onerror('x')</script><img src=x onerror=alert(1)> | *pipes* & `ticks`"
"""Text that breaks a page or a Markdown table which does not escape it."""


@dataclass(frozen=True)
class Way:
    """How a made-up method behaves: chance that a depth is accepted, tree form, seconds per drafted level."""

    accepts: float = 0.0
    depth: int = 0
    width: int = 1
    level_seconds: float = 0.0
    loosens: float = 0.0
    lossless: bool = True


WAYS: Mapping[str, Way] = {
    "plain": Way(),
    "chain": Way(accepts=0.72, depth=5, level_seconds=0.002),
    "dynamic-tree": Way(accepts=0.84, depth=6, width=4, level_seconds=0.003),
    "prompt-lookup": Way(accepts=0.35, depth=10, level_seconds=0.00002),
    "lvspec": Way(accepts=0.88, depth=10, level_seconds=0.002, loosens=0.25, lossless=False),
    "fly": Way(accepts=0.8, depth=10, level_seconds=0.002, loosens=0.12, lossless=False),
}
PASS_SECONDS, NODE_SECONDS, PREFILL_SECONDS, VISION_SECONDS = 0.021, 0.00015, 0.05, 0.02


def write_run(folder: Path, **settings: Any) -> Path:
    """Write a whole run with its pictures; the settings are those of `make_run`."""
    run = make_run(folder, **settings)
    (folder / "media").mkdir(parents=True)
    for name in {name for record in run.records for name in record.media}:
        picture(name).save(folder / "media" / name)
    with LineFile(folder / FILE) as file:
        file.begin(run.header)
        for record in run.records:
            file.add_record(record)
    return folder


def make_run(
    folder: Path = Path("run"),
    *,
    seed: int = 0,
    prompts: int = 12,
    repeats: int = 3,
    methods: Sequence[str] = tuple(WAYS),
    traced: int = 0,
    slower: Mapping[str, float] | None = None,
    first_prompt: int = 0,
    hostile: bool = False,
    noise: float = 0.04,
    drift: float = 0.02,
) -> RecordedRun:
    """A run as it would be read back.

    ``seed`` is of the clock's noise, ``noise`` and ``drift`` are its spreads; ``traced`` prompts carry trees and a
    picture; ``slower`` has factors on the times of methods; a ``hostile`` first question tries to break the page.
    """
    clock = Clock(Random(f"clock/{seed}"), noise, drift)
    records = []
    for repeat in range(repeats):
        for number in range(first_prompt, first_prompt + prompts):
            trace = number < first_prompt + traced
            task = ("scene", "chart")[number % 2]
            prompt = Prompt(f"{task}-{number}", task, hostile and number == first_prompt)
            for method in methods:
                factor = (slower or {}).get(method, 1.0)
                records.append(answer(prompt, method, repeat, clock, factor, trace))
    return RecordedRun(folder, header(methods, prompts, repeats), records, [])


class Clock:
    """Times with what real ones have: spread, a machine whose speed wanders, and now and then an interruption."""

    def __init__(self, rng: Random, noise: float, drift: float) -> None:
        self._rng, self._noise, self._drift = rng, noise, drift
        self._speed = rng.gauss(0, drift)

    def tick(self) -> None:
        """One answer later."""
        self._speed = 0.95 * self._speed + self._rng.gauss(0, self._drift * (1 - 0.95**2) ** 0.5)

    def times(self, stats: Stats, way: Way, factor: float) -> Times:
        """Seconds for what was counted."""
        self.tick()
        times = Times(
            vision=self.seconds(VISION_SECONDS) * factor,
            prefill=self.seconds(PREFILL_SECONDS) * factor,
            draft_prefill=self.seconds(0.01) * factor if way.level_seconds > 0.001 else 0.0,
            draft=self.seconds(way.level_seconds * way.depth * stats.target_passes) * factor,
            verify=self.seconds(PASS_SECONDS * stats.target_passes + NODE_SECONDS * stats.drafted_tokens) * factor,
        )
        times.total = (times.vision + times.prefill + times.draft_prefill + times.draft + times.verify) * 1.02
        return times

    def seconds(self, mean: float) -> float:
        interrupted = 1 + self._rng.expovariate(4) if self._rng.random() < 0.03 else 1.0
        noisy: float = mean * 2.718281828 ** (self._speed + self._rng.gauss(0, self._noise)) * interrupted
        return noisy


@dataclass(frozen=True)
class Prompt:
    """A question with the answer that plain decoding gives."""

    name: str
    task: str
    hostile: bool

    @cached_property
    def tokens(self) -> list[int]:
        rng = Random(f"answer/{self.name}")
        return [rng.randrange(len(WORDS)) for _ in range(rng.randint(30, 60))]


def answer(prompt: Prompt, method: str, repeat: int, clock: Clock, factor: float = 1.0, trace: bool = False) -> Record:
    """One record."""
    way = WAYS[method]
    rng = Random(f"accept/{prompt.name}/{method}")
    plain = prompt.tokens
    tokens, marks, stats, trees = plain[:1], ["target"], Stats(prompt_tokens=90, prefill_tokens=1), []
    histogram = [0] * (way.depth + 1)
    while len(tokens) < len(plain):
        accepted = 0
        step: list[int] = []
        for depth in range(min(way.depth, len(plain) - len(tokens) - 1)):
            if rng.random() > way.accepts:
                break
            token, mark = plain[len(tokens) + depth], "draft"
            if rng.random() < way.loosens:
                token, mark = rng.choice([(rng.randrange(len(WORDS)), "loose"), (token, "shifted")])
            step.append(token)
            marks.append(mark)
            accepted += 1
        tree = {"start": len(tokens), **draft_tree(rng, tokens[-1], step, way)}
        stats.drafted_tokens += len(tree["tokens"]) - 1
        tokens += [*step, plain[len(tokens) + len(step)]]
        marks.append("target")
        trees.append(tree)
        histogram[accepted] += 1
        stats.target_passes += 1
        stats.accepted_tokens += accepted
    stats.new_tokens = len(tokens)
    stats.accepted_histogram = histogram
    stats.times = clock.times(stats, way, factor)
    pieces = [piece(t) for t in tokens]
    if prompt.hostile:
        pieces[0] = HOSTILE
    wrong = sum(a != b for a, b in zip(tokens, plain, strict=True)) / len(plain)
    right = 0.9 + 0.1 * (zlib.crc32(prompt.name.encode()) % 3 - 1)
    return Record(
        prompt_id=prompt.name,
        task=prompt.task,
        method=method,
        repeat=repeat,
        question=HOSTILE if prompt.hostile else "What does the picture show, and where?",
        media=[f"{prompt.name}.png"] if trace else [],
        text="".join(pieces),
        tokens=tokens,
        marks=marks,
        pieces=pieces,
        finish_reason="length",
        lossless=way.lossless,
        stats=stats.as_dict(),
        scores={"facts": max(0.0, right - 0.5 * wrong), "colour": max(0.0, right - 0.8 * wrong)},
        equal=None if method == "plain" else tokens == plain,
        difference=None,
        peak_bytes=600_000_000 + 20_000_000 * way.width,
        trees=trees if trace and repeat == 0 else [],
    )


def draft_tree(rng: Random, root: int, path: list[int], way: Way) -> dict[str, Any]:
    """A tree with the accepted tokens on its first branch and others beside and below them."""
    tokens, parents, levels = [root], [0], [[0]]
    accepted = [0]
    for depth in range(way.depth):
        level = []
        for rank in range(way.width):
            parent = accepted[-1] if len(accepted) > depth else levels[-1][0]
            if rank:
                parent = rng.choice(levels[-1])
            on_path = rank == 0 and depth < len(path)
            tokens.append(path[depth] if on_path else rng.randrange(len(WORDS)))
            parents.append(parent)
            level.append(len(tokens) - 1)
            if on_path:
                accepted.append(level[-1])
        levels.append(level)
    return {"tokens": tokens, "parents": parents, "path": accepted, "pieces": [piece(t) for t in tokens]}


def piece(token: int) -> str:
    return " " + WORDS[token]


def picture(name: str) -> Image.Image:
    """A picture of one colour."""
    rng = Random(f"picture/{name}")
    return Image.new("RGB", (96, 96), (rng.randrange(220), rng.randrange(220), rng.randrange(220)))


def header(methods: Sequence[str], prompts: int, repeats: int) -> Header:
    """What the runner writes first."""
    return Header(
        suite="pocket",
        config={"methods": [described(name) for name in methods], "prompts": prompts, "repeats": repeats},
        models={
            "target": {"name": "pocket", "parameters": 4_600_000, "dtype": "float32"},
            "drafter": {"name": "pocket-draft", "parameters": 620_000, "dtype": "float32"},
            "heads": {},
        },
        environment={"saccade": "0.1.0", "torch": "2.13.0", "device": "cpu", "threads": 2},
        started="2026-01-01T12:00:00+00:00",
        costs={
            "kv": 90,
            "target": {str(n): PASS_SECONDS + NODE_SECONDS * (n - 1) for n in (1, 2, 4, 8, 16, 32)},
            "draft": {str(n): 0.002 for n in (1, 2, 4, 8)},
            "heads": {},
        },
    )


def described(method: str) -> dict[str, Any]:
    """A method as the runner's configuration has it."""
    way = WAYS[method]
    return {
        "name": method,
        "label": method,
        "options": {},
        "lossless": way.lossless,
        "needs": "draft model" if way.level_seconds > 0.001 else "nothing",
        "max_nodes": 1 + way.depth * way.width,
        "max_depth": way.depth,
    }
