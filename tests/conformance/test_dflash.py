"""A block drafted in one pass has the tokens that transformers' generator drafts, and answers stay the target's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling_kit import LIKELY, OPTIONS, p_of_answers, sampled, small_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from architectures import ARCHITECTURES
from families import FAMILIES, IMAGE, VOCAB, reference_greedy
from heads_kit import POLICIES, Text, prompts, target
from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dspark import DSpark
from saccade.draft.heads.head import HeadConfig, Placement, build_head
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain, ConfidentChain
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.tree import DraftTree

BLOCK, NEW = 5, 20
LAYERS = [0, 1]


def assistant(width: int, **more: Any) -> Any:
    """A DFlash head of transformers with weights of which right and wrong entries give clearly different tokens."""
    values = {
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "block_size": BLOCK,
        "mask_token_id": 3,
        "target_layer_ids": LAYERS,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **more,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(AutoConfig.for_model("muse_glimmer_assistant", **values))
        for name, weight in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(weight, 0.5, 1.5)
            else:
                nn.init.normal_(weight, std=1.6 / math.sqrt(weight.shape[1]))
    return model.eval()


@cache
def model_of(name: str) -> Any:
    return assistant(target(name).text_config.hidden_size)


@pytest.fixture(scope="module", params=["llama", "llava"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(name)
    model_of(name).save_pretrained(place)
    return place


def engine(name: str, head: Any, policy: Any) -> Engine:
    """An engine of a head, or of the one in a folder."""
    head = load_head(head, target(name)) if isinstance(head, Path) else head
    return Engine(target(name), HeadDrafter(head, target(name), policy, in_training=True))


def kind_of(name: str) -> str:
    return FAMILIES[name].kinds[0]


@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("rows", [1, 8])
def test_answers_are_the_targets(name: str, folder: Path, policy: str, rows: int) -> None:
    case = FAMILIES[name]
    asked = [case.row_inputs(kind_of(name), row) for row in range(rows)]
    requests = [Request(prompt) for inputs in asked for prompt in prompts(case, inputs)]
    outputs = engine(name, folder, POLICIES[policy]).generate(requests, max_new_tokens=NEW)
    expected = [reference_greedy(case.model(), inputs, NEW)[0] for inputs in asked]
    assert [list(output.tokens) for output in outputs] == expected


def drafted(name: str, head: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 1) -> dict[tuple[int, ...], list[int]]:
    """The chains that the head drafts behind every text that the answers come to."""
    return {text: tree.tokens[0, 1:].tolist() for text, tree in grown(name, head, monkeypatch, rows).items()}


def grown(
    name: str, head: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 1, policy: Any = None
) -> dict[tuple[int, ...], DraftTree]:
    """The trees, by default chains, that the head drafts behind every text that the answers come to."""
    case = FAMILIES[name]
    asked = [prompt for row in range(rows) for prompt in prompts(case, case.row_inputs(kind_of(name), row))]
    propose, texts, trees = HeadDraftSession.propose, [list(prompt.ids) for prompt in asked], {}

    def record(self: Any, rows: Sequence[int], new: Any, *others: Any) -> Any:
        tree = propose(self, rows, new, *others)
        for place, row in enumerate(rows):
            texts[row].extend(new[place])
            trees[tuple(texts[row])] = tree.rows(place, place + 1)
        return tree

    monkeypatch.setattr(HeadDraftSession, "propose", record)
    growing = engine(name, head, policy or Chain(BLOCK - 1))
    growing.generate([Request(prompt) for prompt in asked], max_new_tokens=NEW)
    return trees


def generate(name: str, rows: int, model: Any, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer with transformers' generator of candidates, whose method ``record`` replaces, given the stock one."""
    stock = DFlashTokenCandidateGenerator.get_candidates
    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", partialmethod(record, stock))
    case = FAMILIES[name]
    for row in range(rows):
        inputs = case.row_inputs(kind_of(name), row)
        case.model().generate(
            **inputs,
            assistant_model=model,
            speculation_type="dflash",
            max_new_tokens=NEW,
            do_sample=False,
            bad_words_ids=[[IMAGE]],
        )


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_are_those_of_transformers(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    theirs = {}

    def record(self: Any, stock: Any, input_ids: Any, *others: Any, **more: Any) -> Any:
        ids, logits = stock(self, input_ids, *others, **more)
        theirs[tuple(input_ids[0].tolist())] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    generate(name, rows, model_of(name), record, monkeypatch)
    ours = drafted(name, folder, monkeypatch, rows)
    common = [text for text in ours if theirs.get(text)]
    assert len(common) > rows * NEW // 4
    assert [ours[text] for text in common] == [theirs[text][: len(ours[text])] for text in common]


def test_blocks_leave_out_the_norm_of_the_targets_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "muse_glimmer", ARCHITECTURES["muse_glimmer"])
    model_of("muse_glimmer").save_pretrained(tmp_path)
    test_blocks_are_those_of_transformers("muse_glimmer", tmp_path, monkeypatch, 1)


VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "words": {"text_only": True},
    "anchor": {"from_anchor": True},
    "own": {"own_vocabulary": 40},
    "places": {"positions": "target"},
    "corrected": {"kind": "dspark", "rank": 6, "from_anchor": True},
    "gated": {"kind": "dspark", "rank": 6, "gated": True, "own_vocabulary": 40},
}


def slowest(name: str, head: DFlash, ids: tuple[int, ...], asked: int) -> list[int]:
    """The chain behind a text, of one forward over its whole context without a cache.

    Shapes: the first ``asked`` ids are the prompt's.
    """
    case, model, options = FAMILIES[name], target(name), head.config.options
    text = Text.of(name, case.row_inputs(kind_of(name), 0), list(ids[asked:]))
    kept = [t for t in range(len(ids) - 1) if not (options["text_only"] and text.visual[t])]
    features = head.fuse(torch.cat([text.streams[layer][kept] for layer in head.layers], -1))[None]
    places = torch.arange(len(kept) + options["block"])[None]
    if options["positions"] == "target":
        spread, delta = model.positions(
            torch.tensor([ids[:asked]]), prompts(case, case.row_inputs(kind_of(name), 0))[0]
        )
        behind = torch.arange(asked, len(ids) + options["block"]) + delta
        places = torch.cat([spread, behind.expand(3, 1, -1)], -1)[..., : len(kept) + options["block"]]
    block = torch.tensor([[ids[-1], *[options["mask_token"]] * (options["block"] - 1)]])
    own = places[..., len(kept) :]
    hidden = head(None if not kept else features, model.embed(block), Placement(own), over=Placement(places))
    chain = [ids[-1]]
    for state in hidden[0, head.first :][: BLOCK - 1]:
        logits = head.logits(state[None], model.lm_head)[0]
        chain.append(int((logits + bias(head, state, chain[-1])).argmax()))
    return chain[1:]


def bias(head: DFlash, state: Tensor, token: int) -> Tensor:
    """``[V]`` what DSpark adds to a slot's logits behind a token."""
    if not isinstance(head, DSpark) or head.w1 is None or head.w2 is None:
        return torch.zeros(())
    mixed = head.w1.weight[token]
    if head.gate is not None:
        mixed = mixed / (1 + torch.exp(-head.gate.weight @ torch.cat([state, mixed]) - head.gate.bias))
    added = head.w2.weight @ mixed
    if head.token_ids is None:
        return added
    return torch.zeros(head.config.vocab_size).index_copy(0, head.token_ids, added)


def head_of(name: str, kind: str = "dflash", **options: Any) -> DFlash:
    """A head with random weights, and with the target's M-RoPE sections if it has the target's positions."""
    config = HeadConfig.from_target(target(name), kind, mask_token=5, block=BLOCK, **options)
    if config.options["positions"] == "target":
        config = replace(config, rope={**config.rope, "mrope_section": [4, 2, 2]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(config)
    assert isinstance(head, DFlash)
    return head


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "chosen"),
    [*(("llava", chosen) for chosen in VARIANTS if chosen != "places"), *(("qwen2_vl", chosen) for chosen in VARIANTS)],
)
def test_a_block_is_that_of_one_forward_over_the_whole_text(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = head_of(name, **VARIANTS[chosen])
    chains = drafted(name, head, monkeypatch)
    asked = min(map(len, chains)) - 1
    chains = {text: chain for text, chain in chains.items() if IMAGE not in text[asked:]}
    assert len(chains) > NEW // 4
    assert chains == {text: slowest(name, head, text, asked)[: len(chain)] for text, chain in chains.items()}


def as_authors(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers as z-lab writes it."""
    inner = {name: values.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    return {
        **values,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "is_causal": False,
        "dflash_config": inner,
    }


def as_speculators(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers as speculators writes it."""
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**values, "model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
        "block_size": values["block_size"],
        "mask_token_id": values["mask_token_id"],
        "sliding_window_non_causal": True,
    }


def converted(folder: Path, place: Path, write: Any) -> Path:
    """The head of a folder in another layout."""
    values = json.loads((folder / "config.json").read_text())
    # transformers counts its window otherwise
    values |= {"vocab_size": VOCAB, "sliding_window": values["sliding_window"] + 1, "use_sliding_window": True}
    (place / "config.json").write_text(json.dumps(write(values)))
    theirs = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    weights = {theirs.get(key, key): weight for key, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("write", [as_authors, as_speculators])
def test_other_layouts_of_a_head_draft_the_same(
    name: str, folder: Path, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        expected = drafted(name, folder, patch)
    assert drafted(name, converted(folder, tmp_path, write), monkeypatch) == expected


def test_heads_of_dspark_are_read_in_both_layouts(tmp_path: Path) -> None:
    inner = {"w1.weight": "markov_w1.weight", "w2.weight": "markov_w2.weight", "gate.weight": "gate_proj.weight"}
    inner |= {"gate.bias": "gate_proj.bias"}
    last = {"forecast.weight": "weight", "forecast.bias": "bias"}
    layouts = {
        as_speculators: {**{k: f"markov_head.{v}" for k, v in inner.items()}}
        | {k: f"confidence_head.proj.{v}" for k, v in last.items()},
        as_authors: inner | {k: f"confidence_proj.{v}" for k, v in last.items()},
    }
    own = head_of("llama", "dspark", rank=6, gated=True)
    given = own.state_dict()
    model_of("llama").save_pretrained(tmp_path / "given")
    for write, names in layouts.items():
        place = tmp_path / write.__name__
        place.mkdir()
        converted(tmp_path / "given", place, write)
        values = json.loads((place / "config.json").read_text())
        if write is as_authors:
            values["dflash_config"]["projector_type"] = "dspark"
        else:
            values["speculators_model_type"] = "dspark"
        (place / "config.json").write_text(json.dumps(values))
        weights = load_file(place / "model.safetensors")
        more = {theirs: given[ours].contiguous() for ours, theirs in names.items()}
        save_file(weights | more, place / "model.safetensors")
        head = load_head(place, target("llama"))
        assert isinstance(head, DSpark)
        options = {name: head.config.options[name] for name in ("rank", "gated", "confidence", "from_anchor")}
        assert options == {"rank": 6, "gated": True, "confidence": "tokens", "from_anchor": True}
        assert all(torch.equal(head.state_dict()[ours], given[ours]) for ours in names)
        (place / "config.json").write_text(json.dumps({**values, "markov_head_type": "rnn"}))
        with pytest.raises(
            ModelError, match=r"has a recurrent markov_head_type, which is not supported; expected vanilla"
        ):
            load_head(place, target("llama"))


@pytest.mark.parametrize(("sure", "length"), [(9.0, BLOCK), (-9.0, 1)])
def test_a_confident_chain_ends_by_the_forecasts(sure: float, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, drafts = head_of("llama", "dspark", rank=6, from_anchor=True), set()
    with torch.no_grad():
        head.forecast.weight.zero_()  # type: ignore[union-attr]
        head.forecast.bias.fill_(sure)  # type: ignore[union-attr]
    propose = HeadDraftSession.propose

    def record(self: Any, *others: Any) -> Any:
        tree = propose(self, *others)
        drafts.add(int(tree.valid.sum()) - 1)
        return tree

    monkeypatch.setattr(HeadDraftSession, "propose", record)
    inputs = FAMILIES["llama"].row_inputs("text", 0)
    (prompt,) = prompts(FAMILIES["llama"], inputs)
    engine("llama", head, ConfidentChain(BLOCK, confidence=0.5)).generate([Request(prompt)], max_new_tokens=NEW)
    assert max(drafts) == length


def edited(**changes: Any) -> Any:
    """A change of a folder's config.json; None deletes."""

    def edit(place: Path) -> None:
        values = json.loads((place / "config.json").read_text())
        values["dflash_config"] |= {key: value for key, value in changes.items() if key in values["dflash_config"]}
        values |= {key: value for key, value in changes.items() if key not in values["dflash_config"]}
        (place / "config.json").write_text(json.dumps(values))

    return edit


def without(name: str) -> Any:
    def remove(place: Path) -> None:
        weights = load_file(place / "model.safetensors")
        del weights[name]
        save_file(weights, place / "model.safetensors")

    return remove


DAMAGE = {
    "no mask": (edited(mask_token_id=None), r"has mask_token_id None in its config.json; expected an id below"),
    "mask beyond": (edited(mask_token_id=10**6), r"has mask_token_id 1000000 in its config.json; expected an id"),
    "no layers": (edited(target_layer_ids=[]), r"does not name the target's layers that it reads; copy the whole"),
    "layers beyond": (edited(target_layer_ids=[0, 77]), r"reads layer 78 of its target, which has states 0 to"),
    "one layer less": (
        edited(target_layer_ids=[0]),
        r"fc.weight of the head .* is \(.*\), not \(.*\); its",
    ),
    "vocabulary": (
        edited(vocab_size=7),
        r"made for another target: its target's vocabulary is 7 but this",
    ),
    "kinds": (edited(layer_types=["mamba"] * 2), r"has the layer_types .*; expected 2 times full_attention or"),
    "block": (edited(block_size=None), r"has block_size None in its config.json; expected a whole number from 1"),
    "a weight": (
        without("layers.1.self_attn.k_norm.weight"),
        r"lacks the weight layers.1.self_attn.k_norm.weight; copy",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_head_is_refused(damage: str, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "changed").mkdir()
    model_of("llama").save_pretrained(tmp_path / "given")
    place = converted(tmp_path / "given", tmp_path / "changed", as_authors)
    harm, message = DAMAGE[damage]
    harm(place)
    with pytest.raises(ModelError, match=message):
        load_head(place, target("llama"))


def test_a_later_turn_resumes(name: str, folder: Path) -> None:
    case, chain = FAMILIES[name], engine(name, folder, Chain(BLOCK - 1))
    inputs = case.row_inputs(kind_of(name), 0)
    session = chain.open(1)
    (first,) = chain.generate([Request(prompts(case, inputs)[0])], max_new_tokens=NEW, session=session)
    again = case.continued(kind_of(name), 0, list(first.tokens), "text")
    (second,) = chain.generate([Request(prompts(case, again)[0])], max_new_tokens=NEW, session=session)
    assert list(second.tokens) == reference_greedy(case.model(), again, NEW)[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
def test_sampled_rows_follow_the_target(policy: str) -> None:
    model = small_model(1)
    adapted = Target(model)
    head = build_head(HeadConfig.from_target(adapted, "dflash", block=BLOCK, mask_token=1))
    outputs = sampled(
        Engine(adapted, HeadDrafter(head, adapted, POLICIES[policy], in_training=True)), **OPTIONS["top_p"]
    )
    assert p_of_answers(outputs, model=model, **OPTIONS["top_p"]) > LIKELY
