"""Captured states are what Hugging Face returns as `output_hidden_states`, at prefill and on trees."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from plain import SHAPE, extended, plain, prompt, target, tree_inputs
from torch import Tensor

from families import FAMILIES, IMAGE
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.stock import captured_states

DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")
CLOSE = {"rtol": 0.0, "atol": 1e-4}
"""fp32 sums in another order differ by up to 2e-5 for streams of size 8; a wrong layer differs by more than 1."""


def expected(name: str, more: list[int]) -> list[Tensor]:
    """``[S, d]`` for every index, of a prompt with an image where the family has them, and ``more`` after."""
    case, model = FAMILIES[name], target(name).model
    inputs = extended(case.row_inputs(case.kinds[0], 0), more)
    states = [s[0] for s in plain(model, inputs, output_hidden_states=True).hidden_states]
    if name in DEEPSTACK:  # Hugging Face records a layer's output before deepstack features are added
        with torch.no_grad():
            visual = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        states[1] = states[1].clone()
        states[1][inputs["input_ids"][0] == IMAGE] += visual.deepstack_features[0]
    return states


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3n"])
def test_states_at_prefill_and_on_a_tree_are_the_hidden_states_of_the_model(name: str) -> None:
    model, case = target(name), FAMILIES[name]
    context = Context(model, 1)
    context.cache.reserve(0, 128)
    with captured_states(model, range(len(model.layers) + 1)) as hidden:
        context.load(0, prompt(name, case.kinds[0]))
    assert list(hidden) == list(range(len(model.layers) + 1))
    for index, states in enumerate(expected(name, [])):
        torch.testing.assert_close(hidden[index][0], states, **CLOSE)
    tokens = torch.tensor([[20, 31, 42, 53, 64, 75]])
    with captured_states(model, range(len(model.layers) + 1)) as hidden:
        context.forward([0], tokens, *tree_inputs())
    for leaf in range(3, 6):
        path = [0, SHAPE.parents[leaf], leaf]
        states = expected(name, tokens[0, path].tolist())
        for index, ours in hidden.items():
            torch.testing.assert_close(ours[0, path], states[index][-3:], **CLOSE)


def test_states_between_layers_with_several_residual_streams_are_refused() -> None:
    model = target("gemma3n")
    with pytest.raises(ModelError, match="has several residual streams"), captured_states(model, [1]):
        Context(model, 1).load(0, prompt("gemma3n", "text"))


def last_states(name: str, final: Literal["post", "pre"]) -> Tensor:
    with captured_states(target(name), [-1], final) as hidden:
        Context(target(name), 1).load(0, prompt(name, FAMILIES[name].kinds[0]))
    return hidden[-1]


@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "gemma3"])
def test_the_final_norm_turns_pre_into_post(name: str) -> None:
    pre, post = last_states(name, "pre"), last_states(name, "post")
    with torch.no_grad():
        torch.testing.assert_close(target(name).decoder.norm(pre), post, rtol=0.0, atol=0.0)
    assert (pre - post).abs().max() > 0.1


def test_no_hooks_are_left_even_after_an_exception() -> None:
    model = target("llama")
    modules = [*model.layers, model.decoder.norm]

    def hooks() -> list[int]:  # Hugging Face leaves some of its own after `output_hidden_states`
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]

    before = hooks()
    with captured_states(model, [0, 1, 2]):
        assert hooks() != before
    with pytest.raises(RuntimeError, match="planted"), captured_states(model, [0, 1, 2]) as hidden:
        raise RuntimeError("planted")
    Context(model, 1).load(0, prompt("llama", "text"))
    assert hidden == {}
    assert hooks() == before


def test_a_model_spread_by_device_map_gives_the_same_states() -> None:
    """Accelerate's hooks stand around every layer as they do when layers lie on several devices."""
    hooks: Any = pytest.importorskip("accelerate.hooks")
    model = FAMILIES["llama"].model()
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    spread = Target(model)
    with captured_states(spread, [0, 1, 2]) as ours, captured_states(target("llama"), [0, 1, 2]) as whole:
        for each in (spread, target("llama")):
            Context(each, 1).load(0, prompt("llama", "text"))
    for index in range(3):
        torch.testing.assert_close(ours[index], whole[index], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("index", [3, -4])
def test_a_layer_that_does_not_exist_is_refused(index: int) -> None:
    missing = captured_states(target("llama"), [index])
    with pytest.raises(ModelError, match=r"this decoder has 2 layers, so give 0 .* to 2"), missing:
        pass


def test_an_unknown_final_norm_is_refused_unless_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.target_model.stock.FINAL_NORMS", ("elsewhere",))
    with captured_states(target("llama"), [0, 1]):
        pass
    with pytest.raises(ModelError, match="no final norm under a known name"), captured_states(target("llama"), [-1]):
        pass
