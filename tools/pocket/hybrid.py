"""A hybrid of the pocket target: most of its attention becomes gated delta nets, distilled from its own outputs.

    python -m tools.pocket.hybrid --out my-hybrid

Four of 16 layers still attend, as in Qwen3.5, whose layers these are; all else begins with the pocket target's weights.
Stage `align`: every new mixer on the pocket's own inputs to the layer, to give what its attention gives (as MOHAWK,
arXiv:2408.10189, section 3.2). Stage `distil`: the whole decoder, to give the pocket's states and next-token
distributions. Embeddings, tower and projector stay as they are. A run that was stopped resumes.
"""

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig

from saccade.pocket import target_path
from saccade.train.optimiser import fast_products
from tools.pocket.accuracy import write_checkpoint
from tools.pocket.batches import IGNORED, PAD, Batch
from tools.pocket.loop import train
from tools.pocket.models import PocketModel, decode, embed, outputs_of, prepare
from tools.pocket.recipe import SHARES, Recipe
from tools.pocket.stages import TargetBatches

ATTENDING = (0, 5, 10, 15)
"""Layers that keep attention: the first one's is needed; three more that the pocket leans on (4, 8, 12) go."""
TASKS = ("chart", "receipt", "scene", "document", "line", "caption", "count", "detail", "existence", "vet", "prose")
"""Those that it learns: one picture, one turn."""
_STATES = 0.3  # weight of the layers' states relative to the next-token distributions
_SLOWEST, _FASTEST = 1e-3, 0.5  # first decays of a layer's heads, per token


def hybrid_of(target: PocketModel) -> PocketModel:
    """A model with the target's weights, and new mixers that begin with its projections."""
    text = target.config.text_config
    heads, width = text.num_attention_heads, text.head_dim
    shape = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
    shape["layer_types"] = [("linear", "full")[i in ATTENDING] + "_attention" for i in range(text.num_hidden_layers)]
    shape |= {f"linear_num_{part}_heads": heads for part in ("key", "value")}
    shape |= {f"linear_{part}_head_dim": width for part in ("key", "value")}
    shape["rope_parameters"] = {**text.rope_parameters, "partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]}
    config = copy.deepcopy(target.config)
    config.text_config = Qwen3_5TextConfig(**shape)
    made = PocketModel(config)
    old, new = target.state_dict(), made.state_dict()
    for name in new:
        if name in old:
            is_centred = ".language_model." in name and "norm" in name  # Qwen3.5 adds 1 to the weights of its norms
            new[name] = old[name] - 1 if is_centred else old[name].clone()
    for number in range(text.num_hidden_layers):
        stem = f"model.language_model.layers.{number}."
        q, k, v, o = (old[f"{stem}self_attn.{part}_proj.weight"] for part in "qkvo")
        if number in ATTENDING:  # queries and their gates lie head by head; a gate of 0 halves the output
            gated = q.unflatten(0, (heads, 1, width))
            new[f"{stem}self_attn.q_proj.weight"] = torch.cat([gated, 0 * gated], 1).flatten(0, 2)
            new[f"{stem}self_attn.o_proj.weight"] = 2 * o
            continue
        stem += "linear_attn."
        new[f"{stem}in_proj_qkv.weight"], new[f"{stem}out_proj.weight"] = torch.cat([q, k, v]), o.clone()
        new[f"{stem}conv1d.weight"][..., -1] += 1
        new[f"{stem}A_log"].zero_()
        decays = torch.linspace(math.log(_SLOWEST), math.log(_FASTEST), heads).exp()
        new[f"{stem}dt_bias"] = decays.expm1().log()
    made.load_state_dict(new)
    made.requires_grad_(False)
    for part in (made.model.language_model.layers, made.model.language_model.norm, made.lm_head):
        part.requires_grad_(True)
    return made


class Distiller:
    """Losses of both stages on batches of the pocket's tasks."""

    def __init__(self, target: PocketModel, hybrid: PocketModel) -> None:
        self.target, self.hybrid = target.eval().requires_grad_(False), hybrid

    def align(self, batch: Batch) -> Tensor:
        """Error of every new mixer's output, relative to the attention's own mean square."""
        layers = self.target.model.language_model.layers
        text, real = self.hybrid.model.language_model, batch.ids != PAD
        with fast_products(self.target.device), torch.no_grad():
            parts = [part for layer in layers for part in (layer.input_layernorm, layer.self_attn)]
            with outputs_of(parts) as seen:
                decode(self.target, embed(self.target, batch), batch)
        length, losses = batch.ids.shape[1], []
        places = torch.arange(length)[None] if batch.positions is None else batch.positions
        rotary = text.rotary_emb(seen[0], places[None].expand(3, -1, -1))
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        with fast_products(self.target.device):
            for layer, given, (wanted, *_) in zip(text.layers, seen[::2], seen[1::2], strict=True):
                if layer.block_type == "full_attention":
                    made, _ = layer.self_attn(given, rotary, mask)
                else:
                    made = layer.linear_attn(given)
                error = (made.float() - wanted.float())[real].square().mean()
                losses.append(error / wanted.float()[real].square().mean())
        return torch.stack(losses).mean()

    def distil(self, batch: Batch) -> Tensor:
        """Divergence from the target's distributions at answer tokens, and the relative error of all states."""
        wanted = batch.targets[:, 1:] != IGNORED
        weights = torch.ones(batch.ids.shape) if batch.weights is None else batch.weights
        weights = weights[:, 1:][wanted]
        logits, states = [], []
        with fast_products(self.target.device):
            inputs = embed(self.target, batch).detach()
            for model, grad in ((self.target, False), (self.hybrid, True)):
                with torch.set_grad_enabled(grad), outputs_of(model.model.language_model.layers) as seen:
                    hidden = decode(model, inputs, batch)
                    logits.append(model.lm_head(hidden[:, :-1][wanted]).float().log_softmax(-1))
                states.append(torch.stack([state[:, :-1][wanted].float() for state in seen]))  # [layers, answer, d]
        truth, guess = logits
        divergence = nn.functional.kl_div(guess, truth, log_target=True, reduction="none").sum(-1)
        error = (states[1] - states[0]).square().mean((1, 2)) / states[0].square().mean((1, 2))
        return (divergence * weights).sum() / weights.sum() + _STATES * error.mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs=2, default=(40, 225), metavar=("ALIGN", "DISTIL"))
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    target = PocketModel.from_pretrained(target_path(), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(target_path() / "tokenizer.json"))
    torch.manual_seed(0)
    hybrid = hybrid_of(target)
    distiller, shares = Distiller(prepare(target), prepare(hybrid)), {task: SHARES["refine"][task] for task in TASKS}
    stages: dict[str, Callable[[Batch], Tensor]] = {"align": distiller.align, "distil": distiller.distil}
    for (name, loss_of), steps in zip(stages.items(), options.steps, strict=True):
        plan = replace(Recipe().schedules["refine"], steps=steps, batch=options.batch, warmup=20, tiled=1.0, drill=0.0)
        plan = replace(plan, relating=0.0, searching=0.0, watching=0.0, decay=0.7)
        train(name, hybrid, TargetBatches(name, 0, plan, tokenizer, shares), loss_of, plan, options.out, 60.0)
    write_checkpoint(hybrid, tokenizer, options.out / "hybrid")


if __name__ == "__main__":
    main()
