"""ViSpec heads in their released layout draft as their files say, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_kit import POLICIES, Text, prompts, random_head, recorded, target
from published_kit import edit, randomised, reweigh, same, write
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from families import FAMILIES
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.draft.heads.vispec import ViSpec, ViSpecDraftSession, runs_of
from saccade.errors import ModelError

CASES = {"llava": (2, True), "qwen2_5_vl": (3, False)}
"""Family of the target -> queries, and whether both mixing layers have a bias."""


@cache
def original(name: str) -> ViSpec:
    queries, bias = CASES[name]
    head = random_head(name, "vispec", queries=queries, form="released", bias=bias)
    assert isinstance(head, ViSpec)
    return randomised(head)


def released(name: str, folder: Path) -> Path:
    head = original(name)
    renamed = {"adaptor.": "imadpt.", "image_fc.": "img_fc.", "block.": "layers.0."}
    theirs = {"embed_tokens.weight": target(name).model.get_input_embeddings().weight}
    for key, weight in head.state_dict().items():
        prefix = next((p for p in renamed if key.startswith(p)), "")
        theirs[renamed.get(prefix, "") + key.removeprefix(prefix)] = weight
    queries = theirs.pop("imadpt.queries")
    theirs["imadpt.q"] = queries.unflatten(-1, (head.config.heads, -1))
    return write(folder, head.config, theirs, qkv_bias=head.config.qkv_bias)


class Plain:
    """A text by the released formulas, from the files alone."""

    def __init__(self, folder: Path) -> None:
        self.values = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def _compressed(self, tokens: Tensor) -> Tensor:
        q = self.weights["imadpt.q"]
        heads, dim = q.shape[1:]
        k, v = (self._linear(tokens, f"imadpt.{part}_proj").view(-1, heads, dim) for part in "kv")
        share = (torch.einsum("qhd,nhd->hqn", q, k) / dim**0.5).softmax(-1)
        return self._linear(torch.einsum("hqn,nhd->qhd", share, v).flatten(1), "imadpt.o_proj")

    def run(self, text: Text, guesses: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Outputs behind a text, and behind draft tokens (embedding and output before it) that follow."""
        images = {stop: (first, self._compressed(text.embeddings[first:stop])) for first, stop in runs_of(text.visual)}
        seen, inputs, positions = torch.zeros_like(text.states[0]), [], []
        for token in range(1, len(text.ids) + len(guesses)):
            if token in images:
                seen = images[token][1][-1]
            if token < len(text.ids) and text.visual[token]:
                stop = next(stop for stop in images if token < stop)
                vectors = images[stop][1]
                place = token - (stop - (len(vectors) - 1))
                if place >= 0:
                    inputs.append(vectors[place])
                    positions.append(token - 1)
                continue
            if token < len(text.ids):
                word, feature = text.embeddings[token], text.states[token - 1]
            else:
                word, feature = guesses[token - len(text.ids)]
            mixed = self._linear(torch.cat([feature, seen]), "img_fc")
            inputs.append(self._linear(torch.cat([word, mixed]), "fc"))
            positions.append(token - 1)
        return self._block(torch.stack(inputs), torch.tensor(positions))

    def _block(self, x: Tensor, positions: Tensor) -> Tensor:
        count, values = len(x), self.values
        heads, kv = values["num_attention_heads"], values["num_key_value_heads"]
        dim = values["hidden_size"] // heads
        angles = torch.outer(positions, values["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)[:, None]

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        q, k, v = (
            self._linear(x, f"layers.0.self_attn.{part}_proj").view(count, n, dim)
            for part, n in (("q", heads), ("k", kv), ("v", kv))
        )
        q, k, v = turned(q), turned(k).repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        x = x + self._linear(
            torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1), "layers.0.self_attn.o_proj"
        )
        scale = (x.square().mean(-1, keepdim=True) + values["rms_norm_eps"]).sqrt()
        after = self.weights["layers.0.post_attention_layernorm.weight"] * x / scale
        gated = F.silu(self._linear(after, "layers.0.mlp.gate_proj")) * self._linear(after, "layers.0.mlp.up_proj")
        return x + self._linear(gated, "layers.0.mlp.down_proj")


@torch.no_grad()
def check_drafts(name: str, folder: Path) -> None:
    head, family, plain = load_head(folder, target(name)), FAMILIES[name], Plain(folder)
    asked = prompts(family, family.inputs("image", rows=2))
    outputs, steps = recorded(name, head, POLICIES["dynamic"], asked, n=12)
    assert [o.tokens for o in outputs] == family.reference("image", rows=2, n=12)
    lm_head, embed = target(name).model.get_output_embeddings(), target(name).model.get_input_embeddings()
    for row in range(2):
        for step in steps[:2]:
            text = Text.of(name, family.row_inputs("image", row), step.emitted[row])
            out, nodes = plain.run(text, [])[-1], dict(step.nodes(row))
            torch.testing.assert_close(nodes[()], lm_head(out), atol=1e-3, rtol=1e-3)
            (token,) = path = next(path for path in nodes if len(path) == 1)
            behind = plain.run(text, [(embed(torch.tensor(token)), out)])[-1]
            torch.testing.assert_close(nodes[path], lm_head(behind), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_answers_and_drafts(name: str, tmp_path: Path) -> None:
    released(name, tmp_path)
    assert kind_in(tmp_path) == kind_at(tmp_path) == "vispec"
    same(original(name), load_head(tmp_path, target(name)))
    check_drafts(name, tmp_path)
    save_head(original(name), tmp_path / "ours")
    same(original(name), load_head(tmp_path / "ours", target(name)))


def test_positions_of_entries_in_place_of_tokens_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ViSpecDraftSession, "_place", lambda *_: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_drafts("llava", released("llava", tmp_path))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "hidden size": (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    "two layers": (
        lambda d: reweigh(d, lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.ones(96, 64)})),
        "has the weight layers.1.mlp.up_proj.weight, which is not known",
    ),
    "no adaptor": (
        lambda d: reweigh(d, lambda w: w.pop("imadpt.k_proj.weight")),
        "lacks the weight imadpt.k_proj.weight; copy the whole folder again",
    ),
    "one query": (
        lambda d: reweigh(d, lambda w: w.update({"imadpt.q": torch.ones(1, 4, 16)})),
        r"has imadpt.q of the shape \(1, 4, 16\); expected at least 2 queries of 64 numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_known_is_refused(damage: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(released("llava", tmp_path))
    assert kind_in(tmp_path) == "vispec"
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target("llava"))


@pytest.mark.parametrize("option", [{"form": "released"}, {"bias": True}])
def test_such_heads_are_not_trained(option: dict[str, Any]) -> None:
    from dataclasses import replace

    from saccade.errors import TrainingError
    from saccade.train.recipe import read_recipe
    from saccade.train.warm_start import new_head

    with pytest.raises(TrainingError, match="can be loaded but not trained here"):
        new_head(target("llava"), replace(read_recipe("vispec"), head=option))
