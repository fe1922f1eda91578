"""A pruned prefill computes what a full forward computes whose attention cannot see the pruned tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plain import eager_attentions, extended, plain, prompt, target, tree_inputs
from torch import Tensor

from families import FAMILIES, STOCK, VISUAL_FAMILIES, Inputs
from saccade.errors import ModelError
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context, PrefillResult, retained_positions
from saccade.target_model.stock import captured_states, replaced_embeddings
from saccade.target_model.token_blocks import Requirements
from saccade.tree import TreeShape

CLOSE = {"rtol": 0.0, "atol": 2e-4}
"""fp32, a few layers, sums over other numbers of keys: measured below 2e-5 on states of order 10."""
# A recurrent state without the dropped tokens is that of another prompt, which no mask describes.
NAMES = [name for name in VISUAL_FAMILIES if name not in STOCK]
CASES = [(name, kind) for name in NAMES for kind in ("image", "video") if kind in FAMILIES[name].kinds]
MORE = [20, 31, 42, 53]
SMALL = TreeShape.of([(0,), (1,), (0, 0)])


def dropped_of(name: str, given: Prompt) -> list[int]:
    """Two of three visual tokens."""
    places = family_of(target(name).config).visual_mask(given.ids).nonzero()[:, 0].tolist()
    return [place for i, place in enumerate(places) if i % 3 != 1]


def masked(name: str, inputs: Inputs, dropped: Sequence[int]) -> dict[int, Tensor]:
    """What enters and leaves the decoder's layers in a full forward where nothing sees the dropped positions."""
    model = target(name)
    (given,) = split(model.config, inputs)
    count, window = len(given), model.traits.masks.window
    seen = [[k <= q for k in range(count)] for q in range(count)]
    if model.traits.bidirectional_images:
        for first, last in family_of(model.config).media_spans(given):
            for q in range(first, last):
                seen[q][first:last] = [True] * (last - first)
    gone = set(dropped)
    full = torch.tensor([[(s and k not in gone) or k == q for k, s in enumerate(r)] for q, r in enumerate(seen)])
    near = full & torch.tensor([[window is None or k > q - window for k in range(count)] for q in range(count)])
    masks = {
        name: torch.zeros(1, 1, count, count).masked_fill(~m, torch.finfo().min)
        for name, m in (("full_attention", full), ("sliding_attention", near))
    }
    more: dict[str, Any] = {"attention_mask": masks if model.traits.masks.kinds else masks["sliding_attention"]}
    positions, _ = model.positions(torch.tensor([given.ids]), given)
    if positions is not None:
        more["position_ids"] = positions
    with captured_states(model, range(len(model.layers) + 1)) as hidden:
        plain(model.model, {**inputs, **more})
    return hidden


def opened(model: Target, rows: int = 1) -> Context:
    context = Context(model, rows)
    for row in range(rows):
        context.cache.reserve(row, 256)
    return context


def pruned(name: str, given: Prompt, dropped: Sequence[int]) -> tuple[Context, PrefillResult]:
    context = opened(target(name))
    context.requirements.add_layers(*range(len(target(name).layers) + 1))
    return context, context.load(0, given, dropped)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_retained_positions_and_a_tree_behind_them_have_the_states_of_a_masked_forward(name: str, kind: str) -> None:
    """Sliding windows too count what was left out."""
    given, inputs = prompt(name, kind), FAMILIES[name].row_inputs(kind, 0)
    dropped = dropped_of(name, given)
    (context, prefill), full = pruned(name, given, dropped), masked(name, inputs, dropped)
    retained = retained_positions(0, len(given), dropped)
    assert context.lengths == [len(retained)]
    for layer, states in prefill.hidden.items():
        assert len(states) == len(retained) < len(given)
        torch.testing.assert_close(states[None], full[layer][:, retained], **CLOSE)
    tree = context.forward([0], torch.tensor([MORE]), *tree_inputs(SMALL))
    last = len(target(name).layers)
    for leaf, path in ((3, [0, 1, 3]), (2, [0, 2])):
        full = masked(name, extended(inputs, [MORE[i] for i in path]), dropped)
        torch.testing.assert_close(tree.hidden[last][:, leaf], full[last][:, -1], **CLOSE)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_second_turn_goes_on_behind_the_gaps_of_the_first(name: str, kind: str) -> None:
    """It brings media as well, of which it leaves out some."""
    case = FAMILIES[name]
    kind = "images2" if name == "llava_onevision" and kind == "image" else kind  # whose lone images are tiled
    first, inputs = prompt(name, kind), case.continued(kind, 0, MORE)
    (longer,) = split(target(name).config, inputs)
    dropped = dropped_of(name, first)
    later = [d for d in dropped_of(name, longer) if d >= len(first)]
    context, _ = pruned(name, first, dropped)
    prefill = context.load(0, longer, [*range(3, 6), *later])  # what is reused keeps its own gaps
    full = masked(name, inputs, [*dropped, *later])
    kept = retained_positions(len(first), len(longer), later)
    assert prefill.start == len(first)
    assert context.lengths == [len(longer) - len(dropped) - len(later)]
    for layer, states in prefill.hidden.items():
        torch.testing.assert_close(states[None], full[layer][:, kept], **CLOSE)
    token = context.forward([0], torch.tensor([MORE[:1]]))
    after = masked(name, extended(inputs, MORE[:1]), [*dropped, *later])
    last = len(target(name).layers)
    torch.testing.assert_close(token.hidden[last][:, -1], after[last][:, -1], **CLOSE)


@pytest.mark.parametrize("name", ["mistral", *(name for name, kind in CASES if kind == "image")])
def test_a_row_with_gaps_runs_alone_as_next_to_one_without(name: str) -> None:
    """And a row that is loaded again forgets its gaps."""
    given = prompt(name, FAMILIES[name].kinds[0])
    dropped = dropped_of(name, given) if FAMILIES[name].is_visual else [2, 3, 5]
    run = torch.tensor([MORE] * 2), *tree_inputs(SMALL)
    context = opened(target(name), 2)
    context.load(0, given)
    context.load(1, given, dropped)
    both = context.forward([0, 1], *run).logits
    context.cache.drop([0, 1])
    for row in range(2):
        alone = context.forward([row], run[0][:1], *run[1:]).logits
        torch.testing.assert_close(alone, both[row : row + 1], **CLOSE)
    assert not torch.allclose(both[0], both[1], **CLOSE)
    context.cache.drop([0, 1])
    context.load(1, Prompt((MORE[2], *given.ids[1:]), given.media))
    context.load(1, given)
    again = context.forward([0, 1], *run).logits
    torch.testing.assert_close(again, both[:1].expand_as(again), **CLOSE)


# --------------------------------------------------------------------------- attention of the prompt's words


def eager_columns(name: str, inputs: Inputs, queries: Sequence[int], layers: Sequence[int]) -> Tensor:
    attentions = eager_attentions(name, inputs)
    return torch.stack([attentions[i][0].mean(0)[list(queries)].sum(0) for i in layers]).mean(0)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_attention_of_the_words_behind_an_image_is_returned(name: str, kind: str) -> None:
    model, given, inputs = target(name), prompt(name, kind), FAMILIES[name].row_inputs(kind, 0)
    for layers in (None, (-1,)):
        context = opened(model)
        context.requirements.add_attention(layers, "words")
        prefill = context.load(0, given)
        first = int(family_of(model.config).visual_mask(given.ids).nonzero()[-1]) + 1
        expected = eager_columns(name, inputs, range(first, len(given)), layers or range(len(model.layers)))
        assert prefill.prompt == given
        assert prefill.columns is not None
        torch.testing.assert_close(prefill.columns, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
def test_a_follow_up_in_words_looks_at_the_image_of_the_turn_before(name: str) -> None:
    model, first = target(name), prompt(name, "image")
    inputs = FAMILIES[name].continued("image", 0, MORE, follow_up="text")
    (longer,) = split(model.config, inputs)
    context = opened(model)
    context.requirements.add_attention(None, "words")
    context.load(0, first)
    prefill = context.load(0, longer)
    expected = eager_columns(name, inputs, range(len(first), len(longer)), range(len(model.layers)))
    assert prefill.columns is not None
    torch.testing.assert_close(prefill.columns, expected, rtol=0.0, atol=1e-5)


def test_a_prompt_without_images_has_nothing_to_look_at() -> None:
    context = opened(target("llava"))
    context.requirements.add_attention(None, "words")
    for kind in ("image", "text"):
        prefill = context.load(0, prompt("llava", kind))
    assert prefill.columns is None
    assert prefill.prompt == prompt("llava", "text")


def test_two_that_read_other_attention_are_refused() -> None:
    needs = Requirements()
    needs.add_attention((-1,), "words")
    needs.add_attention((-1,), "words")
    with pytest.raises(ModelError, match="is read in layers"):
        needs.add_attention(None, "words")


# --------------------------------------------------------------------------- refusals


class Wrapper(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return kwargs


@pytest.mark.parametrize(
    ("args", "more"),
    [((torch.zeros(1),), {"position_ids": torch.arange(5)[None]}), ((), {"position_ids": None})],
)
def test_decoders_whose_arguments_are_not_understood_are_refused(args: tuple[Any, ...], more: dict[str, Any]) -> None:
    decoder, embeddings = Wrapper(), torch.zeros(1, 5, 3)
    instead = replaced_embeddings(decoder, embeddings, torch.ones(1, 1), torch.zeros(1))
    with pytest.raises(ModelError, match="is not called with positions by name"), instead:
        decoder(*args, inputs_embeds=embeddings, **more)
    assert len(decoder._forward_pre_hooks) == 0


def test_a_decoder_that_is_passed_by_is_noticed() -> None:
    instead = replaced_embeddings(Wrapper(), torch.zeros(1, 1, 3), torch.ones(1, 1), torch.zeros(1))
    with pytest.raises(ModelError, match="was called 0 times"), instead:
        pass
