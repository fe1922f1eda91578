"""EAGLE-3's formulas from a released folder alone, without a cache, and folders in speculators' layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from published_kit import randomised, write
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from saccade.draft.heads.eagle import Eagle3


class PlainEagle3:
    """A text of a released folder, entry by entry.

    Args:
        folder: in EAGLE's layout or in speculators'.
    """

    def __init__(self, folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        nested = values.get("transformer_layer_config", {})
        self.values: dict[str, Any] = {**values, **nested}
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}

    def fuse(self, states: Tensor) -> Tensor:
        """Features ``[N, d]`` of three states side by side."""
        if self.values.get("fc_norm"):
            parts = states.chunk(3, -1)
            states = torch.cat([self._normed(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        if self.values.get("norm_before_fc"):
            states = self._normed(states, "input_norm")
        return states @ self.weights["fc.weight"].T

    def run(self, features: Tensor, embeddings: Tensor, positions: Tensor) -> Tensor:
        """What takes the features' place, ``[N, d]``; ``positions`` are ``[N]`` or, with M-RoPE, ``[3, N]``."""
        count, values = len(features), self.values
        heads, kv, dim = (values[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        words = self._normed(embeddings, "midlayer.input_layernorm")
        normed = self._normed(features, "midlayer.hidden_norm")
        both = torch.cat([words, normed], -1)
        q, k, v = (
            self._projected(both, f"midlayer.self_attn.{p}_proj").view(count, n, dim)
            for p, n in (("q", heads), ("k", kv), ("v", kv))
        )
        if "midlayer.self_attn.q_norm.weight" in self.weights:
            q, k = self._normed(q, "midlayer.self_attn.q_norm"), self._normed(k, "midlayer.self_attn.k_norm")
        q, k = self._turned(q, positions), self._turned(k, positions)
        k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1)
        residual = normed if values.get("norm_before_residual") else features
        x = residual + mixed @ self.weights["midlayer.self_attn.o_proj.weight"].T
        after = self._normed(x, "midlayer.post_attention_layernorm")
        gate, up, down = (self.weights[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(after @ gate.T) * (after @ up.T)) @ down.T
        return self._normed(x, "norm") if self._feeds_normed else x

    def logits(self, out: Tensor) -> Tensor:
        """``[N, V]`` behind outputs of `run`."""
        known = (out if self._feeds_normed else self._normed(out, "norm")) @ self.weights["lm_head.weight"].T
        logits = torch.full((len(out), self.values["vocab_size"]), -torch.inf)
        for draft, shift in enumerate(self.weights["d2t"].tolist()):
            logits[:, draft + shift] = known[:, draft]
        return logits

    @property
    def _feeds_normed(self) -> bool:
        return bool(self.values.get("norm_output")) and "speculators_model_type" in self.values

    def _projected(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.values["rms_norm_eps"]).sqrt()
        return self.weights[f"{name}.weight"] * x / scale

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = x.shape[-1]
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.values["rope_theta"]
        angles = torch.empty(len(x), dim // 2)
        for i in range(dim // 2):
            place = positions
            if positions.dim() == 2:
                sections = rope["mrope_section"]
                axis = 0 if i < sections[0] else 1 if i < sections[0] + sections[1] else 2
                if rope.get("mrope_interleaved"):
                    axis = i % 3 if i % 3 and i < 3 * sections[i % 3] else 0
                place = positions[axis]
            angles[:, i] = place * theta ** (-2 * i / dim)
        angles = angles.repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def speculator(head: Eagle3, folder: Path, **settings: Any) -> Path:
    """Write a head as speculators would, which leaves out of the block's settings what transformers assumes.

    Args:
        settings: of the top level of config.json.
    """
    head = randomised(head)
    config, weights = head.config, dict(head.state_dict())
    ids = weights.pop("token_ids")
    theirs = {"d2t": ids - torch.arange(len(ids))}
    theirs["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    renamed = {"embedding_norm": "layers.0.input_layernorm", "feature_norm": "layers.0.hidden_norm"}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        if part == "state_norms":
            part, rest = ("input_norm", "weight") if settings.get("norm_before_fc") else ("fc_norm", rest)
        elif part in ("self_attn", "mlp", "post_attention_layernorm"):
            part = f"layers.0.{part}"
        theirs[f"{renamed.get(part, part)}.{rest}"] = weight
    write(folder, config, theirs)
    values = json.loads((folder / "config.json").read_text())
    block = {k: v for k, v in values.items() if k not in ("architectures", "hidden_act", "rope_theta", "rope_scaling")}
    block |= {"model_type": "qwen3" if config.qk_norm else "llama", "rope_parameters": dict(config.rope)}
    own = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
        "embed_requires_grad": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": block,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": [config.target_class], "name_or_path": "someone/some-target"},
        },
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(own))
    return folder
