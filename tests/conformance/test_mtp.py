"""The target's own prediction layer drafts what transformers' generator drafts, and answers stay the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling_kit import ROWS, SMALL, assert_follows, small_model
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.generation.candidate_generator import MTPCandidateGenerator

import saccade.hf
from architectures import ARCHITECTURES
from families import FAMILIES, FamilyCase, _text, reference_greedy
from harness import proposals
from mtp_kit import DELTA, KINDS, KINDS_APART, save, write
from saccade import resolution
from saccade.draft.heads.mtp import load_mtp
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.suffix import SuffixDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target

STATIC = StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
POLICIES: dict[str, Any] = {"chain": Chain(3), "static": STATIC, "dynamic": DynamicTree(top=2, max_depth=3, total=6)}
PROMPTS = [Prompt((5, 9, 3, 17, 9, 3, 17, 4)), Prompt((7, 7, 1)), Prompt((30, 2, 11, 8, 40))]
NEW = 12


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    return Target(AutoModelForCausalLM.from_pretrained(folder))


def engine(target: Target, policy: Any) -> Engine:
    return Engine(target, HeadDrafter(load_mtp(target), target, policy))


def greedy(target: Target, prompt: Prompt) -> list[int]:
    ids = torch.tensor([prompt.ids])
    return target.model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()


def test_every_weight_is_read_into_its_place(target: Target) -> None:
    written, read = load_file(Path(target.config.name_or_path, "first.safetensors")), load_mtp(target).stack[0]
    torch.testing.assert_close(dict(read.state_dict()), written, rtol=0, atol=0)


def test_the_layer_counts_the_bytes_that_it_holds_of_a_token(target: Target) -> None:
    if target.traits.model_type == "mimo_v2_flash":
        pytest.skip("its sliding layers have twice the key and value heads that its configuration names")
    under = engine(target, POLICIES["chain"])
    session: Any = under.open(1)
    under.generate([Request(PROMPTS[0])], max_new_tokens=2, session=session)
    entries = session.drafting.entries
    features, cache = entries.features.at[0], entries.cache
    assert session.drafting._drafter.facts.entry_bytes == cache.nbytes / cache.slots + features.nbytes / len(features)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_the_targets(target: Target, policy: str, rows: int) -> None:
    requests = [Request(prompt) for prompt in PROMPTS[:rows]]
    outputs = engine(target, POLICIES[policy]).generate(requests, max_new_tokens=NEW)
    assert [list(output.tokens) for output in outputs] == [greedy(target, prompt) for prompt in PROMPTS[:rows]]


def drafted(target: Target, policy: Any, prompts: Sequence[Prompt] = PROMPTS[:1]) -> dict[tuple[int, ...], list[int]]:
    """The tokens that the layer drafts after every text that the answers come to; of a tree, its likeliest path."""
    chains = {}
    for row, shown, tree in proposals(engine(target, policy), [Request(prompt) for prompt in prompts], NEW)[1]:
        parents, path = tree.parents[0].tolist(), [0]
        while path[-1] in parents[path[-1] + 1 :]:
            path.append(parents.index(path[-1], path[-1] + 1))
        chains[(*prompts[row].ids, *shown)] = tree.tokens[0, path[1:]].tolist()
    return chains


def test_a_first_draft_token_is_that_of_transformers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(target.config, "num_mtp_layers"):
        pytest.skip("transformers loads no prediction layer whose weights are apart from the decoder's")
    candidates, theirs = MTPCandidateGenerator.get_candidates, {}

    def record(self: Any, input_ids: Any, *others: Any, **more: Any) -> Any:
        ids, logits = candidates(self, input_ids, *others, **more)
        theirs[tuple(input_ids[0].tolist())] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", record)
    monkeypatch.setattr(target.model, "_keys_to_ignore_on_load_unexpected", [r"layers\.2\."])
    target.model.generate(torch.tensor([PROMPTS[0].ids]), max_new_tokens=NEW, do_sample=False, use_mtp=True)
    ours = drafted(target, Chain(1))
    common = [text for text in ours if theirs.get(text)]
    assert len(common) > NEW // 2
    assert [ours[text] for text in common] == [theirs[text] for text in common]


def slowest(
    target: Target, text: tuple[int, ...], count: int, prompt: Prompt = PROMPTS[0], **media: Tensor
) -> list[int]:
    """Tokens drafted after a text by one forward of the layer over all of it for each, without a cache."""
    layer, chain = load_mtp(target).stack[0], []
    ids, types = torch.tensor([text]), "mm_token_type_ids"
    if types in media:
        media[types] = pad(media[types], (0, len(text) - media[types].shape[1]))
    hidden = target.model(ids, output_hidden_states=True, **media).hidden_states
    places, _ = target.positions(ids, Prompt(text, prompt.media))
    places = torch.arange(len(text))[None] if places is None else places
    text_config = target.config.get_text_config()
    (kind, *_) = getattr(text_config, "mtp_layer_types", None) or KINDS_APART.get(text_config.model_type, [""])
    of_kind = {"layer_type": kind} if target.config.model_type in ("step3p7", "mimo_v2_flash") else {}
    embedded, states = hidden[0][:, 1:], hidden[-1][:, :-1]  # pictures are read as the decoder reads them
    for _ in range(count):
        positions = torch.cat([places[..., :-1], places[..., -1:] + torch.arange(len(chain))], -1)
        mask = torch.full((1, 1, positions.shape[-1], positions.shape[-1]), -torch.inf).triu(1)
        if kind == "sliding_attention":
            mask = mask + torch.full_like(mask, -torch.inf).tril(-text_config.sliding_window)
        angles = target.decoder.rotary_emb(embedded, position_ids=positions, **of_kind)
        last = layer(embedded, states, angles, mask, positions, None)[:, -1:]
        chain.append(int(target.lm_head(last).argmax()))
        states = torch.cat([states, last], 1)
        embedded = torch.cat([embedded, target.embed(torch.tensor([chain[-1:]]))], 1)
    return chain


@torch.inference_mode()
@pytest.mark.parametrize("policy", [Chain(3), STATIC])
def test_every_draft_token_is_that_of_a_forward_over_the_whole_text(target: Target, policy: Any) -> None:
    chains = drafted(target, policy, PROMPTS)
    assert len(chains) > NEW // 4
    assert chains == {text: slowest(target, text, len(chain)) for text, chain in chains.items()}


STEP_LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
SEEING: dict[str, dict[str, Any]] = {
    "llava": {**_text(None), "num_nextn_predict_layers": 1, **KINDS["glm4_moe"], "model_type": "glm4_moe"},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": DELTA["layer_types"], "mtp_num_hidden_layers": 1},
    "step3p7": {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 2,
        "layer_types": [*STEP_LAYERS, "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
    },
}
"""Text configurations of models with pictures, one with M-RoPE and one with two prediction layers."""


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FamilyCase, Target]:
    case = {**FAMILIES, **ARCHITECTURES}[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = case.model().config.to_dict()
        text = {k: v for k, v in parts["text_config"].items() if k != "per_layer_config"}
        parts["text_config"] = {**text, **SEEING[request.param]}
        model = AutoModelForImageTextToText.from_config(type(case.model().config)(**parts))
        folder = write(
            model, tmp_path_factory.mktemp("seeing"), SEEING[request.param].get("num_nextn_predict_layers", 1)
        )
    return case, Target(AutoModelForImageTextToText.from_pretrained(folder))


@pytest.mark.parametrize("policy", ["chain", "dynamic"])
def test_answers_about_pictures_are_the_targets(seeing: tuple[FamilyCase, Target], policy: str) -> None:
    case, target = seeing
    requests = [Request(split(target.config, case.row_inputs("image", row))[0]) for row in range(3)]
    outputs = engine(target, POLICIES[policy]).generate(requests, max_new_tokens=NEW)
    alone = [reference_greedy(target.model, case.row_inputs("image", row), NEW)[0] for row in range(3)]
    assert [list(output.tokens) for output in outputs] == alone


@torch.inference_mode()
def test_every_draft_token_about_a_picture_is_that_of_a_forward_over_all(seeing: tuple[FamilyCase, Target]) -> None:
    case, target = seeing
    inputs = case.row_inputs("image", 0)
    prompts = split(target.config, inputs)
    chains = drafted(target, Chain(3), prompts)
    assert len(chains) > NEW // 4
    media = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    assert chains == {text: slowest(target, text, len(chain), prompts[0], **media) for text, chain in chains.items()}


@pytest.mark.parametrize(
    "policy", ["chain", *(pytest.param(tree, marks=pytest.mark.slow) for tree in POLICIES if tree != "chain")]
)
def test_sampled_rows_follow_the_target(policy: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save("glm4_moe", tmp_path, SMALL))
    assert_follows(engine(Target(model), POLICIES[policy]), "top_p", ROWS // 4)


def test_the_checkpoint_chooses_the_method(target: Target) -> None:
    assert resolution.default(None, {}, config=target.config) == "mtp"
    assert resolution.default(None, {}, options=["max_ngram"], config=target.config) == "suffix"


def test_the_checkpoint_chooses_the_method_inside_generate(target: Target) -> None:
    ids = torch.tensor([PROMPTS[0].ids])
    for model, drafter in ((target.model, HeadDrafter), (small_model(1, vocab=48), SuffixDrafter)):
        speculation = saccade.hf.speculate(gamma=3)
        given = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        again = model.generate(ids, max_new_tokens=NEW, do_sample=False, custom_generate=speculation)
        assert again.tolist() == given.tolist()
        assert type(speculation._engine_for(model).drafter) is drafter


DAMAGE: dict[str, tuple[str, Callable[[str], str], str, str]] = {
    "unknown": (
        "qwen3_next",
        lambda name: name.replace("mtp.fc.", "mtp.layers.0.eh_proj."),
        "suffix",
        r"cannot draft: its kind is unknown; choose another method\.$",
    ),
    "absent": (
        "glm4_moe",
        lambda name: "" if ".layers.2." in name else name,
        "suffix",
        r"names layers .* \(1\), but the checkpoint lacks their weights; choose another",
    ),
    "incomplete": (
        "glm4_moe",
        lambda name: "" if ".eh_proj." in name else name,
        "mtp",
        r"cannot be loaded: some of their weights are missing or of other shapes; ch",
    ),
}
"""Checkpoints with other names of weights: their default method, and what is said of the layer."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_layer_that_cannot_be_read_is_refused_and_leaves_the_default_unless_it_is_damaged(
    damage: str, tmp_path: Path
) -> None:
    kind, names, default, words = DAMAGE[damage]
    file = save(kind, tmp_path) / "model.safetensors"
    weights = {names(name): weight for name, weight in load_file(file).items() if names(name)}
    save_file(weights, file, metadata={"format": "pt"})
    target = Target(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert resolution.default(None, {}, config=target.config) == default
    with pytest.raises(ModelError, match=words):
        load_mtp(target)


def test_a_target_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^Method mtp needs a target with layers of multi-token prediction, .*\.$"):
        load_mtp(Target(small_model(1)))
