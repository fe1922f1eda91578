"""DREAM heads in their released layout draft as their files say, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from heads_kit import POLICIES, Text, prompts, random_head, recorded, target
from published_kit import edit, randomised, reweigh, same, write
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from families import FAMILIES
from saccade.draft.heads.dream import Dream, DreamDraftSession
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.errors import ModelError

FORM = {"keep": 1.0, "gate": "tanh", "rotary": False, "direct": False, "form": "released"}


@cache
def original() -> Dream:
    head = random_head("llava", "dream", **FORM)
    assert isinstance(head, Dream)
    torch.nn.init.constant_(head.cross[0].gates, 0.7)  # type: ignore[arg-type]
    return randomised(head)


def released(folder: Path) -> Path:
    theirs = {}
    for key, weight in original().state_dict().items():
        for ours, name in (("first.", "layers.0."), ("cross.0.", "layers.1."), ("last.", "layers.2.")):
            key = name + key.removeprefix(ours) if key.startswith(ours) else key
        theirs[key] = weight
    gates = theirs.pop("layers.1.gates")
    theirs["layers.1.cross_attn_attn_gate"], theirs["layers.1.cross_attn_mlp_gate"] = gates[:1], gates[1:]
    return write(folder, original().config, theirs, image_token_id=32000, dropout=0.0)


class Plain:
    """A text by the released formulas, from the files alone."""

    def __init__(self, folder: Path) -> None:
        self.values = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.heads, self.kv = self.values["num_attention_heads"], self.values["num_key_value_heads"]
        self.dim = self.values["hidden_size"] // self.heads

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.values["rms_norm_eps"]).sqrt()
        return self.weights[f"{name}.weight"] * x / scale

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        gate, up = (self._linear(x, f"layers.{layer}.mlp.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"layers.{layer}.mlp.down_proj")

    def _parts(self, q: Tensor, kv: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._linear(q, f"{prefix}.q_proj").view(len(q), self.heads, self.dim),
            self._linear(kv, f"{prefix}.k_proj").view(len(kv), self.kv, self.dim),
            self._linear(kv, f"{prefix}.v_proj").view(len(kv), self.kv, self.dim),
        )

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(self.heads // self.kv, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / self.dim**0.5
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)

    def _self(self, x: Tensor, layer: int) -> Tensor:
        count = len(x)
        frequencies = self.values["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.outer(torch.arange(count), frequencies).repeat(1, 2)[:, None]

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        given = self._normed(x, f"layers.{layer}.input_layernorm") if layer else x
        q, k, v = self._parts(given, given, f"layers.{layer}.self_attn")
        later = torch.ones(count, count).triu(1).bool()
        x = x + self._linear(self._mixed(turned(q), turned(k), v, later), f"layers.{layer}.self_attn.o_proj")
        return x + self._mlp(self._normed(x, f"layers.{layer}.post_attention_layernorm"), layer)

    def run(self, embeddings: Tensor, features: Tensor, prompt: int) -> Tensor:
        """Outputs of entries 0 to N - 1.

        Args:
            features: ``[N - 1, d]``; the first ``prompt`` are the prompt's.
        """
        x, count = self._self(embeddings, 0), len(embeddings)
        q, k, v = self._parts(self._normed(x, "layers.1.input_layernorm"), features, "layers.1.cross_attn")
        q, k = self._normed(q, "layers.1.cross_attn.q_norm"), self._normed(k, "layers.1.cross_attn.k_norm")
        hidden = torch.arange(count - 1) >= torch.arange(count)[:, None]
        mixed = self._mixed(q, k, v, hidden)
        every = v[:prompt].mean(0).repeat_interleave(self.heads // self.kv, 0).flatten()
        mixed = torch.cat([every[None], mixed[1:]])  # the first entry sees nothing, and so all that there is alike
        gates = [self.weights[f"layers.1.cross_attn_{part}_gate"].tanh() for part in ("attn", "mlp")]
        x = x + gates[0] * self._linear(mixed, "layers.1.cross_attn.o_proj")
        x = x + gates[1] * self._mlp(self._normed(x, "layers.1.post_attention_layernorm"), 1)
        return self._normed(self._self(x, 2), "norm")


@torch.no_grad()
def check_drafts(folder: Path) -> None:
    head, family, plain = load_head(folder, target("llava")), FAMILIES["llava"], Plain(folder)
    asked = prompts(family, family.inputs("image", rows=2))
    outputs, steps = recorded("llava", head, POLICIES["dynamic"], asked, n=12)
    assert [o.tokens for o in outputs] == family.reference("image", rows=2, n=12)
    lm_head, embed = target("llava").model.get_output_embeddings(), target("llava").model.get_input_embeddings()
    for row in range(2):
        inputs = family.row_inputs("image", row)
        for step in steps[:2]:
            text, start = Text.of("llava", inputs, step.emitted[row]), inputs["input_ids"].shape[1]
            out, nodes = plain.run(text.embeddings, text.states[:-1], start)[-1:], dict(step.nodes(row))
            torch.testing.assert_close(nodes[()], lm_head(out[0]), atol=1e-3, rtol=1e-3)
            (token,) = path = next(path for path in nodes if len(path) == 1)
            words = torch.cat([text.embeddings, embed(torch.tensor([token]))])
            behind = plain.run(words, torch.cat([text.states[:-1], out]), start)[-1]
            torch.testing.assert_close(nodes[path], lm_head(behind), atol=1e-3, rtol=1e-3)


def test_answers_and_drafts(tmp_path: Path) -> None:
    released(tmp_path)
    assert kind_in(tmp_path) == kind_at(tmp_path) == "dream"
    same(original(), load_head(tmp_path, target("llava")))
    check_drafts(tmp_path)
    save_head(original(), tmp_path / "ours")
    same(original(), load_head(tmp_path / "ours", target("llava")))


def test_a_first_token_without_an_entry_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = DreamDraftSession._entries

    def without(self: DreamDraftSession, *given: object) -> tuple[Tensor, Tensor]:
        tokens, sources = right(self, *given)  # type: ignore[arg-type]
        return tokens[1:], sources[1:]

    monkeypatch.setattr(DreamDraftSession, "_entries", without)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_drafts(released(tmp_path))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "hidden size": (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    "biases": (lambda d: edit(d, qkv_bias=True), "has qkv_bias True, which is not supported"),
    "no gate": (
        lambda d: reweigh(d, lambda w: w.pop("layers.1.cross_attn_mlp_gate")),
        "lacks the weight layers.1.cross_attn_mlp_gate; copy the whole folder again",
    ),
    "a mixing layer": (
        lambda d: reweigh(d, lambda w: w.update({"fc.weight": torch.ones(64, 64)})),
        "has the weight fc.weight, which is not known",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_known_is_refused(damage: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(released(tmp_path))
    assert kind_in(tmp_path) == "dream"
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target("llava"))
