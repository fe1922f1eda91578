"""The tap reads what Hugging Face returns as `output_hidden_states`, at prefill and on trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import extended, plain, prompt, target

from families import FAMILIES, IMAGE
from saccade.errors import ModelError
from saccade.target_model.context import Context
from saccade.target_model.stock import FeatureTap
from saccade.tree import TreeShape, ancestors_of

DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
CLOSE = {"rtol": 0.0, "atol": 1e-4}
"""fp32 sums in another order differ by up to 2e-5 for streams of size 8; a wrong layer differs by more than 1."""


def expected(name: str, more: list[int]) -> list[torch.Tensor]:
    """``[S, d]`` for every index, of a prompt with an image where the family has them, and ``more`` behind."""
    case, model = FAMILIES[name], target(name).model
    inputs = extended(case.row_inputs(case.kinds[0], 0), more)
    states = [s[0] for s in plain(model, inputs, output_hidden_states=True).hidden_states]
    if name in DEEPSTACK:  # Hugging Face records a layer's output before deepstack features are added
        with torch.no_grad():
            visual = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        states[1] = states[1].clone()
        states[1][inputs["input_ids"][0] == IMAGE] += visual.deepstack_features[0]
    return states


@pytest.mark.parametrize("name", list(FAMILIES))
def test_features_at_prefill_are_the_hidden_states_of_the_model(name: str) -> None:
    own, case = target(name), FAMILIES[name]
    with FeatureTap(own, range(len(own.layers) + 1)) as tap:
        Context(own, 1).load(0, prompt(name, case.kinds[0]))
    assert list(tap.hidden) == list(range(len(own.layers) + 1))
    for index, states in enumerate(expected(name, [])):
        torch.testing.assert_close(tap.hidden[index][0], states, **CLOSE)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_features_on_a_tree_are_those_of_each_path(name: str) -> None:
    own, case = target(name), FAMILIES[name]
    context = Context(own, 1)
    context.cache.reserve(0, 128)
    context.load(0, prompt(name, case.kinds[0]))
    tokens = [20, 31, 42, 53, 64, 75]
    depth = torch.tensor([[0, *map(len, SHAPE.paths)]])
    allow = ancestors_of(torch.tensor([SHAPE.parents]), SHAPE.max_depth)
    with FeatureTap(own, range(len(own.layers) + 1)) as tap:
        context.forward([0], torch.tensor([tokens]), allow, depth)
    for leaf in range(3, 6):
        path = [0, SHAPE.parents[leaf], leaf]
        states = expected(name, [tokens[node] for node in path])
        for index, hidden in tap.hidden.items():
            torch.testing.assert_close(hidden[0, path], states[index][-3:], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "gemma3"])
def test_the_final_norm_turns_pre_into_post(name: str) -> None:
    own, case = target(name), FAMILIES[name]
    with FeatureTap(own, [-1], final="pre") as pre, FeatureTap(own, [-1], final="post") as post:
        Context(own, 1).load(0, prompt(name, case.kinds[0]))
    with torch.no_grad():
        torch.testing.assert_close(own.decoder.norm(pre.hidden[-1]), post.hidden[-1], rtol=0.0, atol=0.0)
    assert (pre.hidden[-1] - post.hidden[-1]).abs().max() > 0.1


def test_a_closed_tap_leaves_no_hooks_even_after_an_exception() -> None:
    own = target("llama")
    modules = [*own.layers, own.decoder.norm]

    def hooks() -> list[int]:  # Hugging Face leaves some of its own after `output_hidden_states`
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]

    before, tap = hooks(), FeatureTap(own, [0, 1, 2])
    with tap:
        assert hooks() != before
    with pytest.raises(RuntimeError, match="planted"), tap:
        raise RuntimeError("planted")
    Context(own, 1).load(0, prompt("llama", "text"))
    assert tap.hidden == {}
    assert hooks() == before


def test_a_model_spread_by_device_map_gives_the_same_features() -> None:
    """Accelerate's hooks stand around every layer as they do when layers lie on several devices."""
    hooks: Any = pytest.importorskip("accelerate.hooks")
    model = FAMILIES["llama"].model()
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    from saccade.target_model.adapter import Target

    with FeatureTap(Target(model), [0, 1, 2]) as spread, FeatureTap(target("llama"), [0, 1, 2]) as whole:
        for own in (Target(model), target("llama")):
            Context(own, 1).load(0, prompt("llama", "text"))
    for index in range(3):
        torch.testing.assert_close(spread.hidden[index], whole.hidden[index], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("index", [3, -4])
def test_a_layer_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(ModelError, match=r"this decoder has 2 layers, so give 0 .* to 2"):
        FeatureTap(target("llama"), [index])


def test_an_unknown_final_norm_is_refused_unless_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = target("llama")
    monkeypatch.setattr("saccade.target_model.stock.FINAL_NORMS", ("elsewhere",))
    with pytest.raises(ModelError, match="no final norm under a known name"):
        FeatureTap(own, [0, -1])
    FeatureTap(own, [0, 1])
