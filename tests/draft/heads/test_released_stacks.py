"""Medusa and Hydra heads in their released layout draft as their files say, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from families import FAMILIES
from heads_kit import POLICIES, Text, prompts, recorded, target
from released_kit import drop, edit, same, weighs
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.errors import ModelError
from stacks_kit import CASES, D, V, hydra, medusa, vllm


def weights_of(folder: Path) -> dict[str, Tensor]:
    (file,) = (file for file in folder.iterdir() if file.name != "config.json")
    found: dict[str, Tensor] = torch.load(file) if file.suffix == ".pt" else load_file(file)
    return {name.removeprefix("medusa_head."): weight for name, weight in found.items()}


def by_hand(folder: Path, text: Text, length: int, path: tuple[int, ...]) -> Tensor:
    """Logits ``[V]`` after the first ``length`` tokens and a path of guesses, by the released formulas."""
    values, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    model, depth = target("llava").model, len(path)
    layer = len(text.streams) - 1 - values.get("hidden_state_offset", 0)
    x = text.streams[layer][length - 2]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    if values.get("model_type") == "medusa":
        for j in range(values["num_hidden_layers"]):
            x = x + F.silu(x @ weights[f"blocks.{depth}.layers.{j}.weight"].T)
        if values.get("original_lm_head"):
            return model.get_output_embeddings()(x)
        tokens, rows = weights.get("token_map", torch.arange(V)), weights[f"lm_heads.{depth}.weight"]
        logits = torch.full((V,), -torch.inf)
        logits[tokens] = (rows[tokens] if len(rows) > len(tokens) else rows) @ x
        return logits
    if "medusa_num_heads" in values:
        for j in range(values["medusa_num_layers"]):
            x = x + F.silu(linear(x, f"{depth}.{j}.linear"))
        own = weights.get(f"{depth}.{values['medusa_num_layers']}.weight")
        return model.get_output_embeddings()(x) if own is None else own @ x
    words = model.get_input_embeddings()(torch.tensor([int(text.ids[length - 1]), *path]))
    x = torch.cat([x, words.flatten()])
    x = linear(x, f"hydra_mlp.{depth}.0.res_connection") + F.silu(linear(x, f"hydra_mlp.{depth}.0.linear"))
    for j in range(1, values["hydra_num_layers"]):
        x = x + F.silu(linear(x, f"hydra_mlp.{depth}.{j}.linear"))
    return linear(x, f"hydra_lm_head.{depth}")


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_answers_and_drafts(case: str, tmp_path: Path) -> None:
    folder, family = CASES[case](tmp_path), FAMILIES["llava"]
    kind = case.split()[0]
    assert kind_in(folder) == kind_at(folder) == kind
    head = load_head(folder, target("llava"))
    asked = prompts(family, family.inputs("image", rows=2))
    outputs, steps = recorded("llava", head, POLICIES["static"], asked, n=12)
    assert [o.tokens for o in outputs] == family.reference("image", rows=2, n=12)
    for row in range(2):
        inputs = family.row_inputs("image", row)
        text, start = Text.of("llava", inputs, outputs[row].tokens), inputs["input_ids"].shape[1]
        for step in steps[:3]:
            for path, logits in step.nodes(row):
                expected = by_hand(folder, text, start + len(step.emitted[row]), path)
                torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    save_head(head, tmp_path / "ours")
    same(head, load_head(tmp_path / "ours", target("llava")))


DAMAGE: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object], str]] = {
    "another weight": (
        medusa,
        weighs(lambda w: w.update({"5.weight": torch.ones(1)})),
        "has the weight 5.weight, which is not known",
    ),
    "another stack's layer": (
        medusa,
        weighs(lambda w: w.update({"4.1.linear.weight": torch.ones(1)})),
        "lacks the weight 0.1.linear.weight",
    ),
    "vocabulary in vLLM": (lambda d: vllm(d, words=96), lambda d: edit(d, vocab_size=96), "vocabulary is 96 but this"),
    "fewer stacks": (medusa, lambda d: edit(d, medusa_num_heads=6), "lacks the weight 5.0.linear.weight"),
    "vocabulary": (
        medusa,
        weighs(lambda w: w.update({"0.1.weight": torch.ones(191, D)})),
        "vocabulary is 191 but this target's is 192",
    ),
    "width": (
        medusa,
        weighs(lambda w: w.update({"0.0.linear.weight": torch.ones(96, 96)})),
        "hidden size is 96 but this target's is 64",
    ),
    "no weights": (medusa, lambda d: (d / "medusa_lm_head.pt").unlink(), "has no medusa_lm_head.safetensors or"),
    "Hydra++": (hydra, lambda d: edit(d, hydra_head_arch="prefix-mlp"), r"\(prefix-mlp is Hydra\+\+\), which is not"),
    "not grounded": (hydra, lambda d: drop(d, "grounded_heads"), "has grounded_heads None, which is not supported"),
    "no projection": (
        hydra,
        weighs(lambda w: w.pop("hydra_mlp.2.0.res_connection.bias")),
        "lacks the weight hydra_mlp.2.0.res_connection.bias; copy the whole folder again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_known_is_refused(damage: str, tmp_path: Path) -> None:
    make, harm, message = DAMAGE[damage]
    harm(make(tmp_path))
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target("llava"))
