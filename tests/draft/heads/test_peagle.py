"""P-EAGLE's drafts of all levels are those of its files' formulas and of speculators' own module."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import saccade
from checkpoints import picture, ready
from families import FAMILIES
from heads_kit import POLICIES, Text, engine, kind_of_prompt, prompts, recorded, target
from released_kit import CASES, KNOWN, drop, edit, randomised, release, reweigh, weighs
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Request
from saccade.errors import ModelError

Patch = pytest.MonkeyPatch


@torch.no_grad()
def check_levels(case: str, folder: Path, policy: str = "dynamic", rows: int = 2, n: int = 12) -> None:
    """Answers are the target's; logits of every level are the formulas', over ragged rows and later steps."""
    name, kind = CASES[case].name, kind_of_prompt(CASES[case].name)
    family = FAMILIES[name]
    head, plain = load_head(folder, target(name)), CASES[case].plain(folder, name)
    requests = prompts(family, family.inputs(kind, rows=rows))
    outputs, steps = recorded(name, head, POLICIES[policy], requests, n=n)
    assert [o.tokens for o in outputs] == family.reference(kind, rows=rows, n=n)
    for row in range(rows):
        inputs, nothing = family.row_inputs(kind, row), (torch.empty(0), torch.empty(0))
        for step in (step for step in steps[:3] if step.emitted[row]):
            text = Text.of(name, inputs, step.emitted[row])
            levels = {len(path): logits for path, logits in step.nodes(row)}
            assert len(levels) == max(levels) + 1
            positions = torch.arange(len(text.ids) - 1 + max(levels))
            expected = plain.logits(plain.after(text, [nothing] * max(levels), positions)[len(text.ids) - 2 :])
            for depth, logits in levels.items():
                torch.testing.assert_close(logits, expected[depth], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("case", ["peagle", "peagle-frozen"])
def test_every_level_is_what_the_files_say(case: str, policy: str, tmp_path: Path) -> None:
    check_levels(case, release(case, tmp_path), policy, rows=2 if policy == "chain" else 1)


@pytest.mark.parametrize("policy", ["chain", "dynamic"])
@pytest.mark.parametrize("rows", [1, 8])
def test_answers_are_generate_s_in_one_forward_of_the_head_per_step(rows: int, policy: str) -> None:
    family, head = FAMILIES["llava"], CASES["peagle"].head()
    forwards: list[int] = []
    handle = head.register_forward_hook(lambda *_: forwards.append(1))
    outputs = engine("llava", head, POLICIES[policy]).generate(
        [Request(prompt) for prompt in prompts(family, family.inputs("image", rows=rows))], max_new_tokens=10
    )
    handle.remove()
    assert [o.tokens for o in outputs] == family.reference("image", rows=rows, n=10)
    assert sum(o.stats.drafted_tokens for o in outputs) > 20 * rows
    assert len(forwards) <= rows + max(o.stats.target_passes for o in outputs)  # of every prompt, then of every step


def test_a_chain_that_ends_early_has_fewer_masks() -> None:
    family, head = FAMILIES["llama"], CASES["peagle-llama"].head()
    widths: list[int] = []
    handle = head.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    (prompt,) = prompts(family, family.row_inputs("text", 0))
    engine("llama", head, Chain(6)).generate([Request(prompt)], max_new_tokens=4)
    handle.remove()
    assert widths[1] == 1 + 2  # one token, and two masks for the second and third of the three tokens that are left


# --------------------------------------------------------------------------- speculators' own module


@torch.no_grad()
def test_drafts_are_those_of_speculators_own_module(tmp_path: Path, monkeypatch: Patch) -> None:
    core = pytest.importorskip("speculators.models.peagle.core", reason="needs the package speculators")
    folder = release("peagle-deep", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    depths, family, inputs = 4, FAMILIES["llama"], FAMILIES["llama"].row_inputs("text", 0)
    outputs, steps = recorded("llama", load_head(folder, target("llama")), Chain(depths), prompts(family, inputs), n=8)
    text = Text.of("llama", inputs, [*outputs[0].tokens, *[5] * depths])
    entries = len(text.ids) - 1
    config = core.PEagleSpeculatorConfig(**{key: values[key] for key in values if key != "speculators_config"})
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = core.PEagleDraftModel(config)
    theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    places = torch.cartesian_prod(torch.arange(depths), torch.arange(entries - depths))
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (places[:, 1], places[:, 0]))
    shown: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: shown.append(out.unflatten(1, (depths, -1))[0]))
    states = torch.cat([text.streams[layer] for layer in values["eagle_aux_hidden_state_layer_ids"]], -1)
    theirs(
        states[None, :-1],
        text.ids[None, 1:],
        torch.zeros(1, entries, dtype=torch.long),
        verifier_last_hidden_states=text.states[None, 1:],
        loss_config={"none": (lambda logits, targets: logits.sum(-1), 1.0)},
    )
    known = CASES["peagle-deep"].head().token_ids
    for step in steps:
        root = text.prompt + len(step.emitted[0]) - 2  # its entry
        for path, logits in step.nodes(0):
            torch.testing.assert_close(logits[known], shown[0][len(path), root], atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------- folders

DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no masks": (weighs(lambda w: w.pop("mask_hidden")), "lacks the weight mask_hidden; copy the whole folder again"),
    "no embedding": (weighs(lambda w: w.pop("embed_tokens.weight")), "lacks the weight embed_tokens.weight"),
    "a block too few": (weighs(lambda w: w.pop("layers.2.mlp.up_proj.weight")), "lacks the weight layers.2.mlp.up"),
    "a block too many": (
        weighs(lambda w: w.update({"layers.4.mlp.up_proj.weight": torch.ones(2, 2)})),
        "has the weight layers.4.mlp.up_proj.weight, which is not known",
    ),
    "another size": (
        weighs(lambda w: w.update(mask_hidden=torch.ones(1, 1, 64))),
        r"The weight mask_hidden .* is \(64,\), not \(192,\); its config.json belongs to another head",
    ),
    "another embedding": (
        weighs(lambda w: w.update({"embed_tokens.weight": torch.ones(192, 32)})),
        r"mask_embedding .* is \(32,\), not \(64,\)|embed_tokens.weight .* is \(192, 32\), not \(192, 64\)",
    ),
    "no mask token": (lambda d: drop(d, "mask_token_id"), "has the mask_token_id None in its config.json; expected"),
    "mask token beyond": (lambda d: edit(d, mask_token_id=192), "has the mask_token_id 192 .* one of its 192 tokens"),
    "residual unsaid": (lambda d: drop(d, "norm_before_residual"), "does not say norm_before_residual"),
    "no block": (lambda d: drop(d, "transformer_layer_config"), "of the model type None"),
    "layers": (lambda d: edit(d, eagle_aux_hidden_state_layer_ids=[1]), "reads 1 layers of its target; expected 3"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_a_sentence(damage: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(release("peagle", tmp_path))
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target("llava"))


def test_biases_that_a_block_does_not_use_are_left_out_and_depths_are_read(tmp_path: Path) -> None:
    folder = release("peagle", tmp_path)
    zero = torch.zeros(64)
    reweigh(folder, lambda w: w.update({f"layers.{i}.self_attn.o_proj.bias": zero.clone() for i in range(4)}))
    edit(folder, speculators_config={"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]})
    head = load_head(folder, target("llava"))
    assert head.config == replace(CASES["peagle"].head().config, steps=5)


def test_a_folder_drafts_in_turns_about_a_picture(tmp_path: Path) -> None:
    plain = saccade.load(ready("llava"), method="plain", dtype="float32")
    made_for = HeadConfig.from_target(plain.target, "peagle", own_vocabulary=KNOWN, embedding="own")
    folder = release("peagle", tmp_path, randomised(build_head(made_for)))
    vlm = saccade.load(ready("llava"), folder, dtype="float32")
    assert vlm.method == "peagle"
    chats = [one.chat() for one in (plain, vlm)]
    for question, pictures in (("What is this?", [picture()]), ("And why?", [])):
        expected, answer = (chat.send(question, pictures, max_new_tokens=12) for chat in chats)
        assert answer.tokens == expected.tokens
        assert answer.stats.drafted_tokens > 0
