"""What each view puts before the draft model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import families
from families import FAMILIES, IMAGE, VISUAL_FAMILIES
from numerals import NEWLINE, Numerals
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.static import Chain
from saccade.draft.view import View
from saccade.draft.views import POOLABLE, Multimodal, Pooled, TextOnly, by_names, pool
from saccade.errors import MethodError
from saccade.inputs.batch import split, visual_mask
from saccade.inputs.families import kind_of
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.features import Hidden

POOLED = [name for name in VISUAL_FAMILIES if kind_of(FAMILIES[name].model().config) in POOLABLE]
ANYRES = ("llava_next", "llava_onevision")
UNPOOLED = [name for name in VISUAL_FAMILIES if name not in POOLED]
WORDS = Numerals()


@cache
def model(name: str) -> Target:
    return Target(FAMILIES[name].model())


def prompts(name: str, kind: str = "image", rows: int = 3) -> list[Prompt]:
    return split(model(name).config, FAMILIES[name].inputs(kind, rows))


def session(name: str) -> ModelDraftSession:
    opened = ModelDraftSession(ModelDrafter(model(name), Chain(2)), 1)
    opened.grow(256)
    return opened


def load(view: View, opened: ModelDraftSession, prompt: Prompt) -> None:
    view.load(opened, 0, prompt, opened.context)


def visuals(name: str, prompt: Prompt) -> int:
    return int(visual_mask(model(name).config, prompt.ids).sum())


# --------------------------------------------------------------------------- M and T


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_multimodal_view_is_the_prompt_itself(name: str) -> None:
    for kind in FAMILIES[name].kinds:
        for prompt in prompts(name, kind):
            assert Multimodal().read(prompt) is prompt


@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_the_text_view_has_one_newline_for_every_medium(name: str) -> None:
    view = TextOnly(model(name).config, WORDS)
    for kind in FAMILIES[name].kinds:
        for prompt in prompts(name, kind):
            seen = view.read(prompt)
            assert not seen.media
            assert visuals(name, seen) == 0
            assert seen.ids.count(NEWLINE) == len(prompt.media)


# --------------------------------------------------------------------------- P


@pytest.mark.parametrize("name", [n for n in POOLED if n not in ANYRES])
def test_the_pooled_view_has_a_quarter_of_the_visual_tokens(name: str) -> None:
    view = Pooled(model(name))
    for prompt in prompts(name):
        seen = view.read(prompt)
        assert visuals(name, seen) == visuals(name, prompt) / 4
        assert [i for i in seen.ids if i != IMAGE] == [i for i in prompt.ids if i != IMAGE]
        assert sum(medium.n_tokens for medium in seen.media) == visuals(name, seen)


@pytest.mark.parametrize("name", ANYRES)
def test_a_pooled_image_in_tiles_is_unpadded_on_its_own_grid(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model with patches twice as large would have it."""
    given = prompts(name)
    monkeypatch.setattr(families, "ANYRES_SIDE", families.ANYRES_SIDE // 2)
    expected = FAMILIES[name].inputs("image", 3)
    for row, prompt in enumerate(given):
        kept = expected["attention_mask"][row].bool()
        assert list(Pooled(model(name)).read(prompt).ids) == expected["input_ids"][row][kept].tolist()


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("kind", ["images2", "video"])
def test_several_media_and_videos_are_pooled_too(name: str, kind: str) -> None:
    """The model itself refuses another number of features than placeholders."""
    if kind not in FAMILIES[name].kinds:
        pytest.skip("the family has no tokens for videos")
    view, opened = Pooled(model(name)), session(name)
    for prompt in prompts(name, kind):
        seen = view.read(prompt)
        assert 0 < visuals(name, seen) < visuals(name, prompt)
        assert len(seen.media) == len(prompt.media)
        load(view, opened, seen)
        assert opened.context.lengths == [len(seen)]


def averages(features: Tensor) -> Tensor:
    """``[side, side, C]`` to ``[side / 2, side / 2, C]``, cell by cell."""
    side = (features.shape[0] + 1) // 2
    cells = [features[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for i in range(side) for j in range(side)]
    return torch.stack([cell.flatten(0, 1).mean(0) for cell in cells]).unflatten(0, (side, side))


def captured(name: str, prompt: Prompt) -> Tensor:
    """What comes to the projector without pooling, ``[n, side, side, C]``."""
    base, found = model(name).model.base_model, []
    if name == "gemma3":
        module = base.multi_modal_projector.avg_pool
        hook = module.register_forward_hook(lambda m, i, out: found.append(out.permute(0, 2, 3, 1)))
    else:
        smol = name in ("idefics3", "smolvlm")
        module = base.connector.modality_projection if smol else base.multi_modal_projector
        side = lambda x: x.unflatten(1, (int(x.shape[1] ** 0.5), -1))  # noqa: E731
        hook = module.register_forward_pre_hook(lambda m, args: found.append(side(args[0])))
    session(name).context.load(0, prompt)
    hook.remove()
    return found[0]


def projected(name: str, features: Tensor) -> Tensor:
    base = model(name).model.base_model
    if name == "gemma3":
        projector = base.multi_modal_projector
        return projector.mm_soft_emb_norm(features) @ projector.mm_input_projection_weight
    if name in ("idefics3", "smolvlm"):
        return base.connector.modality_projection(features)
    return base.multi_modal_projector(features)


@pytest.mark.parametrize("name", POOLED)
@torch.no_grad()
def test_pooled_features_are_the_averages_made_by_hand(name: str) -> None:
    (prompt,) = prompts(name, rows=1)
    by_hand = torch.stack([averages(grid) for grid in captured(name, prompt)])  # [n, side', side', C]
    expected = projected(name, by_hand.flatten(1, 2))
    view, opened = Pooled(model(name)), session(name)
    seen = view.read(prompt)
    opened.context.hidden = hidden = Hidden((0,))  # what enters the first layer
    load(view, opened, seen)
    entered = hidden.states[0][0][visual_mask(model(name).config, seen.ids)]
    if name in ANYRES:  # the tiles follow, unpadded and with newlines
        assert torch.allclose(entered[: expected.shape[1]], expected[0], atol=1e-5)
        rest = torch.cdist(entered[expected.shape[1] :], expected[1:].flatten(0, 1)).amin(1)
        assert (rest < 1e-4).float().mean() > 0.5
    else:
        assert torch.allclose(entered, expected.flatten(0, 1), atol=1e-5)


def test_an_odd_side_ends_in_averages_of_what_is_there() -> None:
    features = torch.randn(2, 25, 3)
    expected = torch.stack([averages(f.unflatten(0, (5, 5))).flatten(0, 1) for f in features])
    assert torch.allclose(pool(features), expected, atol=1e-6)
    assert pool(features).shape == (2, 9, 3)


@pytest.mark.parametrize("name", POOLED)
def test_pooling_leaves_the_model_as_it_was(name: str) -> None:
    (prompt,) = prompts(name, rows=1)
    view = Pooled(model(name))
    before = session(name).context.load(0, prompt).logits
    patch = model(name).config.vision_config.patch_size
    load(view, session(name), view.read(prompt))
    assert model(name).config.vision_config.patch_size == patch
    assert torch.equal(session(name).context.load(0, prompt).logits, before)
    broken = Prompt((*view.read(prompt).ids, IMAGE), view.read(prompt).media)
    with pytest.raises(Exception, match=r"placeholder"):
        load(view, session(name), broken)
    assert torch.equal(session(name).context.load(0, prompt).logits, before)


@pytest.mark.parametrize("name", [*UNPOOLED, "llama"])
def test_a_family_without_a_square_grid_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(MethodError, match="leave view P out"):
        Pooled(model(name))


def test_a_class_token_among_the_features_is_refused() -> None:
    with pytest.raises(MethodError, match="not a square grid"):
        pool(torch.zeros(1, 17, 4))


# --------------------------------------------------------------------------- all


@pytest.mark.parametrize("name", list(FAMILIES))
def test_text_reads_the_same_in_every_view(name: str) -> None:
    (prompt,) = prompts(name, "text", 1)
    views: list[Any] = [Multimodal(), TextOnly(model(name).config, WORDS)]
    if name in POOLED:
        views.append(Pooled(model(name)))
    assert all(view.read(prompt) == prompt for view in views)


@pytest.mark.parametrize("names", ["", "MM", "MX", "mt"])
def test_unknown_views_are_refused(names: str) -> None:
    class Processor:
        config = model("llava").config
        tokenizer = WORDS

    with pytest.raises(MethodError, match="not letters of MTCPR"):
        by_names(names, model("llava"), Processor())  # type: ignore[arg-type]
    assert [view.name for view in by_names("PTM", model("llava"), Processor())] == list("PTM")  # type: ignore[arg-type]
