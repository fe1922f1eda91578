"""Inputs beside ids and pictures, and outputs beside tokens, of transformers' own tests of `generate`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, RepetitionPenaltyLogitsProcessor, StaticCache

from families import FAMILIES, Inputs
from saccade.errors import InputError
from saccade.hf import speculate

NEW = 16
NAMES = ("llama", "llava", "mistral", "gemma3")


def both(name: str, inputs: Inputs, **options: Any) -> tuple[Any, Any]:
    """What `generate` gives by itself, and with speculation; options that can be called are made anew for each."""
    case = FAMILIES[name]
    found = []
    for more in ({}, {"custom_generate": speculate(case.draft_model(), gamma=3)}):
        own = {k: v() if callable(v) else v for k, v in options.items()}
        model = case.model()
        found.append(model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **own, **more))
    return found[0], found[1]


# --------------------------------------------------------------------------- caches


def columns(inputs: Inputs, width: int) -> Tensor:
    mask = inputs["attention_mask"].bool()
    return torch.cat([mask, mask.new_ones(len(mask), width - mask.shape[1])], 1)


def assert_alike(ours: Any, theirs: Any, seen: Tensor) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.keys.shape == other.keys.shape
        at = seen[:, -mine.keys.shape[2] :] if mine.keys.shape[2] <= seen.shape[1] else seen
        for which in ("keys", "values"):
            a, b = (getattr(layer, which).transpose(1, 2)[:, : at.shape[1]] for layer in (mine, other))
            # fp32 forwards of one or of several tokens differ by about 1e-5
            torch.testing.assert_close(a[at], b[at], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_of_the_sequence_comes_back(name: str, rows: int) -> None:
    inputs = FAMILIES[name].inputs(FAMILIES[name].kinds[0], rows)
    theirs, ours = both(name, inputs, return_dict_in_generate=True)
    assert type(ours.past_key_values) is type(theirs.past_key_values) is DynamicCache
    width = theirs.sequences.shape[1] - 1
    assert_alike(ours.past_key_values, theirs.past_key_values, columns(inputs, width))


def test_a_generation_goes_on_from_the_cache_that_came_back() -> None:
    case = FAMILIES["llama"]
    model, inputs = case.model(), case.inputs("text")
    own = speculate(case.draft_model(), gamma=3)
    first = model.generate(
        **inputs, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, custom_generate=own
    )
    ids = first.sequences
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": first.past_key_values}
    out = model.generate(**more, max_new_tokens=NEW - 9, do_sample=False)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == case.reference("text", n=NEW)[0]


def test_without_use_cache_there_is_none() -> None:
    theirs, ours = both("llama", FAMILIES["llama"].inputs("text"), return_dict_in_generate=True, use_cache=False)
    assert ours.past_key_values is theirs.past_key_values is None
    assert ours.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_caller_s_own_empty_cache_is_filled(kind: str) -> None:
    case = FAMILIES["llama"]
    inputs = case.inputs("text", 2)
    caches = []

    def own() -> Any:
        config = case.model().config
        caches.append(
            DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=64)
        )
        return caches[-1]

    theirs, ours = both("llama", inputs, past_key_values=own)
    assert ours.tolist() == theirs.tolist()
    assert_alike(caches[1], caches[0], columns(inputs, theirs.shape[1] - 1))


def test_a_static_cache_is_accepted() -> None:
    inputs = FAMILIES["llama"].inputs("text", 2)
    theirs, ours = both("llama", inputs, cache_implementation="static", return_dict_in_generate=True)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert type(ours.past_key_values) is type(theirs.past_key_values) is StaticCache


# --------------------------------------------------------------------------- padding, positions, labels


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}], ids=["plain", "repetition_penalty"])
@pytest.mark.parametrize("name", ["llama", "llava"])
def test_rows_padded_on_the_right_are_answered_as_those_padded_on_the_left(name: str, options: Any) -> None:
    """`generate` warns of them, and reads the answer off the padding."""
    case = FAMILIES[name]
    left = case.inputs(case.kinds[0], 3)
    kept = left["attention_mask"].bool()
    ids = [torch.cat([row[k], row[~k]]) for row, k in zip(left["input_ids"], kept, strict=True)]
    right = {**left, "input_ids": torch.stack(ids), "attention_mask": left["attention_mask"].flip(1)}
    theirs, _ = both(name, left, **options)
    _, ours = both(name, right, **options)
    width = left["input_ids"].shape[1]
    assert ours[:, width:].tolist() == theirs[:, width:].tolist()
    assert ours[:, :width].tolist() == right["input_ids"].tolist()


READING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 0.4},
    {"encoder_no_repeat_ngram_size": 1},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)]},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=99)]},
]
"""Processors that read the ids before a token, or those of the prompt."""


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", READING, ids=[f"{next(iter(o))}-{place}" for place, o in enumerate(READING)])
def test_processors_see_padding_on_the_left_as_in_generate_and_none_on_the_right(options: Any, side: str) -> None:
    """Every row is padded with the token that its answer begins with."""
    case, options = FAMILIES["llama"], {**options, "max_new_tokens": NEW, "do_sample": False}
    model = case.model()
    prompts = [case.row_inputs("text", row)["input_ids"] for row in range(3)]
    alone = [model.generate(ids, **options)[0, ids.shape[1] :] for ids in prompts]
    width = max(ids.shape[1] for ids in prompts) + 2
    padding = [answer[:1].expand(width - ids.shape[1]) for ids, answer in zip(prompts, alone, strict=True)]
    rows = [(pad, ids[0]) if side == "left" else (ids[0], pad) for pad, ids in zip(padding, prompts, strict=True)]
    kept = [torch.arange(width) < ids.shape[1] for ids in prompts]
    mask = torch.stack([k.flip(0) if side == "left" else k for k in kept]).long()
    inputs = {"input_ids": torch.stack([torch.cat(row) for row in rows]), "attention_mask": mask}
    expected = model.generate(**inputs, **options)[:, width:] if side == "left" else torch.stack(alone)
    ours = model.generate(**inputs, **options, custom_generate=speculate(case.draft_model(), gamma=3))
    assert ours[:, width:].tolist() == expected.tolist()


def positions(inputs: Inputs) -> Tensor:
    mask = inputs["attention_mask"]
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_default_positions_and_labels_change_nothing(rows: int) -> None:
    inputs = FAMILIES["llama"].inputs("text", rows)
    more = {**inputs, "position_ids": positions(inputs), "labels": inputs["input_ids"]}
    _, ours = both("llama", more)
    assert ours[:, inputs["input_ids"].shape[1] :].tolist() == FAMILIES["llama"].reference("text", rows, n=NEW)


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("planes", [3, 4])
def test_default_positions_in_three_dimensions_are_accepted_and_others_refused(planes: int, kind: str) -> None:
    case = FAMILIES["qwen2_5_vl"]
    inputs, model = case.inputs(kind, 2), case.model()
    wanted = inspect.signature(model.model.get_rope_index).parameters
    known = {name: value for name, value in inputs.items() if name in wanted}
    rotary, _ = model.model.get_rope_index(**known)
    both_kinds = torch.cat([positions(inputs)[None], rotary])[-planes:]
    ours = model.generate(
        **inputs, position_ids=both_kinds, max_new_tokens=NEW, do_sample=False, custom_generate=speculate()
    )
    assert ours[:, inputs["input_ids"].shape[1] :].tolist() == case.reference(kind, 2, n=NEW)
    moved = both_kinds.clone()
    moved[-1, 0, -1] += 1
    with pytest.raises(InputError, match="position_ids does not reach the model"):
        model.generate(**inputs, position_ids=moved, custom_generate=speculate())


@pytest.mark.parametrize("number", [12, 18])
def test_gemma_3_pools_any_number_of_tokens_to_a_square(number: int) -> None:
    """8 x 8 patches in windows of 2 x 2, for both of these numbers."""
    case = FAMILIES["gemma3"]
    model = case.model()
    model.config.mm_tokens_per_image = number
    projector = model.model.multi_modal_projector
    model.model.multi_modal_projector = rebuilt = type(projector)(model.config)
    rebuilt.load_state_dict(projector.state_dict())
    inputs = case.inputs("image", 2)
    theirs = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    ours = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, custom_generate=speculate())
    assert ours.tolist() == theirs.tolist()
