"""Milliseconds to verify trees on a hybrid and to commit a path, beside a model of the same width with attention alone.

Both have random weights and the shapes of Qwen3.5's text layers; three of the hybrid's four layers are gated delta
nets. Sizes take turns, so that other work on the machine falls on all of them alike.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.tree import ancestors_of

LAYERS = {"hybrid": ["linear_attention"] * 3 + ["full_attention"], "attention": ["full_attention"] * 4}
SIZES = (1, 8, 30)


@torch.inference_mode()
def measure(kind: str, options: argparse.Namespace) -> None:
    """Print the medians of one kind of model."""
    heads = options.width // 64
    sizes = {"hidden_size": options.width, "intermediate_size": 3 * options.width, "num_attention_heads": heads}
    sizes |= {"linear_num_key_heads": heads // 2, "linear_num_value_heads": heads, "num_key_value_heads": heads // 4}
    sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 64)
    config = Qwen3_5TextConfig(**sizes, vocab_size=4096, layer_types=LAYERS[kind] * 2, num_hidden_layers=8)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    context, random = (
        Context(Target(model, executor="stock" if options.unpacked else "lean"), 1),
        torch.Generator().manual_seed(0),
    )
    context.cache.reserve(0, options.prompt + 32 + 6 * options.rounds)
    context.load(0, Prompt(tuple(torch.randint(4096, (options.prompt,), generator=random).tolist())))
    spent: dict[str, list[float]] = {}
    for size in SIZES * options.rounds:
        parents = [int(torch.randint(max(i, 1), (1,), generator=random)) for i in range(size)]
        mask, tokens = ancestors_of(torch.tensor([parents]), size), torch.randint(4096, (1, size), generator=random)
        begun = time.perf_counter()
        context.forward([0], tokens, mask, mask.sum(2) - 1)
        passed = time.perf_counter()
        path = sorted({0, *mask[0, -1].nonzero().flatten().tolist()})[:2]
        context.commit([0], [path], [tokens[0, path].tolist()])
        spent.setdefault(f"{size} nodes", []).append(passed - begun)
        spent.setdefault("commit", []).append(time.perf_counter() - passed)
    times = {name: 1000 * median(values) for name, values in spent.items()}
    print(kind, *(f"{name} {ms:.1f} ms (x{ms / times['1 nodes']:.2f})" for name, ms in times.items()), sep="; ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in {"width": 1024, "prompt": 256, "rounds": 15, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--unpacked", action="store_true", help="weights as they are")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for kind in LAYERS:
        measure(kind, options)
