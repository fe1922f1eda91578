"""Inputs beside ids and pictures, and outputs beside tokens, of transformers' own tests of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf import NEW, both, common, inputs_of, model, new_tokens, speculation
from torch import Tensor
from transformers import DynamicCache, RepetitionPenaltyLogitsProcessor, StaticCache

from families import FAMILIES, PAD, Inputs
from saccade.hf import speculate

NAMES = ("llama", "llava", "mistral", "gemma3")


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
    inputs = inputs_of(name, rows)
    theirs, ours = both(name, inputs, return_dict_in_generate=True)
    assert type(ours.past_key_values) is type(theirs.past_key_values) is DynamicCache
    width = theirs.sequences.shape[1] - 1
    assert_alike(ours.past_key_values, theirs.past_key_values, columns(inputs, width))


def test_a_generation_goes_on_from_the_cache_that_came_back() -> None:
    inputs = inputs_of("llama", 1)
    _, first = both("llama", inputs, max_new_tokens=9, return_dict_in_generate=True)
    ids = first.sequences
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": first.past_key_values}
    assert new_tokens("llama", more, None, max_new_tokens=NEW - 9)[0] == common("llama")[9:NEW]


def test_without_use_cache_there_is_none() -> None:
    theirs, ours = both("llama", inputs_of("llama", 1), return_dict_in_generate=True, use_cache=False)
    assert ours.past_key_values is theirs.past_key_values is None
    assert ours.sequences.tolist() == theirs.sequences.tolist()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_caller_s_own_empty_cache_is_filled(kind: str) -> None:
    inputs, config = inputs_of("llama", 2), model("llama").config
    caches, answers = [], []
    for custom in (None, speculation("llama")):
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=64)
        answers.append(new_tokens("llama", inputs, custom, past_key_values=cache))
        caches.append(cache)
    assert answers[1] == answers[0]
    width = inputs["input_ids"].shape[1] + NEW - 1
    assert_alike(caches[1], caches[0], columns(inputs, width))


def test_a_static_cache_is_accepted() -> None:
    theirs, ours = both("llama", inputs_of("llama", 2), cache_implementation="static", return_dict_in_generate=True)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert type(ours.past_key_values) is type(theirs.past_key_values) is StaticCache


# --------------------------------------------------------------------------- padding and labels


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}], ids=["plain", "repetition_penalty"])
@pytest.mark.parametrize("name", ["llama", "llava"])
def test_rows_padded_on_the_right_are_answered_as_those_padded_on_the_left(name: str, options: Any) -> None:
    """`generate` warns of them, and reads the answer off the padding."""
    left = inputs_of(name, 3)
    kept = left["attention_mask"].bool()
    ids = [torch.cat([row[k], row[~k]]) for row, k in zip(left["input_ids"], kept, strict=True)]
    right = {**left, "input_ids": torch.stack(ids), "attention_mask": left["attention_mask"].flip(1)}
    assert new_tokens(name, right, speculation(name), **options) == new_tokens(name, left, None, **options)


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
    prompts = [FAMILIES["llama"].row_inputs("text", row)["input_ids"] for row in range(3)]
    alone = [torch.tensor(new_tokens("llama", {"input_ids": ids}, None, **options)[0]) for ids in prompts]
    width = max(ids.shape[1] for ids in prompts) + 2
    padding = [answer[:1].expand(width - ids.shape[1]) for ids, answer in zip(prompts, alone, strict=True)]
    rows = [(pad, ids[0]) if side == "left" else (ids[0], pad) for pad, ids in zip(padding, prompts, strict=True)]
    kept = [torch.arange(width) < ids.shape[1] for ids in prompts]
    mask = torch.stack([k.flip(0) if side == "left" else k for k in kept]).long()
    inputs = {"input_ids": torch.stack([torch.cat(row) for row in rows]), "attention_mask": mask}
    expected = new_tokens("llama", inputs, None, **options) if side == "left" else torch.stack(alone).tolist()
    assert new_tokens("llama", inputs, speculation("llama"), **options) == expected


def test_a_penalty_that_ignores_a_padded_prompt_ignores_no_token_behind_it() -> None:
    """``prompt_ignore_length`` counts columns, of which a row padded on the right has fewer tokens."""
    prompts = [FAMILIES["llama"].row_inputs("text", row)["input_ids"] for row in range(3)]
    width, expected = max(ids.shape[1] for ids in prompts) + 6, []
    for ids in prompts:
        penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ids.shape[1])
        expected += new_tokens("llama", {"input_ids": ids}, None, logits_processor=[penalty])
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=width)
    padded = [torch.nn.functional.pad(ids[0], (0, width - ids.shape[1]), value=PAD) for ids in prompts]
    mask = torch.stack([torch.arange(width) < ids.shape[1] for ids in prompts]).long()
    inputs = {"input_ids": torch.stack(padded), "attention_mask": mask}
    assert new_tokens("llama", inputs, speculation("llama"), logits_processor=[penalty]) == expected


def test_labels_change_nothing() -> None:
    inputs = inputs_of("llama", 1)
    more = {**inputs, "labels": inputs["input_ids"]}
    assert new_tokens("llama", more, speculation("llama"))[0] == common("llama")[:NEW]


@pytest.mark.parametrize("number", [12, 18])
def test_gemma_3_pools_any_number_of_tokens_to_a_square(number: int) -> None:
    """8 x 8 patches in windows of 2 x 2, for both of these numbers."""
    model = FAMILIES["gemma3"].model()
    model.config.mm_tokens_per_image = number
    projector = model.model.multi_modal_projector
    model.model.multi_modal_projector = rebuilt = type(projector)(model.config)
    rebuilt.load_state_dict(projector.state_dict())
    options = {**inputs_of("gemma3", 2, "image"), "max_new_tokens": NEW, "do_sample": False}
    assert model.generate(**options, custom_generate=speculate()).tolist() == model.generate(**options).tolist()
