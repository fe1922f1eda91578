"""Overhead of the engine: step time against bare forwards, the parts of the rest, and memory.

Time: after every step of a chain, the same forwards run again on prepared tensors and a cache of the same size, once
through the stock Hugging Face model and once through the lean decoder that the engine uses. Ratios are medians over
steps; the replay follows its step at once, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.clock import Clock
from benchmarks.pocket_pair import Inputs, add_options, add_step_options, load, prompts
from benchmarks.replay import Replay
from benchmarks.spans import Spans
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.generation import plan
from saccade.inputs.batching import split
from saccade.target.adapter import Target

LIMIT = 1.10
"""A step may take this many times its bare forwards."""


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


def time_steps(engine: Engine, asked: list[Inputs], new_tokens: int, clock: Clock) -> Result:
    """Steps and their bare forwards; the first prompt warms up."""
    result = Result()
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    for number, inputs in enumerate(asked):
        replay, steps = (
            Replay([engine.target, drafter.model], clock),
            _start(engine, inputs, new_tokens).steps,
        )
        next(steps)  # the pass that ends the prompt, with the first guesses
        while True:
            with replay.noting():
                started = clock()
                step = next(steps, None)
                seconds = clock() - started
            if step is None:
                break
            bare, stock = replay.seconds(stock=False), replay.seconds(stock=True)
            if number:
                result.step.append(seconds)
                result.bare.append(bare)
                result.stock.append(stock)
    spans = Spans(clock)
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
    lines.append(f"\nstep / bare forwards = {over:.3f}, limit {LIMIT:.2f}: {'kept' if over <= LIMIT else 'BROKEN'}\n")
    lines += ["| part of a step | mean us | share |", "|---|---|---|"]
    total = sum(result.parts.values())
    for name, seconds in sorted(result.parts.items(), key=lambda kv: -kv[1]):
        lines.append(f"| {name} | {seconds * 1e6:.0f} | {seconds / total:.1%} |")
    return lines


# --------------------------------------------------------------------------- memory


def memory(engine: Engine, inputs: Inputs, new_tokens: int) -> dict[str, int]:
    """Bytes: weights, KV caches as requested, and the measured peak beyond what was there before."""
    models = [engine.target.model] + ([engine.drafter.model.model] if isinstance(engine.drafter, ModelDrafter) else [])
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in models for t in m.state_dict().values()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_step_options(parser, prompts=4)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Target(load(options.target, options.target_dtype, options.device))
    draft = Target(load(options.draft, options.draft_dtype, options.device))
    engine = Engine(target, ModelDrafter(draft, Chain(options.gamma)))
    asked = prompts(options.target, options.prompts + 1, "dense", options.target_dtype, options.device)
    used = memory(engine, asked[0], options.new_tokens)
    result = time_steps(engine, asked, options.new_tokens, Clock(options.clock, target.device))
    print("\n".join(report(result)))
    print("\n" + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in used.items()))
    if options.json:
        content = {"options": {k: str(v) for k, v in vars(options).items()}, "memory": used, **vars(result)}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
