"""Blocks of DFlash, DFlash 2 and DSpark have the tokens that transformers drafts, and answers stay the target's."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling_kit import assert_follows, small_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from architectures import ARCHITECTURES
from families import FAMILIES, IMAGE, VOCAB
from harness import (
    POLICIES,
    answer,
    assert_equals_generate,
    assert_one_shot,
    prompt,
    prompts,
    proposals,
    requests,
    target,
)
from heads_kit import Text
from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dflash2 import DFlash2
from saccade.draft.heads.dspark import DSpark
from saccade.draft.heads.head import HeadConfig, Placement, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain, ConfidentChain
from saccade.engine import Engine
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.tree import DraftTree

BLOCK, NEW = 5, 20
LAYERS = [0, 1]
TAPS, GROUP, RANK, CANDIDATES = 3, 8, 6, 7
SETTINGS = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES}
"""Of DFlash 2."""


@cache
def model_of(name: str) -> Any:
    """A DFlash head of transformers with weights of which right and wrong entries give clearly different tokens."""
    values = {
        "hidden_size": target(name).text_config.hidden_size,
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


@pytest.fixture(scope="module", params=["llama", "llava"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(name: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head of DFlash as transformers has it, and one of DFlash 2 as its authors do."""
    place = tmp_path_factory.mktemp(name)
    model_of(name).save_pretrained(place / "dflash")
    return {"dflash": place / "dflash", "dflash2": written(place / "dflash2", as_authors2, name)}


def engine(name: str, head: Any, policy: Any) -> Engine:
    """An engine of a head, or of the one in a folder."""
    head = load_head(head, target(name)) if isinstance(head, Path) else head
    return Engine(target(name), HeadDrafter(head, target(name), policy, in_training=True))


def kind_of(name: str) -> str:
    return FAMILIES[name].kinds[0]


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 8])
def test_answers_are_the_targets(name: str, folders: dict[str, Path], kind: str, policy: str, rows: int) -> None:
    assert_equals_generate(engine(name, folders[kind], POLICIES[policy]), name, rows=rows, n=NEW)


def drafted(name: str, head: Any, rows: int = 1) -> dict[tuple[int, ...], list[int]]:
    """The chains that the head drafts after every text that the answers come to."""
    return {text: tree.tokens[0, 1:].tolist() for text, tree in grown(name, head, rows).items()}


def grown(name: str, head: Any, rows: int = 1, policy: Any = None) -> dict[tuple[int, ...], DraftTree]:
    """The trees, by default chains, that the head drafts after every text that the answers come to."""
    asked = requests(name, rows=rows)
    _, found = proposals(engine(name, head, policy or Chain(BLOCK - 1)), asked, NEW)
    return {(*asked[row].prompt.ids, *shown): tree for row, shown, tree in found}


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
def test_blocks_are_those_of_transformers(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    theirs = {}

    def record(self: Any, stock: Any, input_ids: Any, *others: Any, **more: Any) -> Any:
        ids, logits = stock(self, input_ids, *others, **more)
        theirs[tuple(input_ids[0].tolist())] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    generate(name, rows, model_of(name), record, monkeypatch)
    ours = drafted(name, folders["dflash"], rows)
    common = [text for text in ours if theirs.get(text)]
    assert len(common) > rows * NEW // 4
    assert [ours[text] for text in common] == [theirs[text][: len(ours[text])] for text in common]


def test_blocks_leave_out_the_norm_of_the_targets_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "muse_glimmer", ARCHITECTURES["muse_glimmer"])
    model_of("muse_glimmer").save_pretrained(tmp_path)
    test_blocks_are_those_of_transformers("muse_glimmer", {"dflash": tmp_path}, monkeypatch, 1)


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
    """The chain after a text, of one forward over its whole context without a cache.

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
        after = torch.arange(asked, len(ids) + options["block"]) + delta
        places = torch.cat([spread, after.expand(3, 1, -1)], -1)[..., : len(kept) + options["block"]]
    block = torch.tensor([[ids[-1], *[options["mask_token"]] * (options["block"] - 1)]])
    own = places[..., len(kept) :]
    hidden = head(None if not kept else features, model.embed(block), Placement(own), over=Placement(places))
    chain = [ids[-1]]
    for state in hidden[0, head.first :][: BLOCK - 1]:
        logits = head.logits(state[None], model.lm_head)[0]
        chain.append(int((logits + bias(head, state, chain[-1])).argmax()))
    return chain[1:]


def bias(head: DFlash, state: Tensor, token: int) -> Tensor:
    """``[V]`` what DSpark adds to a slot's logits after a token."""
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
def test_a_block_is_that_of_one_forward_over_the_whole_text(name: str, chosen: str) -> None:
    head = head_of(name, **VARIANTS[chosen])
    chains = drafted(name, head)
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


def as_authors2(values: dict[str, Any]) -> dict[str, Any]:
    values = as_authors(values)
    config = {**values["dflash_config"], **SETTINGS}
    return {**values, "architectures": ["DFlash2DraftModel"], "dflash_config": config}


def as_speculators2(values: dict[str, Any]) -> dict[str, Any]:
    values = as_speculators(values)
    del values["sliding_window_non_causal"]  # the default is another than DFlash's
    return {**values, **SETTINGS, "speculators_model_type": "dflash2"}


def written(place: Path, write: Any = as_authors, name: str = "llama") -> Path:
    """A folder with the head of a family in another layout, with more weights where that is one of DFlash 2."""
    model_of(name).save_pretrained(place)
    values = json.loads((place / "config.json").read_text())
    # transformers counts its window otherwise
    values |= {"vocab_size": VOCAB, "sliding_window": values["sliding_window"] + 1, "use_sliding_window": True}
    (place / "config.json").write_text(json.dumps(write(values)))
    theirs = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    weights = {theirs.get(key, key): weight for key, weight in load_file(place / "model.safetensors").items()}
    weights |= added(target(name).text_config.hidden_size) if write in (as_authors2, as_speculators2) else {}
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


def added(width: int, layers: int = 2) -> dict[str, Tensor]:
    """Weights that DFlash 2 has beside DFlash's, under the released names."""
    draw = torch.Generator().manual_seed(1)
    weights = {
        "candidate_selector.predecessor_codebook": torch.randn(VOCAB, RANK, generator=draw),
        "candidate_selector.successor_codebook": torch.randn(VOCAB, RANK, generator=draw),
        "candidate_selector.hidden_projection.weight": torch.randn(RANK, width, generator=draw) / math.sqrt(width),
    }
    for place in range(layers):
        for part in ("attention_conv", "mlp_conv"):
            kernel = torch.randn(2 * TAPS * width // GROUP, width, generator=draw) / math.sqrt(width)
            weights[f"layers.{place}.{part}.base_kernel"] = torch.randn(2, TAPS, width, generator=draw)
            weights[f"layers.{place}.{part}.kernel_projection.weight"] = kernel
    return weights


@pytest.mark.parametrize("write", [as_authors, as_speculators])
def test_other_layouts_of_a_head_draft_the_same(
    name: str, folders: dict[str, Path], write: Any, tmp_path: Path
) -> None:
    assert drafted(name, written(tmp_path / "other", write, name)) == drafted(name, folders["dflash"])


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
    for write, names in layouts.items():
        place = written(tmp_path / write.__name__, write)
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
def test_a_confident_chain_ends_by_the_forecasts(sure: float, length: int) -> None:
    head = head_of("llama", "dspark", rank=6, from_anchor=True)
    with torch.no_grad():
        head.forecast.weight.zero_()  # type: ignore[union-attr]
        head.forecast.bias.fill_(sure)  # type: ignore[union-attr]
    trees = grown("llama", head, policy=ConfidentChain(BLOCK, confidence=0.5)).values()
    assert max(int(tree.valid.sum()) - 1 for tree in trees) == length


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
    "one layer less": (edited(target_layer_ids=[0]), r"fc.weight of the head .* is \(.*\), not \(.*\); its"),
    "vocabulary": (edited(vocab_size=7), r"made for another target: its target's vocabulary is 7 but this"),
    "kinds": (edited(layer_types=["mamba"] * 2), r"has the layer_types .*; expected 2 times full_attention or"),
    "block": (edited(block_size=None), r"has block_size None in its config.json; expected a whole number from 1"),
    "a weight": (
        without("layers.1.self_attn.k_norm.weight"),
        r"lacks the weight layers.1.self_attn.k_norm.weight; copy",
    ),
}
DAMAGE2 = {
    "kernel": (edited(conv_kernel_size=9), r"conv_kernel_size must be a whole number from 1 to 5, not 9"),
    "group": (edited(conv_group_size=9), r"conv_group_size must divide the width of the head, \d+, not 9"),
    "no candidates": (edited(selector_top_k=None), r"has selector_top_k None in its config.json; expected a whole"),
    "candidates": (edited(selector_top_k=VOCAB + 1), r"selector_top_k must be a whole number from 1 to"),
    "rank": (edited(selector_rank=RANK + 1), r"candidate_selector.\w+ of the head .* is \(.*\), not \(.*\); its"),
    "selector": (
        without("candidate_selector.successor_codebook"),
        r"lacks the weight candidate_selector.successor_codebook; copy",
    ),
    "convolution": (
        without("layers.1.mlp_conv.kernel_projection.weight"),
        r"lacks the weight layers.1.mlp_conv.kernel_projection.weight; copy",
    ),
    "embeddings": (edited(input_embedding_scale=-1), r"has input_embedding_scale -1; expected a number above 0"),
    "causal": (edited(is_causal=True), r"has is_causal True, which is not supported; expected False"),
}


@pytest.mark.parametrize(
    ("write", "harm", "message"),
    [*((as_authors, *each) for each in DAMAGE.values()), *((as_authors2, *each) for each in DAMAGE2.values())],
    ids=[*DAMAGE, *DAMAGE2],
)
def test_a_damaged_head_is_refused(write: Any, harm: Any, message: str, tmp_path: Path) -> None:
    place = written(tmp_path / "changed", write)
    harm(place)
    with pytest.raises(ModelError, match=message):
        load_head(place, target("llama"))


def test_a_later_turn_resumes(name: str, folders: dict[str, Path]) -> None:
    session = engine(name, folders["dflash"], Chain(BLOCK - 1)).open(1)
    first = answer(session.engine, prompt(name), NEW, session=session)
    assert_one_shot(session, name, FAMILIES[name].continued(kind_of(name), 0, first.tokens, "text"), NEW)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("candidates", [2, 5])
def test_sampled_rows_of_dflash2_follow_the_target(policy: str, candidates: int) -> None:
    model = Target(small_model(1))
    drafter = HeadDrafter(new_head(model, selector_top_k=candidates), model, POLICIES[policy], in_training=True)
    assert_follows(Engine(model, drafter), "top_p", -1)


# --------------------------------------------------------------------------- DFlash 2


def convolved(x: Tensor, kernel: Tensor, dynamic: Tensor) -> Tensor:
    """A block ``[N, d]`` convolved token by token.

    Shapes: kernel ``[K, d]``; dynamic ``[N, K, G]``.
    """
    out = torch.zeros_like(x)
    for n in range(len(x)):
        for k in range(min(n + 1, TAPS)):
            out[n] += (kernel[k] + dynamic[n, k].repeat_interleave(GROUP)) * x[n - k]
    return out


def surround(sublayer: Any, kernels: Tensor, projection: Tensor) -> None:
    """Convolve what enters and what leaves a module of transformers."""
    dynamic: list[Tensor] = []

    def enter(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        x = named["hidden_states"] if "hidden_states" in named else given[0]
        dynamic[:] = (x[0] @ projection.T).view(len(x[0]), 2, TAPS, -1).unbind(1)
        changed = convolved(x[0], kernels[0], dynamic[0])[None]
        return (given, {**named, "hidden_states": changed}) if named else ((changed,), named)

    def leave(_: Any, __: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        changed = convolved(x[0], kernels[1], dynamic[1])[None]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    sublayer.register_forward_pre_hook(enter, with_kwargs=True)
    sublayer.register_forward_hook(leave)


class Slots:
    """States of a block's slots by transformers, and their candidates by the formula."""

    def __init__(self, states: Tensor, lm_head: Any, weights: dict[str, Tensor]) -> None:
        before, after, project = (part for name, part in weights.items() if name.startswith("candidate"))
        self._before, self._after, self._projected = before, after, states @ project.T
        self._logits = lm_head(states)

    def ranked(self, depth: int, before: int) -> list[int]:
        """Candidates of a slot after a token, the best first."""
        logits = self._logits[depth].tolist()
        candidates = sorted(range(VOCAB), key=lambda token: -logits[token])[:CANDIDATES]
        context = self._before[before] * self._projected[depth]
        return sorted(candidates, key=lambda token: -(logits[token] + float(context @ self._after[token])))


@pytest.fixture(scope="module")
def slots(name: str) -> dict[tuple[int, ...], Slots]:
    """Slots after the texts of transformers' chains that the selection chooses."""
    width, theirs, states = target(name).text_config.hidden_size, {}, []
    model, weights = copy.deepcopy(model_of(name)), added(width)
    for place, layer in enumerate(model.layers):
        for part, sublayer in (("attention_conv", layer.self_attn), ("mlp_conv", layer.mlp)):
            parts = [weights[f"layers.{place}.{part}.{each}"] for each in ("base_kernel", "kernel_projection.weight")]
            surround(sublayer, *parts)
    model.norm.register_forward_hook(lambda _, __, output: states.append(output))

    def record(self: Any, stock: Any, input_ids: Tensor, *others: Any, **more: Any) -> Any:
        ids, logits = stock(self, input_ids, *others, **more)
        if logits is None:
            return ids, logits
        found = Slots(states[-1][0, 1:], FAMILIES[name].model().get_output_embeddings(), weights)
        chain = input_ids[0].tolist()
        theirs[tuple(chain)] = found
        for depth in range(BLOCK - 1):
            chain.append(found.ranked(depth, chain[-1])[0])
        return torch.tensor([chain]), logits

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        generate(name, 3, model, record, patch)
    return theirs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_children_are_the_best_candidates_behind_their_parent(
    name: str, folders: dict[str, Path], slots: dict[tuple[int, ...], Slots], policy: str, rows: int
) -> None:
    ours = grown(name, folders["dflash2"], rows, POLICIES[policy])
    common = [text for text in ours if text in slots]
    assert len(common) > rows * NEW // 4
    moved = 0
    for text in common:
        tree = ours[text]
        tokens, parents, depths = (part.expand(1, -1)[0].tolist() for part in (tree.tokens, tree.parents, tree.depth))
        for node, before in enumerate(tokens):
            children = [tokens[child] for child in range(1, len(tokens)) if parents[child] == node]
            ranked = slots[text].ranked(depths[node], before) if children else []
            assert sorted(children) == sorted(ranked[: len(children)])
            moved += len(children)
    assert moved > len(common) * 3


def test_the_layout_of_speculators_is_the_same_head(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    places = folders["dflash2"], written(tmp_path / "other", as_speculators2, name)
    own, other = (load_head(place, target(name)) for place in places)
    assert own.config == other.config
    theirs = other.state_dict()
    assert all(torch.equal(weight, theirs[key]) for key, weight in own.state_dict().items())


@pytest.mark.parametrize("known", [None, True, False])
def test_layers_with_windows_are_causal_unless_the_folder_denies_it(known: bool | None, tmp_path: Path) -> None:
    place = written(tmp_path / "head", as_authors2)
    values = json.loads((place / "config.json").read_text())
    del values["is_causal"]
    causal = {} if known is None else {"is_causal": known}
    values |= {**causal, "layer_types": ["sliding_attention"] * 2}
    (place / "config.json").write_text(json.dumps(values))
    assert load_head(place, target("llama")).config.options["ahead"] == (known is False)


def test_embeddings_are_the_tables_rows_times_the_folders_factor(tmp_path: Path) -> None:
    place, chains = written(tmp_path / "head", as_authors2, "gemma3"), []
    factor = target("gemma3").text_config.hidden_size ** 0.5  # Gemma's own
    for scale in (1, 2 * factor, factor):
        edited(input_embedding_scale=scale)(place)
        head = load_head(place, target("gemma3"))
        chains.append([*drafted("gemma3", head).values()])
    head.config = replace(head.config, options={**head.config.options, "embedding_scale": 0.0})
    of_the_decoder = [*drafted("gemma3", head).values()]
    assert [chain == of_the_decoder for chain in chains] == [False, False, True]


def new_head(model: Target, **options: Any) -> DFlash2:
    """A head with random weights, all of which matter."""
    sizes = {**SETTINGS, "conv_group_size": 4, "block": BLOCK, "mask_token": 1, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(HeadConfig.from_target(model, "dflash2", **sizes))
        for weight in head.parameters():
            weight.data.add_(0.5 * torch.randn_like(weight))
    assert isinstance(head, DFlash2)
    return head


@torch.no_grad()
def test_convolutions_and_scores_are_those_of_speculators() -> None:
    reason = "compares with the package speculators"
    theirs: Any = pytest.importorskip("speculators.models.dflash2.model_definitions", reason=reason)
    head, blocks = new_head(target("llama")), 2
    width = head.config.hidden_size
    x, ours = torch.randn(1, blocks * BLOCK, width), head.stack[0].attention_conv
    conv = theirs.GroupedDynamicCausalConv(width, block_size=BLOCK, kernel_size=TAPS, group_size=4)
    conv.load_state_dict(ours.state_dict())
    entered, kernel = conv.prepare(x)
    torch.testing.assert_close(ours(x, torch.sin), conv.finish(entered.sin(), kernel))
    selector = theirs.CandidateSelector(vocab_size=VOCAB, hidden_size=width, rank=RANK, top_k=CANDIDATES)
    selector.load_state_dict(head.candidate_selector.state_dict())
    logits, before = torch.randn(2, 3, VOCAB)[:, :1], torch.tensor([[3, 4, 5], [6, 7, 8]])
    corrected = head.corrected(logits, x[0, :2, None], before)
    candidates, scores = selector.select(logits.expand(-1, 3, -1), x[0, :2, None], before)
    torch.testing.assert_close(corrected.gather(-1, candidates), scores)
    assert corrected.isfinite().sum() == 2 * 3 * CANDIDATES
