"""Heads in the layouts in which others release them, and what such files compute by their formulas alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from families import pristine, reset_rope_deltas
from heads_kit import Text, random_head, target
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head
from saccade.draft.heads.peagle import PEagle
from saccade.draft.heads.vispec import runs_of

KNOWN, MASK = 40, 3
Guesses = Sequence[tuple[Tensor, Tensor]]
"""Draft tokens after a text: embedding, and the output before it."""
AnyHead = TypeVar("AnyHead", bound=Head)


def randomised(head: AnyHead) -> AnyHead:
    """No norm stays one, so that two of them cannot change places unseen; and tokens from all over the vocabulary."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, weight in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            if name == "residuals":
                torch.nn.init.normal_(weight)
            if "gates" in name:
                torch.nn.init.constant_(weight, 0.7)
        if isinstance(head, Eagle3) and head.has_lm_head:
            count, every = len(head.token_ids), head.config.vocab_size
            head.token_ids.copy_(torch.randperm(every)[:count].sort().values)
        if isinstance(head, PEagle) and head.embed_tokens is not None:
            head.mask_embedding.copy_(head.embed_tokens.weight[MASK])
    return head.eval()


class Plain:
    """The formulas of a Llama's block, from the files of a folder alone, for a text as one sequence."""

    def __init__(self, folder: Path, name: str) -> None:
        values = json.loads((folder / "config.json").read_text())
        self.values: dict[str, Any] = {**values, **values.get("transformer_layer_config", {})}
        self.weights = load_file(folder / "model.safetensors")
        self.heads, self.kv = self.values["num_attention_heads"], self.values["num_key_value_heads"]
        self.name, self.dim = name, self.values["hidden_size"] // self.heads

    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        """Outputs after a text and draft tokens; ``positions`` ``[N]`` or ``[3, N]`` of all entries."""
        raise NotImplementedError

    def logits(self, out: Tensor) -> Tensor:
        logits: Tensor = target(self.name).model.get_output_embeddings()(out)
        return logits

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def normed(self, x: Tensor, name: str) -> Tensor:
        """``x`` after the norm of a name, or as it is where the files have none."""
        if f"{name}.weight" not in self.weights:
            return x
        scale = (x.square().mean(-1, keepdim=True) + self.values["rms_norm_eps"]).sqrt()
        return self.weights[f"{name}.weight"] * x / scale

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.values["rope_theta"]
        angles = torch.empty(len(x), self.dim // 2)
        for i in range(self.dim // 2):
            place = positions
            if positions.dim() == 2:
                sections = rope["mrope_section"]
                axis = 0 if i < sections[0] else 1 if i < sections[0] + sections[1] else 2
                if rope.get("mrope_interleaved"):
                    axis = i % 3 if i % 3 and i < 3 * sections[i % 3] else 0
                place = positions[axis]
            angles[:, i] = place * theta ** (-2 * i / self.dim)
        angles = angles.repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def parts(self, x: Tensor, others: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[N, H, D]`` of x, and keys and values of others."""
        q = self.linear(x, f"{prefix}.q_proj").view(len(x), self.heads, self.dim)
        k = self.linear(others, f"{prefix}.k_proj").view(len(others), self.kv, self.dim)
        v = self.linear(others, f"{prefix}.v_proj").view(len(others), self.kv, self.dim)
        return self.normed(q, f"{prefix}.q_norm"), self.normed(k, f"{prefix}.k_norm"), v

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(self.heads // self.kv, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / self.dim**0.5
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gated = F.silu(self.linear(x, f"{prefix}mlp.gate_proj")) * self.linear(x, f"{prefix}mlp.up_proj")
        return self.linear(gated, f"{prefix}mlp.down_proj")

    def block(self, x: Tensor, positions: Tensor, prefix: str = "layers.0.", attended: Tensor | None = None) -> Tensor:
        seen = self.normed(x, f"{prefix}input_layernorm") if attended is None else attended
        q, k, v = self.parts(seen, seen, f"{prefix}self_attn")
        later = torch.ones(len(x), len(x)).triu(1).bool()
        mixed = self.mixed(self.turned(q, positions), self.turned(k, positions), v, later)
        x = x + self.linear(mixed, f"{prefix}self_attn.o_proj")
        return x + self.mlp(self.normed(x, f"{prefix}post_attention_layernorm"), prefix)


class PlainEagle(Plain):
    alone = False  # entries of visual tokens are the embedding, as MSD's

    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        words = torch.stack([*text.embeddings[1:], *(word for word, _ in guesses)])
        features = torch.stack([*text.states[:-1], *(out for _, out in guesses)])
        x = self.linear(torch.cat([words, features], -1), "fc")
        if self.alone:
            at = F.pad(text.visual[1:], (0, len(guesses)))
            x[at] = words[at]
        return self.block(x, positions)


class PlainMsd(PlainEagle):
    alone = True


class PlainHiViS(Plain):
    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        shown = (~text.visual).nonzero()[:, 0]
        inputs = [(text.embeddings[token], text.states[before], 0) for before, token in pairwise(shown)]
        inputs += [(word, out, step) for step, (word, out) in enumerate(guesses, 1)]
        rows = self.weights["residual"]
        mixed = [torch.cat([word, feature, rows[min(step, len(rows) - 1)]]) for word, feature, step in inputs]
        places = torch.arange(len(mixed))
        if self.values["model_type"] != "llama":
            places = torch.cat([shown[1:] - 1, torch.arange(len(guesses)) + len(text.ids) - 1])
        return self.block(self.linear(torch.stack(mixed), "fc"), places)


class PlainEagle3(Plain):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.weights = {key.replace("layers.0.", "midlayer."): weight for key, weight in self.weights.items()}
        self.feeds_normed = bool(self.values.get("norm_output")) and "speculators_model_type" in self.values

    def fuse(self, states: Tensor) -> Tensor:
        """Features ``[N, d]`` of three states next to each other."""
        if self.values.get("fc_norm"):
            states = torch.cat([self.normed(part, f"fc_norm.{i}") for i, part in enumerate(states.chunk(3, -1))], -1)
        return self.linear(self.normed(states, "input_norm"), "fc")

    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        layers = self.values["eagle_aux_hidden_state_layer_ids"]
        features = self.fuse(torch.cat([text.streams[layer] for layer in layers], -1)[:-1])
        features = torch.stack([*features, *(out for _, out in guesses)])
        return self.run(features, torch.stack([*text.embeddings[1:], *(word for word, _ in guesses)]), positions)

    def run(self, features: Tensor, words: Tensor, positions: Tensor) -> Tensor:
        normed = self.normed(features, "midlayer.hidden_norm")
        both = torch.cat([self.normed(words, "midlayer.input_layernorm"), normed], -1)
        x = self.block(normed if self.values.get("norm_before_residual") else features, positions, "midlayer.", both)
        return self.normed(x, "norm") if self.feeds_normed else x

    def logits(self, out: Tensor) -> Tensor:
        known = self.linear(out if self.feeds_normed else self.normed(out, "norm"), "lm_head")
        logits = torch.full((*out.shape[:-1], self.values["vocab_size"]), -torch.inf)
        for draft, shift in enumerate(self.weights["d2t"].tolist()):
            logits[..., draft + shift] = known[..., draft]
        return logits


class PlainPEagle(PlainEagle3):
    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        """Every guess is a mask, whatever it is."""
        table, layers = self.weights["embed_tokens.weight"], self.values["eagle_aux_hidden_state_layer_ids"]
        states = torch.cat([text.streams[layer] for layer in layers], -1)[:-1]
        masks = self.weights["mask_hidden"].flatten().expand(len(guesses), -1)
        ids = [*text.ids[1:].tolist(), *[self.values["mask_token_id"]] * len(guesses)]
        x = self.run(self.fuse(torch.cat([states, masks])), table[ids], positions)
        for place in range(1, self.values["num_hidden_layers"]):
            x = self.block(x, positions, f"layers.{place}.")
        return x


class PlainViSpec(Plain):
    def compressed(self, tokens: Tensor) -> Tensor:
        q = self.weights["imadpt.q"]
        heads, dim = q.shape[1:]
        k, v = (self.linear(tokens, f"imadpt.{part}_proj").view(-1, heads, dim) for part in "kv")
        share = (torch.einsum("qhd,nhd->hqn", q, k) / dim**0.5).softmax(-1)
        return self.linear(torch.einsum("hqn,nhd->qhd", share, v).flatten(1), "imadpt.o_proj")

    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        images = {stop: self.compressed(text.embeddings[first:stop]) for first, stop in runs_of(text.visual)}
        words = [*zip(text.embeddings[1:], text.states[:-1], strict=True), *guesses]
        seen, inputs, places = torch.zeros_like(text.states[0]), [], []
        for token, (word, feature) in enumerate(words, 1):
            if token in images:
                seen = images[token][-1]
            if token < len(text.ids) and text.visual[token]:
                stop = next(stop for stop in images if token < stop)
                place = token - (stop - (len(images[stop]) - 1))
                if place < 0:
                    continue
                inputs.append(images[stop][place])
            else:
                mixed = self.linear(torch.cat([feature, seen]), "img_fc")
                inputs.append(self.linear(torch.cat([word, mixed]), "fc"))
            places.append(token - 1)
        return self.block(torch.stack(inputs), torch.tensor(places))


class PlainDream(Plain):
    def after(self, text: Text, guesses: Guesses, positions: Tensor) -> Tensor:
        features = torch.stack([*text.states[:-1], *(out for _, out in guesses)])
        embeddings = torch.stack([*text.embeddings, *(word for word, _ in guesses)])
        places = torch.arange(len(embeddings))
        x = self.block(embeddings, places)
        q, k, v = self.parts(self.normed(x, "layers.1.input_layernorm"), features, "layers.1.cross_attn")
        mixed = self.mixed(q, k, v, places[:-1] >= places[:, None])
        # The first entry sees nothing, and so the prompt's features alike.
        every = v[: text.prompt].mean(0).repeat_interleave(self.heads // self.kv, 0).flatten()
        mixed = torch.cat([every[None], mixed[1:]])
        gates = [self.weights[f"layers.1.cross_attn_{part}_gate"].tanh() for part in ("attn", "mlp")]
        x = x + gates[0] * self.linear(mixed, "layers.1.cross_attn.o_proj")
        x = x + gates[1] * self.mlp(self.normed(x, "layers.1.post_attention_layernorm"), "layers.1.")
        return self.normed(self.block(x, places, "layers.2."), "norm")


def positions_of(name: str, inputs: dict[str, Any], count: int) -> Tensor:
    """``[3, count]`` M-RoPE positions by the stock model, of the prompt and text after it."""
    model = pristine(name)
    reset_rope_deltas(model)
    wanted = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    more = {key: inputs[key] for key in wanted if inputs.get(key) is not None}
    ids = inputs["input_ids"]
    positions, delta = model.model.get_rope_index(ids, attention_mask=torch.ones_like(ids), **more)
    reset_rope_deltas(model)
    after = torch.arange(ids.shape[1], count) + delta.flatten()[0]
    return torch.cat([positions[:, 0], after.expand(3, -1)], 1)[:, :count]


# --------------------------------------------------------------------------- folders


@dataclass(frozen=True)
class Released:
    """A head that was released: family of its target, kind, our options, formulas, and settings of config.json."""

    name: str
    kind: str
    options: dict[str, Any]
    plain: type[Plain]
    settings: dict[str, Any] = field(default_factory=dict)
    mrope: bool = False

    def head(self) -> Any:
        return _head(self.name, self.kind, tuple(self.options.items()), self.mrope)


@cache
def _head(name: str, kind: str, options: tuple[tuple[str, Any], ...], mrope: bool) -> Head:
    return randomised(random_head(name, kind, **dict(options)))


_MSD = {"model_type": "llava", "mm_vision_tower": "clip"}
_QWEN = {
    "model_type": "qwen2_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2},
}
_QWEN_ALONE = {"model_type": "qwen2_5_vl"}  # nothing of M-RoPE
_DREAM = {"keep": 1.0, "gate": "tanh", "rotary": False, "direct": False, "form": "released"}


def _eagle3(name: str, settings: dict[str, Any], **options: Any) -> Released:
    return Released(name, "eagle3", {"own_vocabulary": KNOWN, **options}, PlainEagle3, settings)


def _speculator(name: str, settings: dict[str, Any], **options: Any) -> Released:
    return _eagle3(name, {"speculators_model_type": "eagle3", "norm_before_residual": False, **settings}, **options)


def _peagle(name: str, settings: dict[str, Any], **options: Any) -> Released:
    options = {"own_vocabulary": KNOWN, "embedding": "own", **options}
    settings = {"speculators_model_type": "peagle", "norm_before_residual": False, "mask_token_id": MASK, **settings}
    return Released(name, "peagle", options, PlainPEagle, settings)


_ALL = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
_FROZEN = {"embedding": "words", "blocks": 2}
CASES: dict[str, Released] = {
    "eagle": Released("llama", "eagle2", {"norms": "none"}, PlainEagle),
    "eagle-bias": Released("llama", "eagle2", {"norms": "none", "bias": True}, PlainEagle),
    "eagle-qwen2": Released("qwen2", "eagle2", {"norms": "none"}, PlainEagle),  # biases of queries, keys and values
    "eagle-for-vlm": Released("llava", "eagle2", {"norms": "none", "bias": True}, PlainEagle),
    "msd": Released("llava", "msd", {"norms": "none", "bias": True}, PlainMsd, _MSD),
    "msd-qwen2-vl": Released("qwen2_vl", "msd", {"norms": "block", "bias": True}, PlainMsd, _QWEN),
    "msd-qwen2.5-vl": Released("qwen2_5_vl", "msd", {"norms": "block"}, PlainMsd, _QWEN),
    "eagle3": _eagle3("llava", {}),
    "eagle3-llama": _eagle3("llama", {}),
    "eagle3-norms": _eagle3("llava", {"fc_norm": True, "norm_output": True}, state_norms="each"),  # as SpecForge does
    "eagle3-mrope": Released("qwen2_5_vl", "eagle3", {"own_vocabulary": KNOWN}, PlainEagle3, mrope=True),
    "eagle3-mrope-interleaved": Released("qwen3_vl", "eagle3", {"own_vocabulary": KNOWN}, PlainEagle3, mrope=True),
    "speculators": _speculator("llava", {}),
    "speculators-qk-norm": _speculator("qwen3_vl", {}),
    "speculators-residual": _speculator("llava", {"norm_before_residual": True}, residual="normed"),
    "speculators-joint": _speculator("llava", {"norm_before_fc": True}, state_norms="joint"),
    "speculators-output": _speculator("qwen3_vl", {"norm_output": True}, feeds="normed"),
    "speculators-all": _speculator("llava", _ALL, residual="normed", state_norms="each", feeds="normed"),
    "peagle": _peagle("llava", {}),
    "peagle-llama": _peagle("llama", {"norm_before_residual": True}, residual="normed", blocks=1),
    "peagle-deep": _peagle("llama", {"norm_before_fc": True}, state_norms="joint", blocks=3),
    "peagle-bias": _peagle("qwen2", {}, blocks=2),  # of queries, keys and values
    "peagle-frozen": _peagle(
        "qwen3_vl", {"fc_norm": True, "embed_requires_grad": False}, state_norms="each", **_FROZEN
    ),
    "hivis": Released("llava", "hivis", {"norms": "none", "bias": True}, PlainHiViS),
    "hivis-qwen": Released("qwen2_5_vl", "hivis", {"norms": "none", "positions": "tokens"}, PlainHiViS, _QWEN_ALONE),
    "vispec": Released("llava", "vispec", {"queries": 2, "form": "released", "bias": True}, PlainViSpec),
    "vispec-qwen": Released("qwen2_5_vl", "vispec", {"queries": 3, "form": "released", "bias": False}, PlainViSpec),
    "dream": Released("llava", "dream", _DREAM, PlainDream),
}


def release(case: str, folder: Path, head: Any = None, prefix: str = "", binary: bool = False) -> Path:
    """Write the head of a case, or another of its kind, as it would have been released."""
    released = CASES[case]
    head = head or released.head()
    weights, values = dict(head.state_dict()), dict(released.settings)
    if released.kind in ("eagle2", "msd"):
        theirs = {key.replace("stack.", "layers."): weight for key, weight in weights.items()}
        theirs["embed_tokens.weight"] = torch.ones(150, 64)
        theirs["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    elif released.kind == "hivis":
        theirs = _renamed(weights, {"block.": "layers.0.", "residuals": "residual", "w.bias": "fc.bias"})
        theirs["fc.weight"] = torch.cat([theirs.pop(f"{name}.weight") for name in ("w2", "w1", "w")], 1)
    elif released.kind == "vispec":
        theirs = _renamed(weights, {"adaptor.": "imadpt.", "image_fc.": "img_fc.", "block.": "layers.0."})
        theirs["imadpt.q"] = theirs.pop("imadpt.queries").unflatten(-1, (head.config.heads, -1))
        values["qkv_bias"] = head.config.qkv_bias
    elif released.kind == "dream":
        theirs = _renamed(weights, {"first.": "layers.0.", "cross.0.": "layers.1.", "last.": "layers.2."})
        gates = theirs.pop("layers.1.gates")
        theirs["layers.1.cross_attn_attn_gate"], theirs["layers.1.cross_attn_mlp_gate"] = gates[:1], gates[1:]
    else:
        if released.mrope:
            rope = target(released.name).text_config.rope_parameters
            values["rope_scaling"] = {"type": "mrope", **{k: v for k, v in rope.items() if k.startswith("mrope")}}
        embedding = target(released.name).model.get_input_embeddings().weight
        return _release_eagle3(folder, head, values, prefix or "midlayer.", binary, embedding)
    return write(folder, head.config, {prefix + key: weight for key, weight in theirs.items()}, binary, **values)


def _release_eagle3(
    folder: Path, head: Any, values: dict[str, Any], block: str, binary: bool, embedding: Tensor
) -> Path:
    config, weights = head.config, dict(head.state_dict())
    ids, is_speculator = weights.pop("token_ids"), "speculators_model_type" in values
    block = "layers.0." if is_speculator else block
    masks = [weights.pop(name, None) for name in ("mask_hidden", "mask_embedding", "embed_tokens.weight")]
    norms = {"state_norms.": "fc_norm.", "embedding_norm.": f"{block}input_layernorm."}
    norms["feature_norm."] = f"{block}hidden_norm."
    if values.get("norm_before_fc"):
        norms = {"state_norms.0.": "input_norm.", **norms}
    inner = {part: block + part for part in ("self_attn.", "mlp.", "post_attention_layernorm.")}
    inner |= {f"stack.{place}.": f"layers.{place + 1}." for place in range(config.options.get("blocks", 1) - 1)}
    theirs = {**_renamed(weights, {**norms, **inner}), "embed_tokens.weight": torch.ones(config.vocab_size, 64)}
    if len(ids) < config.vocab_size:
        theirs["d2t"] = ids - torch.arange(len(ids))
        theirs["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    values |= {"draft_vocab_size": len(ids), "eagle_aux_hidden_state_layer_ids": list(config.layers)}
    if not is_speculator:
        return write(folder, config, theirs, binary, architectures=["LlamaForCausalLMEagle3"], **values)
    theirs.pop("embed_tokens.weight")
    if masks[0] is not None:
        table = embedding if masks[2] is None else masks[2]
        row = torch.arange(len(table))[:, None] == MASK
        theirs |= {"mask_hidden": masks[0].view(1, 1, -1), "embed_tokens.weight": torch.where(row, masks[1], table)}
    write(folder, config, theirs, num_hidden_layers=config.options.get("blocks", 1))
    every = json.loads((folder / "config.json").read_text())
    nested = {k: v for k, v in every.items() if k not in ("architectures", "hidden_act", "rope_theta", "rope_scaling")}
    nested |= {"model_type": "qwen3" if config.qk_norm else "llama", "rope_parameters": dict(config.rope)}
    outer = {
        "architectures": ["Eagle3DraftModel"],
        "embed_requires_grad": masks[0] is not None,
        "norm_before_fc": False,
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": nested,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/some-target"}},
        **values,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


def _renamed(weights: dict[str, Tensor], prefixes: dict[str, str]) -> dict[str, Tensor]:
    theirs = {}
    for key, weight in weights.items():
        prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), "")
        theirs[prefixes.get(prefix, "") + key.removeprefix(prefix)] = weight
    return theirs


def write(folder: Path, config: Any, weights: dict[str, Tensor], binary: bool = False, **more: Any) -> Path:
    """Weights in one of the two formats, and a Llama's config.json, in which some settings are others."""
    theirs = {name: weight.detach().clone() for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if binary:
        torch.save(theirs, folder / "pytorch_model.bin")
    else:
        save_file(theirs, folder / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop(folder: Path, *keys: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in keys}))


def reweigh(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights in a folder's only weight file."""
    (file,) = (file for file in folder.iterdir() if file.suffix != ".json")
    weights = torch.load(file) if file.suffix == ".pt" else load_file(file)
    change(weights)
    (torch.save if file.suffix == ".pt" else save_file)(weights, file)


def weighs(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: reweigh(folder, change)


def same(one: Head, other: Any) -> None:
    assert type(other) is type(one)
    assert other.config == one.config
    theirs, ours = one.state_dict(), other.state_dict()
    assert set(theirs) == set(ours)
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype
        assert torch.equal(ours[name], weight), name
