"""Whole `generate` calls of Hugging Face and of Saccade on the pocket pair, prompt by prompt in one process.

Every contestant answers every prompt once, in an order that rotates from prompt to prompt, so that whatever else the
machine does falls on all of them alike. Ratios are medians of per-prompt ratios (seconds per new token; of a
prompt's repeats the median), with bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from benchmarks import pocket_pair
from benchmarks.pocket_pair import FIRST_SEED, Inputs, load, rotated
from saccade.bench.metrics import median_estimate
from saccade.hf import Speculation, speculate
from saccade.loading import load_processor
from saccade.pocket import draw
from tools.pocket.world import FIRST_TASKS

BASELINE = "hf generate"
_CONSTANT = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0,
}
STOCK: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "hf assisted 5, blind": {"sees": False, **_CONSTANT},
    "hf assisted 5": {"sees": True, **_CONSTANT},
    "hf assisted heuristic": {"sees": True, **_CONSTANT, "num_assistant_tokens_schedule": "heuristic"},
    "hf assisted default": {"sees": True},
    "hf prompt lookup": {"prompt_lookup_num_tokens": 10},
}
"""Settings of Hugging Face's `generate`; with ``sees`` the draft model assists."""
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "auto": ("auto", {}),
    "chain 3": ("chain", {"gamma": 3}),
    "chain 5": ("chain", {"gamma": 5}),
    "chain 7": ("chain", {"gamma": 7}),
    "static tree": ("static-tree", {}),
    "dynamic tree 20": ("dynamic-tree", {"top": 4, "max_depth": 5, "total": 20}),
    "prompt lookup": ("prompt-lookup", {}),
}
"""Methods with their options."""


@dataclass
class Measured:
    """One contestant's answers."""

    seconds: list[float] = field(default_factory=list)  # of the whole call, per prompt
    tokens: list[list[int]] = field(default_factory=list)  # new ones, per prompt
    passes: list[int] = field(default_factory=list)  # target forwards, prefill included, per prompt
    decode: float = 0.0  # seconds after prefill, summed over prompts; Saccade only
    decoded: int = 0  # tokens after prefill, summed over prompts; Saccade only

    @property
    def per_token(self) -> list[float]:
        return [s / len(t) for s, t in zip(self.seconds, self.tokens, strict=True)]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target forward, prefill included (Hugging Face verifies its first guesses there)."""
        return sum(map(len, self.tokens)) / sum(self.passes)


@contextmanager
def assistant(draft: Any, inputs: Inputs, *, sees: bool, **settings: Any) -> Iterator[dict[str, Any]]:
    """Arguments of `generate` that make ``draft`` the assistant for one prompt.

    Hugging Face hands an assistant no picture; if it ``sees``, its first call of a prompt gets its own picture
    features.
    """
    media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    before = copy.deepcopy(draft.generation_config)
    draft.generation_config.update(**settings)

    def generate(**arguments: Any) -> Any:
        arguments.pop("mm_encoder_outputs", None)  # the target's features, of the target's width
        if arguments.get("past_key_values") is None:
            arguments["generation_config"] = copy.deepcopy(arguments["generation_config"])
            arguments["generation_config"].is_assistant = False  # else the picture is dropped
            arguments |= {k: v.to(draft.dtype) if v.is_floating_point() else v for k, v in media.items()}
        return type(draft).generate(draft, **arguments)

    if sees:
        draft.generate = generate
    try:
        yield {"assistant_model": draft}
    finally:
        draft.generation_config = before
        draft.__dict__.pop("generate", None)


class Stock:
    """`generate` of a stock model, its target passes counted."""

    def __init__(self, model: Any, draft: Any, settings: dict[str, Any]) -> None:
        self.model, self._settings = model, settings
        self._draft = draft if "sees" in settings else None
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
            sequences = self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **options)
            (ids,) = sequences.tolist()  # waits for the device
            seconds = time.perf_counter() - started
        if measured is not None:
            measured.seconds.append(seconds)
            measured.tokens.append(ids[inputs["input_ids"].shape[1] :])
            measured.passes.append(self._calls)


class Ours:
    """`generate` with `custom_generate`."""

    def __init__(self, model: Any, speculation: Speculation) -> None:
        self.model, self._speculation = model, speculation

    def __call__(self, inputs: Inputs, new_tokens: int, measured: Measured | None) -> None:
        started = time.perf_counter()
        self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, custom_generate=self._speculation)
        seconds = time.perf_counter() - started
        if measured is not None:
            (output,) = self._speculation.outputs
            measured.seconds.append(seconds)
            measured.tokens.append(output.tokens)
            measured.passes.append(output.stats.target_passes + 1)
            measured.decoded += output.stats.decoded_tokens
            measured.decode += output.stats.as_dict()["seconds"]["decode"]


Contestant = Callable[[Inputs, int, Measured | None], None]


def contestants(options: argparse.Namespace) -> dict[str, Contestant]:
    """Those that are compared, by name. Hugging Face and Saccade have a target and a drafter each."""
    stock, target = (load(options.target, options.target_dtype, options.device) for _ in range(2))
    stock_draft, draft = (load(options.draft, options.draft_dtype, options.device) for _ in range(2))
    chosen: dict[str, Contestant] = {}
    for name, settings in STOCK.items():
        if name in (BASELINE, *options.methods):
            chosen[name] = Stock(stock, stock_draft, settings)
    for name, (method, settings) in OURS.items():
        if name in options.methods:
            drafter = None if method in ("plain", "prompt-lookup") else draft
            chosen[name] = Ours(target, speculate(drafter, method, **settings))
    return chosen


def measure(
    running: dict[str, Contestant], prompts: Sequence[Inputs], new_tokens: int, repeats: int
) -> dict[str, Measured]:
    """Let everyone answer every prompt; the first prompt is for warming up and not counted."""
    results = {name: Measured() for name in running}
    for contestant in running.values():
        contestant(prompts[0], new_tokens, None)
    for number, inputs in enumerate(list(prompts[1:]) * repeats):
        for name in rotated(running, number):
            running[name](inputs, new_tokens, results[name])
    return results


def table(results: dict[str, Measured], repeats: int) -> Iterator[str]:
    """Markdown lines; decoding is tokens a second after prefill, by sums."""
    base, plain = results[BASELINE], results.get("plain")
    assisted = [m for name, m in results.items() if name.startswith("hf assisted")]
    best = min(assisted, key=lambda m: median(m.per_token), default=None)

    def ratio(slow: Measured | None, fast: Measured) -> str:
        """Median of per-prompt ratios, of a prompt's repeats the median, with its interval over prompts."""
        if slow is None:
            return "-"
        ratios = np.array(slow.per_token) / np.array(fast.per_token)
        found = median_estimate(np.median(ratios.reshape(repeats, -1), axis=0).tolist())
        assert found is not None
        return f"{found.value:.2f}" + ("" if found.low is None else f" ({found.low:.2f}-{found.high:.2f})")

    rows = []
    for name, one in results.items():
        decoding = "-"
        if plain is not None and one.decode:
            rates = [contestant.decoded / contestant.decode for contestant in (one, plain)]
            decoding = f"{rates[0] / rates[1]:.2f}"
        equal = sum(a == b for a, b in zip(one.tokens, base.tokens, strict=True))
        cells = [name, f"{1 / median(one.per_token):.1f}", ratio(base, one), ratio(best, one), decoding]
        rows.append([*cells, f"{one.tokens_per_pass:.2f}", f"{equal}/{len(base.tokens)}"])
    head = ["method", "tokens/s", "x hf generate (95 %)", "x best hf assisted (95 %)", "decoding, x plain"]
    return pocket_pair.table([*head, "tokens per pass", "equal tokens"], rows)


def main() -> None:
    parser = pocket_pair.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="prompts that count (default: 24)")
    parser.add_argument("--repeats", type=int, default=1, help="answers per prompt and method (default: 1)")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--grammar", default="dense", choices=("dense", "verbose"))
    names = [*STOCK, *OURS]
    parser.add_argument("--methods", nargs="+", default=names, choices=names, help=f"{BASELINE} always runs")
    options = pocket_pair.options_of(parser)
    running: dict[str, Any] = contestants(options)
    processor = load_processor(str(options.target))
    model = running[BASELINE].model
    drawn = [
        draw(FIRST_SEED + number, FIRST_TASKS[number % len(FIRST_TASKS)], options.grammar)
        for number in range(options.prompts + 1)
    ]
    prompts = [pocket_pair.stock_inputs(model, [processor.prompt(sample.messages())]) for sample in drawn]
    results = measure(running, prompts, options.new_tokens, options.repeats)
    print("\n".join(table(results, options.repeats)))


if __name__ == "__main__":
    main()
