"""Whole `generate` calls of Hugging Face and of Saccade on the pocket pair, prompt by prompt in one process.

Every contestant answers every prompt once, in an order that rotates from prompt to prompt, so that whatever else the
machine does falls on all of them alike. Ratios are medians of per-prompt ratios (seconds per new token; of a
prompt's repeats the median), with bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import logging

from benchmarks.hf_assisted import assistant
from benchmarks.pocket_pair import Inputs, add_options, load, prompts
from saccade.hf import Speculation, speculate

BASELINE = "hf generate"
CONSTANT = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0,
}
HEURISTIC = {**CONSTANT, "num_assistant_tokens_schedule": "heuristic"}


@dataclass
class Measured:
    """One contestant's answers."""

    seconds: list[float] = field(default_factory=list)  # of the whole call, per prompt
    tokens: list[list[int]] = field(default_factory=list)  # new ones, per prompt
    passes: list[int] = field(default_factory=list)  # target forwards, prefill included, per prompt
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage, summed over prompts; Saccade only
    decoded: int = 0  # tokens after prefill, summed over prompts; Saccade only

    @property
    def per_token(self) -> list[float]:
        return [s / len(t) for s, t in zip(self.seconds, self.tokens, strict=True)]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target forward, prefill included (Hugging Face verifies its first guesses there)."""
        return sum(map(len, self.tokens)) / sum(self.passes)


class Stock:
    """`generate` of a stock model, its target passes counted."""

    def __init__(self, model: Any, draft: Any = None, **settings: Any) -> None:
        self._model, self._draft, self._settings = model, draft, settings
        self._calls = 0
        model.get_output_embeddings().register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._calls += 1

    def __call__(self, inputs: Inputs, new_tokens: int, measured: Measured | None) -> None:
        self._calls = 0
        with (
            nullcontext(self._settings) if self._draft is None else assistant(self._draft, inputs, **self._settings)
        ) as options:
            started = time.perf_counter()
            sequences = self._model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **options)
            (ids,) = sequences.tolist()  # waits for the device
            seconds = time.perf_counter() - started
        if measured is not None:
            measured.seconds.append(seconds)
            measured.tokens.append(ids[inputs["input_ids"].shape[1] :])
            measured.passes.append(self._calls)


class Ours:
    """`generate` with `custom_generate`."""

    def __init__(self, model: Any, speculation: Speculation) -> None:
        self._model, self._speculation = model, speculation

    def __call__(self, inputs: Inputs, new_tokens: int, measured: Measured | None) -> None:
        started = time.perf_counter()
        self._model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, custom_generate=self._speculation)
        seconds = time.perf_counter() - started
        if measured is not None:
            (output,) = self._speculation.outputs
            measured.seconds.append(seconds)
            measured.tokens.append(output.tokens)
            measured.passes.append(output.stats.target_passes + 1)
            measured.decoded += output.stats.decoded_tokens
            for name, value in output.stats.as_dict()["seconds"].items():
                measured.stages[name] = measured.stages.get(name, 0.0) + value


Contestant = Callable[[Inputs, int, Measured | None], None]


def contestants(options: argparse.Namespace) -> dict[str, Contestant]:
    """Everything that can be compared, by name. Hugging Face and Saccade have a target and a drafter each."""
    stock = load(options.target, options.target_dtype, options.device)
    stock_draft = load(options.draft, options.draft_dtype, options.device)
    target = load(options.target, options.target_dtype, options.device)
    draft = load(options.draft, options.draft_dtype, options.device)

    def ours(drafter: Any, method: str, **settings: Any) -> Ours:
        return Ours(target, speculate(drafter, method, **settings))

    return {
        BASELINE: Stock(stock),
        "hf assisted 5, blind": Stock(stock, stock_draft, sees=False, **CONSTANT),
        "hf assisted 5": Stock(stock, stock_draft, sees=True, **CONSTANT),
        "hf assisted heuristic": Stock(stock, stock_draft, sees=True, **HEURISTIC),
        "hf assisted default": Stock(stock, stock_draft, sees=True),
        "hf prompt lookup": Stock(stock, prompt_lookup_num_tokens=10),
        "plain": ours(None, "plain"),
        "auto": ours(draft, "auto"),
        "chain 3": ours(draft, "chain", gamma=3),
        "chain 5": ours(draft, "chain", gamma=5),
        "chain 7": ours(draft, "chain", gamma=7),
        "static tree": ours(draft, "static-tree"),
        "dynamic tree 20": ours(draft, "dynamic-tree", top=4, max_depth=5, total=20),
        "prompt lookup": ours(None, "prompt-lookup"),
    }


def measure(
    running: dict[str, Contestant], asked: Sequence[Inputs], new_tokens: int, repeats: int
) -> dict[str, Measured]:
    """Let everyone answer every prompt; the first prompt is for warming up and not counted."""
    results = {name: Measured() for name in running}
    for contestant in running.values():
        contestant(asked[0], new_tokens, None)
    names = list(running)
    for number, inputs in enumerate(list(asked[1:]) * repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            running[name](inputs, new_tokens, results[name])
    return results


def ratio(slow: Measured, fast: Measured, repeats: int = 1, draws: int = 2000) -> tuple[float, float, float]:
    """Median of per-prompt ratios of seconds per token, with its 95 % bootstrap interval over prompts."""
    ratios = np.median((np.array(slow.per_token) / np.array(fast.per_token)).reshape(repeats, -1), axis=0)
    picked = np.random.default_rng(0).integers(0, len(ratios), (draws, len(ratios)))
    low, high = np.percentile(np.median(ratios[picked], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def table(results: dict[str, Measured], repeats: int = 1) -> list[str]:
    """Markdown lines; ``repeats`` as in `ratio`."""
    base = results[BASELINE]
    assisted = [m for name, m in results.items() if name.startswith("hf assisted")]
    best = min(assisted, key=lambda m: median(m.per_token), default=None)
    lines = [
        "| method | tokens/s | x hf generate (95 %) | x best hf assisted (95 %) | decoding, x plain | "
        "tokens per pass | equal tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        ratios = [ratio(base, one, repeats), ratio(best, one, repeats) if best else None]
        cells = ["-" if r is None else f"{r[0]:.2f} ({r[1]:.2f}-{r[2]:.2f})" for r in ratios]
        equal = sum(a == b for a, b in zip(one.tokens, base.tokens, strict=True))
        speed = 1 / median(one.per_token)
        lines.append(
            f"| {name} | {speed:.1f} | {cells[0]} | {cells[1]} | {_decoding(results, one)} | "
            f"{one.tokens_per_pass:.2f} | {equal}/{len(base.tokens)} |"
        )
    return lines


def _decoding(results: dict[str, Measured], one: Measured) -> str:
    """Tokens a second after prefill, over those of the engine's plain decoding, by sums."""
    plain = results.get("plain")
    if plain is None or not one.stages:
        return "-"
    rates = [contestant.decoded / contestant.stages["decode"] for contestant in (one, plain)]
    return f"{rates[0] / rates[1]:.2f}"


def main() -> None:
    """Measure, print the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--prompts", type=int, default=24, help="prompts that count (default: 24)")
    parser.add_argument("--repeats", type=int, default=1, help="answers per prompt and method (default: 1)")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--grammar", default="dense", choices=("dense", "verbose"))
    parser.add_argument("--methods", nargs="+", help=f"names from the table; {BASELINE} always runs (default: all)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    running = contestants(options)
    if options.methods:
        unknown = set(options.methods) - set(running)
        if unknown:
            parser.error(f"unknown methods {sorted(unknown)}; expected some of {list(running)}")
        running = {n: c for n, c in running.items() if n == BASELINE or n in options.methods}
    asked = prompts(options.target, options.prompts + 1, options.grammar, options.target_dtype, options.device)
    results = measure(running, asked, options.new_tokens, options.repeats)
    print("\n".join(table(results, options.repeats)))
    if options.json:
        content = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "threads": torch.get_num_threads(),
            "results": {name: asdict(one) for name, one in results.items()},
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
