"""What skipping drafts by the target's visual attention could gain (ViSkip, Shen et al. 2026, arXiv 2603.14989).

ViSkip decodes a token without a draft where the last verified token's attention to visual tokens (last layer, mean over
heads) is .35 or more. The steps of every method are replayed under this and other thresholds, on all layers. Reading
the attention is free in this account; a step takes the mean time of its method, one without a draft plain decoding's.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

import saccade
from benchmarks.pocket_pair import FIRST_SEED, stock_inputs, table
from saccade.inputs.families import visual_mask
from saccade.inputs.families.family import Prompt
from saccade.pocket import draw, target_path
from tools.pocket.world import FIRST_TASKS

METHODS = {"plain": ("plain", {}), "chain of 5": ("chain", {}), "static tree of 25": ("static-tree", {})}
METHODS |= {"EAGLE-2, chain of 5": ("eagle2", {"tree": "chain", "gamma": 5}), "chain without pictures": ("spd", {})}
HEAD = ("method", "steps", "tokens a step", "cost", "none accepted", "correlation", "x at .35", "x at best", "known")
Answer = tuple[np.ndarray, dict[int, int]]
"""Visual attention ``[layers, n]`` of the token before each, and the steps' accepted lengths by the root's index."""


def speed(answers: Sequence[Answer], cost: float, layer: int = 0, bound: float = np.inf) -> float:
    """Tokens in a plain step's time if shares of at least ``bound`` skip; roots within a draft accept what is left."""
    tokens = time = 0.0
    for shares, steps in answers:
        left = {root + i: length - i for root, length in steps.items() for i in range(length + 1)}
        at, end = min(steps), shares.shape[1] - 1
        while at < end:
            skips = shares[layer, at] >= bound
            emitted = 1 if skips else min(left[at] + 1, end - at)
            at, tokens, time = at + emitted, tokens + emitted, time + (1 if skips else cost)
    return tokens / time


def main() -> None:
    """Print a table."""
    model = AutoModelForImageTextToText.from_pretrained(target_path(), dtype="float32", attn_implementation="eager")
    vlm = saccade.load("pocket", dtype="float32", threads=1)
    answers, spent = {name: [] for name in METHODS}, dict.fromkeys(METHODS, np.zeros(2))
    for n in range(16):
        prompt = vlm.processor.prompt(draw(FIRST_SEED + n, (*FIRST_TASKS, "document")[n % 4]).messages())
        for name, (method, options) in METHODS.items():
            stream, steps, at = vlm.using(method, **options).stream(prompt, max_new_tokens=128), {}, -1
            for chunk in stream:
                steps |= {at: len(chunk.tokens[0]) - 1} if at >= 0 else {}  # the first one is prefill's
                at += len(chunk.tokens[0])
            (output,) = stream.outputs
            spent[name] = spent[name] + (output.stats.times.decode, output.stats.target_passes)
            if name == "plain":
                inputs = stock_inputs(model, [Prompt((*prompt.ids, *output.tokens), prompt.media)])
                visual, asked = visual_mask(model.config, inputs["input_ids"][0]), slice(len(prompt) - 1, -1)
                with torch.inference_mode():
                    layers = model(**inputs, output_attentions=True).attentions
                shares = torch.stack([layer[0].mean(0)[asked, visual].sum(1) for layer in layers]).numpy()
            answers[name].append((shares, steps))
    rows = []
    for name, own in [*answers.items()][1:]:
        lengths = np.array([length for _, steps in own for length in steps.values()])
        seen = np.concatenate([shares[:, list(steps)] for shares, steps in own], 1)
        close = [np.corrcoef(values, lengths)[0, 1] for values in seen]
        cost, none = np.divide(*spent[name]) / np.divide(*spent["plain"]), (lengths == 0).mean()
        base = speed(own, cost)
        found = [speed(own, cost, n, b) for n, s in enumerate(seen) for b in np.quantile(s, np.linspace(0, 1, 41))]
        cells = [f"{1 + lengths.mean():.2f}", f"{cost:.2f}", f"{none:.0%}", f"{min(close):+.2f} to {max(close):+.2f}"]
        gains = speed(own, cost, -1, 0.35) / base, max(found) / base, cost / (cost - none * (cost - 1))
        rows.append([name, str(len(lengths)), *cells, *(f"{gain:.3f}" for gain in gains)])
    print("\n".join(table(HEAD, rows)))


if __name__ == "__main__":
    main()
