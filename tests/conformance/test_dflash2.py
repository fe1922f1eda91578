"""Trees of DFlash 2 are those of transformers' DFlash with plain convolutions and a plain selection around it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling_kit import LIKELY, OPTIONS, p_of_answers, sampled, small_model
from test_dflash import (
    BLOCK,
    NEW,
    as_authors,
    as_speculators,
    assistant,
    converted,
    edited,
    engine,
    generate,
    grown,
    kind_of,
    without,
)
from torch import Tensor

from families import FAMILIES, VOCAB, reference_greedy
from heads_kit import POLICIES, prompts, target
from saccade.draft.heads.dflash2 import DFlash2
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.target_model.adapter import Target

TAPS, GROUP, RANK, CANDIDATES = 3, 8, 6, 7
SETTINGS = {
    "conv_kernel_size": TAPS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": CANDIDATES,
}


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
        """Candidates of a slot behind a token, the best first."""
        logits = self._logits[depth].tolist()
        candidates = sorted(range(VOCAB), key=lambda token: -logits[token])[:CANDIDATES]
        context = self._before[before] * self._projected[depth]
        return sorted(candidates, key=lambda token: -(logits[token] + float(context @ self._after[token])))


@pytest.fixture(scope="module", params=["llama", "llava"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def as_authors2(values: dict[str, Any]) -> dict[str, Any]:
    values = as_authors(values)
    config = {**values["dflash_config"], **SETTINGS}
    return {**values, "architectures": ["DFlash2DraftModel"], "dflash_config": config}


def as_speculators2(values: dict[str, Any]) -> dict[str, Any]:
    values = as_speculators(values)
    del values["sliding_window_non_causal"]  # the default is another than DFlash's
    return {**values, **SETTINGS, "speculators_model_type": "dflash2"}


def written(name: str, place: Path, write: Any = as_authors2) -> Path:
    """A folder with a head of DFlash 2 for a family."""
    width = target(name).text_config.hidden_size
    (place / "plain").mkdir()
    assistant(width).save_pretrained(place / "plain")
    converted(place / "plain", place, write)
    weights = {**load_file(place / "model.safetensors"), **added(width)}
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def slots(name: str) -> dict[tuple[int, ...], Slots]:
    """Slots behind the texts of transformers' chains that the selection chooses."""
    width, theirs, states = target(name).text_config.hidden_size, {}, []
    model, weights = assistant(width), added(width)
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


@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("rows", [1, 3])
def test_children_are_the_best_candidates_behind_their_parent(
    name: str,
    folder: Path,
    slots: dict[tuple[int, ...], Slots],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    rows: int,
) -> None:
    ours = grown(name, folder, monkeypatch, rows, POLICIES[policy])
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


@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("rows", [1, 8])
def test_answers_are_the_targets(name: str, folder: Path, policy: str, rows: int) -> None:
    case = FAMILIES[name]
    asked = [case.row_inputs(kind_of(name), row) for row in range(rows)]
    requests = [Request(prompt) for inputs in asked for prompt in prompts(case, inputs)]
    outputs = engine(name, folder, POLICIES[policy]).generate(requests, max_new_tokens=NEW)
    assert [list(output.tokens) for output in outputs] == [
        reference_greedy(case.model(), inputs, NEW)[0] for inputs in asked
    ]


def test_the_layout_of_speculators_is_the_same_head(folder: Path, name: str, tmp_path: Path) -> None:
    own, other = (load_head(place, target(name)) for place in (folder, written(name, tmp_path, as_speculators2)))
    assert own.config == other.config
    theirs = other.state_dict()
    assert all(torch.equal(weight, theirs[key]) for key, weight in own.state_dict().items())


DAMAGE = {
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


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_head_is_refused(damage: str, tmp_path: Path) -> None:
    place = written("llama", tmp_path)
    harm, message = DAMAGE[damage]
    harm(place)
    with pytest.raises(ModelError, match=message):
        load_head(place, target("llama"))


@pytest.mark.parametrize("known", [None, True, False])
def test_layers_with_windows_are_causal_unless_the_folder_denies_it(known: bool | None, tmp_path: Path) -> None:
    place = written("llama", tmp_path)
    values = json.loads((place / "config.json").read_text())
    del values["is_causal"]
    causal = {} if known is None else {"is_causal": known}
    values |= {**causal, "layer_types": ["sliding_attention"] * 2}
    (place / "config.json").write_text(json.dumps(values))
    assert load_head(place, target("llama")).config.options["ahead"] == (known is False)


def test_embeddings_are_the_tables_rows_times_the_folders_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, chains = written("gemma3", tmp_path), []
    factor = target("gemma3").text_config.hidden_size ** 0.5  # Gemma's own
    for scale in (1, 2 * factor, factor):
        edited(input_embedding_scale=scale)(place)
        head = load_head(place, target("gemma3"))
        with monkeypatch.context() as patch:
            chains.append([tree.tokens.tolist() for tree in grown("gemma3", head, patch).values()])
    head.config = replace(head.config, options={**head.config.options, "embedding_scale": 0.0})
    of_the_decoder = [tree.tokens.tolist() for tree in grown("gemma3", head, monkeypatch).values()]
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("candidates", [2, 5])
def test_sampled_rows_follow_the_target(policy: str, candidates: int) -> None:
    model = small_model(1)
    adapted = Target(model)
    drafter = HeadDrafter(new_head(adapted, selector_top_k=candidates), adapted, POLICIES[policy], in_training=True)
    outputs = sampled(Engine(adapted, drafter), **OPTIONS["top_p"])
    assert p_of_answers(outputs, model=model, **OPTIONS["top_p"]) > LIKELY
