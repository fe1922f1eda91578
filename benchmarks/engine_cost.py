"""What the engine adds to the models it runs: step time against bare forwards, where the rest goes, and memory.

Time: after every step of a chain, the same forwards run again on prepared tensors and a cache of the same content
and size, once through the stock Hugging Face model and once through what the engine uses (the lean decoder where
it has proved equal). Ratios are medians over steps; the replay follows its step at once, so that both meet the
same machine.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import saccade.engine
from pocket_pair import Inputs, add_options, load, prompts
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.policy import Chain, _StaticGrowth
from saccade.engine import Engine, Request
from saccade.generation import plan
from saccade.inputs.batch import split
from saccade.row import Row
from saccade.target.adapter import Target
from saccade.target.cache import SlotCache
from saccade.target.context import Context
from saccade.target.lean import LeanDecoder
from saccade.target.masks import MaskPlan
from saccade.timing import Clock
from saccade.verify.greedy import Greedy
from saccade.verify.processing import Processing

LIMIT = 1.10
"""A step may take this many times its bare forwards."""


# --------------------------------------------------------------------------- bare forwards


@dataclass
class Call:
    """One forward as the engine asked for it."""

    model: Target
    arguments: tuple[torch.Tensor, ...]  # tokens, allow, depth, deltas
    lengths: list[int]
    pending: int
    capacity: int


class Replay:
    """Writes down the forwards of a step and runs them again without the engine."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._shadows: dict[tuple[int, int], SlotCache] = {}
        original = Target.forward

        def forward(model: Target, cache: SlotCache, *arguments: torch.Tensor) -> torch.Tensor:
            self.calls.append(Call(model, arguments, list(cache.lengths), cache.pending, cache.capacity))
            return original(model, cache, *arguments)

        self._original, self._noting = original, forward

    @contextmanager
    def noting(self) -> Iterator[None]:
        Target.forward = self._noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Target.forward = self._original  # type: ignore[method-assign]

    @torch.inference_mode()
    def seconds(self, stock: bool) -> float:
        """Time of the noted forwards alone; masks, positions and cache places are prepared outside the clock."""
        return sum(self._one(call, stock) for call in self.calls)

    def _one(self, call: Call, stock: bool) -> float:
        model = call.model
        tokens, allow, depth, deltas = call.arguments
        key = id(model), call.capacity
        if key not in self._shadows:
            self._shadows[key] = model.new_cache(len(call.lengths), call.capacity)
        cache = self._shadows[key]
        cache.lengths, cache.pending = list(call.lengths), call.pending
        slots = cache.writing_nodes(tokens.shape[1])
        mask = model.family.masks.build(allow, cache.lengths, depth, slots, model.dtype)
        lengths = torch.tensor(cache.lengths, device=model.device)[:, None]
        positions = lengths + deltas + depth[:, depth.shape[1] - tokens.shape[1] :]
        lean = None if stock else model._lean
        started = _now(model.device)
        if lean is None:
            model.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        else:
            lean(tokens, mask, positions, cache)
        return _now(model.device) - started


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_clock = CLOCKS["wall"]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _clock()


# --------------------------------------------------------------------------- where the rest goes


class Spans:
    """Seconds inside chosen functions, those of chosen functions that they call not counted."""

    PARTS: tuple[tuple[Any, str, str], ...] = (
        (LeanDecoder, "__call__", "forwards"),
        (MaskPlan, "build", "attention masks"),
        (SlotCache, "writing_nodes", "cache places"),
        (Target, "forward", "positions, dispatch"),
        (_StaticGrowth, "expand", "children"),
        (_StaticGrowth, "tree", "tree"),
        (ModelDraftSession, "propose", "drafter's own"),
        (Context, "keep", "commit"),
        (Processing, "__call__", "logits processors"),
        (Greedy, "judge", "acceptance rule"),
        (saccade.engine, "_pack", "packing the verdict"),
        (Row, "emit", "rows"),
        (Clock, "add", "clock"),
    )

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = [0.0]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Measure while this is open."""
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.PARTS]
        for owner, name, label in self.PARTS:
            setattr(owner, name, self._measured(owner.__dict__[name], label))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def call(self, label: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """The function's result; its own seconds are added to ``label``."""
        self._inner.append(0.0)
        started = _clock()
        try:
            return function(*arguments, **more)
        finally:
            elapsed = _clock() - started
            self.seconds[label] = self.seconds.get(label, 0.0) + elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def _measured(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        return lambda *arguments, **more: self.call(label, function, *arguments, **more)


# --------------------------------------------------------------------------- runs


@dataclass
class Result:
    """Per step: seconds of the step, of its stock forwards, of the forwards as the engine runs them."""

    step: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


def _start(engine: Engine, inputs: Inputs, new_tokens: int) -> Any:
    asked = split(engine.target.config, inputs)
    return engine.start([Request(p) for p in asked], plan(engine.target, asked, max_new_tokens=new_tokens))


def time_steps(engine: Engine, asked: list[Inputs], new_tokens: int) -> Result:
    """Steps and their bare forwards; the first prompt warms up."""
    result = Result()
    device = engine.target.device
    for number, inputs in enumerate(asked):
        replay, steps = Replay(), _start(engine, inputs, new_tokens).steps
        next(steps)  # prefill
        while True:
            replay.calls.clear()
            with replay.noting():
                started = _now(device)
                step = next(steps, None)
                seconds = _now(device) - started
            if step is None:
                break
            bare, stock = replay.seconds(stock=False), replay.seconds(stock=True)
            if number:
                result.step.append(seconds)
                result.bare.append(bare)
                result.stock.append(stock)
    spans = Spans()
    for inputs in asked[1:]:
        steps = _start(engine, inputs, new_tokens).steps
        next(steps)
        with spans.open():
            while spans.call("step, otherwise", next, steps, None) is not None:
                pass
    result.parts = {k: v / len(result.step) for k, v in spans.seconds.items()}
    return result


def report(result: Result) -> list[str]:
    """Lines to print."""
    lines = [
        f"steps: {len(result.step)}",
        "",
        "| | median ms | step / this: median (quartiles) |",
        "|---|---|---|",
    ]
    for name, values in (
        ("step", result.step),
        ("stock forwards", result.stock),
        ("bare forwards", result.bare),
    ):
        ratios = [s / v for s, v in zip(result.step, values, strict=True)]
        low, mid, high = quantiles(ratios, n=4)
        lines.append(f"| {name} | {median(values) * 1e3:.3f} | {mid:.3f} ({low:.3f}-{high:.3f}) |")
    over = median(s / b for s, b in zip(result.step, result.bare, strict=True))
    lines.append(
        f"\nstep / bare forwards = {over:.3f}, limit {LIMIT:.2f}: {'kept' if over <= LIMIT else 'BROKEN'}\n"
    )
    lines += ["| part of a step | mean us | share |", "|---|---|---|"]
    total = sum(result.parts.values())
    for name, seconds in sorted(result.parts.items(), key=lambda kv: -kv[1]):
        lines.append(f"| {name} | {seconds * 1e6:.0f} | {seconds / total:.1%} |")
    return lines


# --------------------------------------------------------------------------- memory


def memory(engine: Engine, inputs: Inputs, new_tokens: int) -> dict[str, int]:
    """Bytes: weights, KV caches as requested, and the measured peak beyond what was there before."""
    models = [engine.target.model] + (
        [engine.drafter.model.model] if isinstance(engine.drafter, ModelDrafter) else []
    )
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for m in models
        for t in m.state_dict().values()
    }
    device = engine.target.device
    session = engine.open(1)
    asked = split(engine.target.config, inputs)
    before = _reset_peak(device)
    run = engine.start([Request(asked[0])], plan(engine.target, asked, max_new_tokens=new_tokens), session)
    for _ in run.steps:
        pass
    kv = session.context.cache.nbytes
    if isinstance(session.drafting, ModelDraftSession):
        kv += session.drafting.context.cache.nbytes
    peak = _peak(device) - before
    return {
        "weights": sum(storages.values()),
        "kv": kv,
        "peak beyond weights": peak,
        "activations": peak - kv,
    }


def _reset_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    status = Path("/proc/self/clear_refs")
    if status.exists():
        status.write_text("5")  # forget the highest resident size so far
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--gamma", type=int, default=5, help="guesses per step (default: 5)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts that count (default: 4)")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="cpu counts processor time: use it with one thread where other work shares the cores (default: wall)",
    )
    options = parser.parse_args()
    global _clock
    _clock = CLOCKS[options.clock]
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Target(load(options.target, options.target_dtype, options.device))
    draft = Target(load(options.draft, options.draft_dtype, options.device))
    engine = Engine(target, ModelDrafter(draft, Chain(options.gamma)))
    asked = prompts(options.target, options.prompts + 1, "dense", options.target_dtype, options.device)
    used = memory(engine, asked[0], options.new_tokens)
    result = time_steps(engine, asked, options.new_tokens)
    print("\n".join(report(result)))
    print("\n" + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in used.items()))
    if options.json:
        content = {"options": {k: str(v) for k, v in vars(options).items()}, "memory": used, **vars(result)}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
