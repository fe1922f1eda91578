"""View P: fewer visual tokens, the drafter's own logits on the prompt that was pooled by hand, the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import families
from families import FAMILIES, IMAGE, TEXT_FAMILIES, VIDEO, VISUAL_FAMILIES, reset_rope_deltas
from harness import prompts_of, target
from saccade.draft.ensemble.ensemble import View
from saccade.draft.ensemble.views import HalvedPictures, PooledFeatures, pool, pooled
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.trees.policy import Chain, TopProposer
from saccade.errors import MethodError
from saccade.inputs.families import FAMILIES as REGISTRY
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Medium, Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.token_blocks import ForwardOutput, TokenBlock

ANYRES = ("llava_next", "llava_onevision")
RESIZED = [name for name in VISUAL_FAMILIES if isinstance(pooled(target(name)), HalvedPictures)]
AVERAGED = [name for name in VISUAL_FAMILIES if name not in RESIZED]


def session(name: str, rows: int = 1) -> ModelDraftSession:
    return ModelDraftSession(ModelDrafter(target(name), Chain(2)), rows, Context(target(name), rows))


def load(view: View, opened: ModelDraftSession, prompt: Prompt, row: int = 0) -> None:
    view.load(opened, row, prompt, 256, None)


def visuals(name: str, prompt: Prompt) -> int:
    return int(target(name).family.visual_mask(prompt.ids).sum())


def media_kinds(names: list[str]) -> list[tuple[str, str]]:
    return [(name, kind) for name in names for kind in FAMILIES[name].kinds if kind != "text"]


# --------------------------------------------------------------------------- all families


def test_every_visual_family_has_the_view() -> None:
    qwen = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
    smaller = {"llava_pixtral", "mistral3", "mistral3_ministral3", "gemma4", "gemma4_unified", *qwen}
    assert set(RESIZED) == smaller
    assert sorted(AVERAGED) == sorted(name for name, family in REGISTRY.items() if family.pool_point)
    assert all(isinstance(pooled(target(name)), PooledFeatures) for name in AVERAGED)


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_a_drafter_without_eyes_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(MethodError, match=f"of the family {name}.* leave view P out"):
        pooled(target(name))


@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_pooling_leaves_the_model_as_it_was(name: str) -> None:
    (prompt,) = prompts_of(name, rows=1)
    view = pooled(target(name))
    before = session(name).context.load(0, prompt).logits
    settings = target(name).config.vision_config.to_dict()
    load(view, session(name), view.rewrite(prompt))
    assert target(name).config.vision_config.to_dict() == settings
    assert torch.equal(session(name).context.load(0, prompt).logits, before)
    broken = Prompt((*view.rewrite(prompt).ids, IMAGE), view.rewrite(prompt).media)
    with pytest.raises(Exception, match=r"placeholder"):
        load(view, session(name), broken)
    assert torch.equal(session(name).context.load(0, prompt).logits, before)


@pytest.mark.some_families
@pytest.mark.parametrize(("name", "kind"), media_kinds(list(VISUAL_FAMILIES)))
@torch.no_grad()
def test_drafted_logits_are_a_plain_forward_on_the_prompt_pooled_by_hand(name: str, kind: str) -> None:
    view, opened = pooled(target(name)), session(name, rows=3)
    originals = prompts_of(name, kind)
    for row, prompt in enumerate(originals):
        load(view, opened, view.rewrite(prompt), row)
        opened._target.cache.reserve(row, 1)
    ran: list[tuple[Tensor, Tensor]] = []
    run = opened.context.run

    def noted(pieces: Sequence[TokenBlock]) -> list[ForwardOutput]:
        (piece,), (reading,) = pieces, run(pieces)
        assert list(piece.rows) == [0, 1, 2]
        ran.append((piece.tokens.clone(), reading.logits.clone()))
        return [reading]

    opened.context.run = noted  # type: ignore[method-assign]
    opened.propose([0, 1, 2], [[20], [30], [40]], TopProposer(), 2)
    assert len(ran) == 2  # the emitted tokens, then the first guesses
    for row, prompt in enumerate(originals):
        answer: list[int] = []
        for tokens, logits in ran:
            answer += tokens[row].tolist()
            assert torch.allclose(logits[row, -1], _by_hand(name, prompt, answer), atol=2e-4), (row, answer)


def _by_hand(name: str, prompt: Prompt, answer: list[int]) -> Tensor:
    """Logits ``[V]`` of the stock model after the pooled prompt and some tokens of an answer."""
    stock = FAMILIES[name].model()
    seen = pooled(target(name)).rewrite(prompt)  # held against others below, and in test_halved_pictures
    media = [dict(m.tensors) for m in (seen if name in RESIZED else prompt).media]
    if name not in RESIZED:
        _average_by_hand(name, stock)
    joined = family_of(stock.config).join([Medium("image", tensors, 0, "") for tensors in media])
    inputs = {"input_ids": torch.tensor([[*seen.ids, *answer]]), **joined}
    types = (inputs["input_ids"] == IMAGE).long() + 2 * (inputs["input_ids"] == VIDEO).long()
    if FAMILIES[name].types:
        inputs[str(FAMILIES[name].types)] = types
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    reset_rope_deltas(stock)
    return stock(**inputs).logits[0, -1]


def _average_by_hand(name: str, stock: Any) -> None:
    base = stock.base_model
    if name == "gemma3":
        base.multi_modal_projector.avg_pool.register_forward_hook(
            lambda m, i, out: torch.stack([averages(g.permute(1, 2, 0)) for g in out]).permute(0, 3, 1, 2)
        )
        return
    if name in ANYRES:
        stock.config.vision_config.patch_size *= 2
    smol = name in ("idefics3", "smolvlm")
    module = base.connector.modality_projection if smol else getattr(base, "multi_modal_projector", None)
    module = module or base.embed_vision.soft_embedding_norm
    module.register_forward_pre_hook(
        lambda m, args: (torch.stack([averages(g).flatten(0, 1) for g in _on_grid(args[0])]),)
    )


# --------------------------------------------------------------------------- features averaged before the projector


@pytest.mark.parametrize("name", [n for n in AVERAGED if n not in ANYRES])
def test_the_pooled_view_has_a_quarter_of_the_visual_tokens(name: str) -> None:
    view = pooled(target(name))
    for prompt in prompts_of(name):
        seen = view.rewrite(prompt)
        assert visuals(name, seen) == visuals(name, prompt) / 4
        assert [i for i in seen.ids if i != IMAGE] == [i for i in prompt.ids if i != IMAGE]
        assert sum(medium.n_tokens for medium in seen.media) == visuals(name, seen)


@pytest.mark.parametrize("name", ANYRES)
def test_a_pooled_image_in_tiles_is_unpadded_on_its_own_grid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model with patches twice as large would have it."""
    originals = prompts_of(name)
    monkeypatch.setattr(families, "ANYRES_SIDE", families.ANYRES_SIDE // 2)
    expected = FAMILIES[name].inputs("image", 3)
    for row, prompt in enumerate(originals):
        kept = expected["attention_mask"][row].bool()
        assert list(pooled(target(name)).rewrite(prompt).ids) == expected["input_ids"][row][kept].tolist()


def averages(features: Tensor) -> Tensor:
    """``[side, side, C]`` to ``[side / 2, side / 2, C]``, cell by cell."""
    side = (features.shape[0] + 1) // 2
    cells = [features[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for i in range(side) for j in range(side)]
    return torch.stack([cell.flatten(0, 1).mean(0) for cell in cells]).unflatten(0, (side, side))


def _on_grid(features: Tensor) -> Tensor:
    return features.unflatten(1, (int(features.shape[1] ** 0.5), -1))


def test_an_odd_side_ends_in_averages_of_what_is_there() -> None:
    features = torch.randn(2, 25, 3)
    expected = torch.stack([averages(f.unflatten(0, (5, 5))).flatten(0, 1) for f in features])
    assert torch.allclose(pool(features), expected, atol=1e-6)
    assert pool(features).shape == (2, 9, 3)


def test_a_class_token_stays_before_the_averages() -> None:
    features = torch.randn(2, 17, 3)
    by_hand = [averages(f[1:].unflatten(0, (4, 4))).flatten(0, 1) for f in features]
    assert torch.allclose(pool(features), torch.cat([features[:, :1], torch.stack(by_hand)], 1), atol=1e-6)
    stock = FAMILIES["llava"].model()
    stock.config.vision_feature_select_strategy = "full"
    pixels = prompts_of("llava", rows=1)[0].media[0].tensors
    (prompt,) = split(stock.config, {"input_ids": torch.tensor([[1, *[IMAGE] * 17, 20]]), **pixels})
    assert pooled(Target(stock)).rewrite(prompt).ids == (1, *[IMAGE] * 5, 20)


def test_features_on_no_square_are_refused() -> None:
    with pytest.raises(MethodError, match="not on a square grid"):
        pool(torch.zeros(1, 18, 4))
