"""Heads in their released layouts are loaded as they were meant and draft as their files say, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.generation import logits_process as hf

from families import FAMILIES
from heads_kit import POLICIES, Text, engine, kind_of_prompt, prompts, random_head, recorded, target
from released_kit import CASES, drop, edit, positions_of, randomised, release, reweigh, same, weighs
from saccade.draft.heads import store
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import kind_at, kind_in, load_head, save_head
from saccade.draft.trees.policy import DrawProposer
from saccade.engine import Request
from saccade.errors import ModelError
from saccade.target_model.selfcheck import LogitMap
from saccade.verify.rule import Uniforms

# --------------------------------------------------------------------------- what is loaded


@torch.no_grad()
def check_drafts(case: str, folder: Path) -> None:
    """Answers are the target's; drafts are the formulas', of a whole prompt, and of a guess after it."""
    released = CASES[case]
    name, family, prompt_kind = released.name, FAMILIES[released.name], kind_of_prompt(released.name)
    head, plain = load_head(folder, target(name)), released.plain(folder, name)
    requests = prompts(family, family.inputs(prompt_kind, rows=2))
    outputs, steps = recorded(name, head, POLICIES["dynamic"], requests, n=12)
    assert [o.tokens for o in outputs] == family.reference(prompt_kind, rows=2, n=12)
    embed = target(name).model.get_input_embeddings()
    for row in range(2):
        inputs = family.row_inputs(prompt_kind, row)
        for step in steps[:2]:
            text, nodes = Text.of(name, inputs, step.emitted[row]), dict(step.nodes(row))
            count = len(text.ids)
            positions = positions_of(name, inputs, count) if released.mrope else torch.arange(count)
            if released.mrope:
                assert (positions != torch.arange(count)).any(), "the picture must change positions"
            out = plain.after(text, [], positions[..., :-1])[-1]
            torch.testing.assert_close(nodes[()], plain.logits(out), atol=1e-3, rtol=1e-3)
            (token,) = path = next(path for path in nodes if len(path) == 1)
            after = plain.after(text, [(embed(torch.tensor(token)), out)], positions)[-1]
            torch.testing.assert_close(nodes[path], plain.logits(after), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_released_head_drafts_what_its_files_say_and_comes_back_as_ours(case: str, tmp_path: Path) -> None:
    released = CASES[case]
    release(case, tmp_path / "theirs")
    assert kind_in(tmp_path / "theirs") == kind_in(str(tmp_path / "theirs")) == kind_at(tmp_path / "theirs")
    assert kind_in(tmp_path / "theirs") == released.kind
    head = load_head(tmp_path / "theirs", target(released.name))
    if released.mrope:
        assert head.config.options["positions"] == "target"
    else:
        same(released.head(), head)
    check_drafts(case, tmp_path / "theirs")
    save_head(head, tmp_path / "ours")
    assert kind_in(tmp_path / "ours") == released.kind
    same(head, load_head(tmp_path / "ours", target(released.name)))


@pytest.mark.parametrize(
    ("case", "prefix"),
    [("eagle3", "layers.0."), ("eagle3", "model.layers.0."), ("eagle3", "model.midlayer."), ("msd", "model.")],
)
def test_pytorch_s_own_files_and_longer_names(case: str, prefix: str, tmp_path: Path) -> None:
    release(case, tmp_path, prefix=prefix, binary=True)
    assert kind_in(tmp_path) == CASES[case].kind
    same(CASES[case].head(), load_head(tmp_path, target("llava")))


def test_damaged_files_of_pytorch_are_refused_and_code_is_not_run(tmp_path: Path) -> None:
    release("eagle3", tmp_path, binary=True)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"step": 3}, file)
    with pytest.raises(ModelError, match="holds more than dense weights"):
        load_head(tmp_path, target("llava"))
    torch.save({"bias": Path("x")}, file)
    with pytest.raises(ModelError, match=r"carries code \(pathlib[\w.]+\), which is never run; give .* safetensors"):
        load_head(tmp_path, target("llava"))
    file.write_bytes(b"x" * 40)
    with pytest.raises(ModelError, match="is damaged"):
        load_head(tmp_path, target("llava"))


def test_a_head_of_the_whole_vocabulary(tmp_path: Path) -> None:
    whole = random_head("llava", "eagle3", own_vocabulary=target("llava").vocab_size)
    release("eagle3", tmp_path, whole)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    same(whole, load_head(tmp_path, target("llava")))
    drop(tmp_path, "draft_vocab_size")
    same(whole, load_head(tmp_path, target("llava")))
    reweigh(tmp_path, lambda w: w.pop("lm_head.weight"))
    shared = load_head(tmp_path, target("llava"))
    assert shared.config.options == {**Eagle3.defaults, "own_vocabulary": 0}


def test_what_config_json_may_say_otherwise(tmp_path: Path) -> None:
    folder = release("eagle3", tmp_path)
    edit(folder, architectures=["LlamaForCausalLM"])
    drop(folder, "head_dim", "rope_theta", "rms_norm_eps")
    config = load_head(folder, target("llava")).config
    assert (config.head_dim, config.norm_eps) == (16, 1e-6)
    assert config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    edit(folder, rope_theta=5e5, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})  # the target has none
    assert load_head(folder, target("llava")).config.rope == {"rope_type": "default", "rope_theta": 5e5}
    edit(folder, rope_scaling={"type": "linear", "factor": 2.0})
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "max_position_embeddings": 2048}
    assert load_head(folder, target("llava")).config.rope == stretched
    edit(folder, rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 2e4})
    assert load_head(folder, target("llava")).config.rope == {"rope_type": "default", "rope_theta": 2e4}
    edit(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 0])  # by the layers that they enter
    assert load_head(folder, target("llava")).layers == (1, 2, 0)
    drop(folder, "eagle_aux_hidden_state_layer_ids")
    edit(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 0, -1]})  # by the layers that they leave
    assert load_head(folder, target("llava")).layers == (2, 1, 0)


def test_a_vlm_s_config_json_may_nest_the_decoder_s(tmp_path: Path) -> None:
    folder = release("msd", tmp_path)
    drop(folder, "mm_vision_tower", "architectures")
    edit(folder, model_type="llava_llama", vocab_size=150)  # which is not the head's
    assert kind_in(folder) == "msd"
    values = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "llava", "text_config": {**values, "model_type": "llama", "rope_theta": 5e5}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert kind_in(folder) == "msd"
    config = load_head(folder, target("llava")).config
    assert (config.rope["rope_theta"], config.vocab_size) == (5e5, 192)


# --------------------------------------------------------------------------- what is refused


def nested(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    edit(folder, transformer_layer_config=values["transformer_layer_config"] | changes)


def with_weight(name: str, *shape: int) -> Callable[[Path], None]:
    return weighs(lambda weights: weights.update({name: torch.ones(shape)}))


DAMAGE: dict[tuple[str, str], tuple[Callable[[Path], object], str]] = {
    ("eagle3", "architecture"): (
        lambda d: edit(d, architectures=["Eagle3DeepseekV2ForCausalLM"]),
        "has the architecture Eagle3DeepseekV2ForCausalLM, which is not known; expected LlamaForCausalLMEagle3",
    ),
    ("eagle3", "two layers"): (lambda d: edit(d, num_hidden_layers=2), "has num_hidden_layers 2, .*; expected 1"),
    ("eagle3", "logits without a norm"): (lambda d: edit(d, norm_output=False), "has norm_output False"),
    ("eagle3", "no size"): (lambda d: drop(d, "hidden_size"), "has hidden_size None in its config.json"),
    ("eagle3", "target's size"): (
        lambda d: edit(d, target_hidden_size=96),
        "hidden size is 96 but this target's is 64; give the target that",
    ),
    ("eagle3", "vocabulary"): (lambda d: edit(d, vocab_size=191), "vocabulary is 191 but this target's is 192"),
    ("eagle3", "draft vocabulary"): (
        lambda d: edit(d, draft_vocab_size=41),
        "draft_vocab_size 41 .* a whole number from 1 to 40",
    ),
    ("eagle3", "rope"): (
        lambda d: edit(d, rope_scaling={"rope_type": "su", "factor": 2.0}),
        "The rope type 'su' is not known",
    ),
    ("eagle3", "half a rope"): (
        lambda d: edit(d, rope_scaling={"rope_type": "yarn"}),
        "rotary settings .* are incomplete or wrong .*'factor'",
    ),
    ("eagle3", "layers"): (
        lambda d: edit(d, eagle_aux_hidden_state_layer_ids=[1]),
        "reads 1 layers of its target; expected 3",
    ),
    ("eagle3", "no such layer"): (
        lambda d: edit(d, eagle_aux_hidden_state_layer_ids=[0, 1, 9]),
        "reads layer 9 of its target, which has states 0 to 2",
    ),
    ("eagle3", "last layer alone"): (
        lambda d: edit(d, eagle_config={"use_aux_hidden_state": False}),
        "reads the last layer alone, which is not supported",
    ),
    ("eagle3", "no weights"): (
        lambda d: (d / "model.safetensors").unlink(),
        "has no model.safetensors or pytorch_model.bin",
    ),
    ("eagle3", "weight missing"): (
        weighs(lambda w: w.pop("midlayer.hidden_norm.weight")),
        "lacks the weight midlayer.hidden_norm.weight; copy the whole folder again",
    ),
    ("eagle3", "no LM head"): (weighs(lambda w: w.pop("lm_head.weight")), "lacks the weight lm_head.weight"),
    ("eagle3", "no d2t"): (weighs(lambda w: w.pop("d2t")), "lacks the weight d2t, which maps its 40 tokens"),
    ("eagle3", "d2t beyond"): (weighs(lambda w: w["d2t"].add_(192)), "does not name 40 different ones of 192 tokens"),
    ("eagle3", "d2t twice"): (weighs(lambda w: w["d2t"].copy_(-torch.arange(40))), "does not name 40 different ones"),
    ("eagle3", "unknown weight"): (
        with_weight("fc_norm.0.weight", 64),
        "has the weight fc_norm.0.weight, which is not",
    ),
    ("eagle3", "shape"): (with_weight("fc.weight", 64, 128), r"fc.weight .* is \(64, 128\), not \(64, 192\)"),
    ("speculators", "residual unsaid"): (
        lambda d: drop(d, "norm_before_residual"),
        "does not say norm_before_residual .* for which speculators and vLLM assume different values",
    ),
    ("speculators", "block's type"): (lambda d: nested(d, model_type="gpt_oss"), "of the model type 'gpt_oss'"),
    ("speculators", "no block"): (lambda d: drop(d, "transformer_layer_config"), "of the model type None"),
    ("speculators", "own embedding"): (lambda d: edit(d, embed_requires_grad=True), "has embed_requires_grad True"),
    ("speculators", "window"): (
        lambda d: nested(d, layer_types=["sliding_attention"]),
        "has attention in a sliding window, which is not supported",
    ),
    ("speculators", "two layers"): (lambda d: nested(d, num_hidden_layers=2), "has num_hidden_layers 2, .*; expected"),
    ("speculators", "norm missing"): (lambda d: edit(d, norm_before_fc=True), "lacks the weight input_norm.weight"),
    ("msd", "activation"): (lambda d: edit(d, hidden_act="gelu"), "has hidden_act 'gelu', which is not supported"),
    ("msd", "window"): (lambda d: edit(d, use_sliding_window=True), "has use_sliding_window True"),
    ("msd", "hidden size"): (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    ("msd", "LM head"): (with_weight("lm_head.weight", 192, 64), "has the weight lm_head.weight, which is not known"),
    ("msd", "one bias"): (with_weight("layers.0.self_attn.v_proj.bias", 32), "lacks the weight stack.0.self_attn"),
    ("dream", "hidden size"): (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    ("dream", "biases"): (lambda d: edit(d, qkv_bias=True), "has qkv_bias True, which is not supported"),
    ("dream", "no gate"): (
        weighs(lambda w: w.pop("layers.1.cross_attn_mlp_gate")),
        "lacks the weight layers.1.cross_attn_mlp_gate; copy the whole folder again",
    ),
    ("hivis", "hidden size"): (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    ("hivis", "no mixing"): (weighs(lambda w: w.pop("fc.weight")), "lacks the weight fc.weight"),
    ("hivis", "pair"): (
        with_weight("fc.weight", 64, 128),
        r"of the shapes \(64, 128\) and \(4, 64\); expected \(64, 192\)",
    ),
    ("vispec", "hidden size"): (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    ("vispec", "no adaptor"): (weighs(lambda w: w.pop("imadpt.k_proj.weight")), "lacks the weight imadpt.k_proj"),
    ("vispec", "one query"): (with_weight("imadpt.q", 1, 4, 16), r"has imadpt.q of the shape \(1, 4, 16\); expected"),
}


@pytest.mark.parametrize(("case", "damage"), DAMAGE)
def test_what_is_not_known_is_refused(case: str, damage: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[case, damage]
    harm(release(case, tmp_path))
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target("llava"))


@pytest.mark.parametrize("algorithm", ["eagle", "mtp"])
def test_other_speculators_are_named(algorithm: str, tmp_path: Path) -> None:
    edit(release("speculators", tmp_path), speculators_model_type=algorithm)
    for read in (kind_in, kind_at, lambda folder: load_head(folder, target("llava"))):
        with pytest.raises(
            ModelError, match=f"'{algorithm}' are not supported; expected eagle3, peagle, dflash, dflash2 or"
        ):
            read(tmp_path)


def test_a_small_llama_is_no_head(tmp_path: Path) -> None:
    FAMILIES["llama"].model(layers=1).save_pretrained(tmp_path)
    assert kind_in(tmp_path) is None
    with pytest.raises(ModelError, match="has no 'saccade_head'"):
        kind_at(tmp_path)
    reweigh(tmp_path, lambda w: w.update({"fc.weight": torch.ones(64, 192)}))  # of another form
    assert kind_in(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 40)
    assert kind_in(tmp_path) is None


def test_no_weights_of_deeper_models_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_shapes", lambda *_: pytest.fail("looked"))
    edit(release("msd", tmp_path), num_hidden_layers=2)
    assert kind_in(tmp_path) is None
    save_head(CASES["msd"].head(), tmp_path)
    edit(tmp_path, num_hidden_layers=1)  # ours, whatever else it says
    assert kind_in(tmp_path) == "msd"


# --------------------------------------------------------------------------- a vocabulary of its own


def test_trees_wider_than_the_vocabulary() -> None:
    head, family = randomised(random_head("llava", "eagle3", own_vocabulary=2)), FAMILIES["llava"]
    requests = [Request(prompt) for prompt in prompts(family, family.inputs("image", rows=2))]
    for policy in POLICIES.values():
        outputs = engine("llava", head, policy).generate(requests, max_new_tokens=12)
        assert [o.tokens for o in outputs] == family.reference("image", rows=2, n=12)


@pytest.mark.parametrize(
    "warper",
    [
        hf.TemperatureLogitsWarper(0.5),
        hf.TopKLogitsWarper(60),
        hf.TopPLogitsWarper(0.9),
        hf.InfNanRemoveLogitsProcessor(),
    ],
    ids=lambda warper: type(warper).__name__,
)
def test_tokens_that_it_does_not_know_are_never_drawn(warper: Any) -> None:
    head = CASES["eagle3"].head()
    logits = HeadDrafter(head, target("llava"), POLICIES["chain"]).logits(torch.randn(3, 2, 64)).detach()
    unknown = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill(0, head.token_ids, False)
    assert logits[..., unknown].isneginf().all()
    uniforms = Uniforms([torch.Generator().manual_seed(row) for row in range(3)], (1, 1), 16, logits.device)
    tokens, q = DrawProposer(lambda scores: warper(None, scores), uniforms).children(logits, 3)
    assert q is not None
    assert torch.isfinite(q).all()
    assert not q[..., unknown].any()
    assert set(tokens.flatten().tolist()) <= set(head.token_ids.tolist())


def test_the_logits_of_its_own_head_are_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.draft.heads.session.logit_map", lambda target: LogitMap(3.0))
    states, head = torch.randn(1, 4, 64), CASES["eagle3"].head()
    logits = HeadDrafter(head, target("llava"), POLICIES["chain"]).logits(states)
    torch.testing.assert_close(logits, head.logits(states, torch.nn.Identity()))
