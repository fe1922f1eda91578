"""What drafts by the layers, states or attention of a hybrid target, or with a hybrid, changes none of its answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rows_alone import engine

import harness
from families import FAMILIES, HYBRIDS
from saccade.draft.model import ModelDrafter
from saccade.engine import Engine
from saccade.errors import InputError
from saccade.hf import speculate
from saccade.target_model.stock import AttentionProbe

LAYERS = ["linear_attention", "full_attention", "linear_attention"]  # of the family under test
OTHERS = ("hivis", "vispec", "msd", "hydra", "ensemble", "weighed views", "merged")
CASES = [
    *(("eagle3", "static"), ("dream", "static"), ("pruned", "dynamic"), ("medusa", "static")),
    *(pytest.param(drafter, "static", marks=pytest.mark.slow) for drafter in OTHERS),
]


@pytest.mark.parametrize(("drafter", "tree"), CASES)
def test_heads_and_views_of_a_hybrid_equal_generate(drafter: str, tree: str) -> None:
    outputs = harness.assert_equals_generate(engine("qwen3_5", drafter, tree), "qwen3_5")
    assert sum(output.stats.drafted_tokens for output in outputs) > 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_first_layers_of_every_hybrid_draft(name: str) -> None:
    harness.assert_equals_generate(engine(name, "kangaroo", "sage"), name)


def test_a_hybrid_drafts_for_a_target_of_attention_alone_and_the_other_way_round() -> None:
    for target, draft in (("llama", "lfm2"), ("lfm2", "llama"), ("nemotron_h", "qwen3_next")):
        drafter = ModelDrafter(harness.draft(draft), harness.POLICIES["dynamic"])
        harness.assert_equals_generate(Engine(harness.target(target), drafter), target)


def test_attention_is_read_from_the_nearest_layer_that_has_it() -> None:
    target = harness.target("qwen3_5")
    assert list(target.text_config.layer_types) == LAYERS
    for layers in (None, [-1], [0]):
        with AttentionProbe(target, layers=layers) as probe:
            harness.answer(Engine(target), harness.prompt("qwen3_5"), 1)
        assert list(probe.columns) == [1]


def test_generate_with_custom_generate_takes_a_hybrid() -> None:
    case = FAMILIES["qwen3_5"]
    model, inputs = case.model(), case.row_inputs("image", 0)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, **inputs}
    speculation = speculate(case.draft_model(), "dynamic-tree")
    assert torch.equal(model.generate(**options, custom_generate=speculation), model.generate(**options))
    with pytest.raises(InputError, match="states of recurrent layers cannot be handed back"):
        model.generate(**options, custom_generate=speculation, return_dict_in_generate=True)
    more = {"return_dict_in_generate": True, "output_logits": True, "use_cache": False}
    ours, theirs = model.generate(**options, **more, custom_generate=speculation), model.generate(**options, **more)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-3, rtol=1e-3)
