"""The lean decoder is the stock decoder, only faster; where it is not, it is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from families import FAMILIES
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families import split
from saccade.target_model import lean as lean_module
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.traits import Thresholds

LEAN = sorted(set(FAMILIES) - {"qwen3_vl_moe", "gemma3", "ministral3", "mistral3_ministral3"})
# experts, norms on both sides of each block, and queries that are scaled by position
TREE = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
DEPTH = torch.tensor([[0, 1, 1, 2]])


def loaded(target: Target, kind: str, case: Any, layers: tuple[int, ...] = (), rows: int = 3) -> Context:
    """Ragged rows in a context that returns the states of some layers."""
    context = Context(target, rows)
    context.requirements.add_layers(*layers)
    for row, prompt in enumerate(split(target.config, case.inputs(kind, rows=rows))):
        context.cache.reserve(row, len(prompt) + 8)
        context.load(row, prompt)
    return context


def drafted() -> torch.Tensor:
    return torch.randint(100, (3, 4), generator=torch.Generator().manual_seed(1))


def tree_logits(target: Target, kind: str, case: Any) -> torch.Tensor:
    return loaded(target, kind, case).forward([0, 1, 2], drafted(), TREE, DEPTH).logits


@pytest.mark.parametrize("name", LEAN)
def test_tree_logits_equal_the_stock_modules_on_ragged_rows(name: str) -> None:
    case = FAMILIES[name]
    lean, stock = Target(case.model()), Target(case.model(), lean=False)
    assert lean.is_lean
    assert not stock.is_lean
    kind = "image" if "image" in case.kinds else "text"
    ours, theirs = tree_logits(lean, kind, case), tree_logits(stock, kind, case)
    # fp32 sums in another order; the tiny models' logits are of order ten
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(LEAN)))
def test_architectures_with_other_parts_stay_on_the_stock_modules(name: str) -> None:
    assert not Target(FAMILIES[name].model()).is_lean


def test_fusing_leaves_the_stock_modules_as_they_were() -> None:
    case = FAMILIES["qwen2"]
    before = case.model().state_dict()
    model = Target(case.model()).model
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_second_adapter_shares_the_first_ones_fused_weights() -> None:
    model = FAMILIES["llama"].model()
    first = Target(model)
    place = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    second = Target(model)
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == place
    assert first.is_lean
    assert second.is_lean


class LowRank(nn.Module):
    """A linear map with something added, as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.more = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.more(x)


@torch.no_grad()
def shift_biases(model: Any) -> None:
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.bias.add_(torch.randn_like(projection.bias))


def wrap_projections(model: Any) -> None:
    layer = model.model.layers[1]
    layer.self_attn.q_proj, layer.mlp.down_proj = (
        LowRank(layer.self_attn.q_proj),
        LowRank(layer.mlp.down_proj),
    )


def hook_a_layer(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, out: out + 0.7)


def hook_a_projection_first(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def hook_the_model(model: Any) -> None:
    def doubled(module: Any, given: Any, out: Any) -> Any:
        out.logits = -out.logits
        return out

    model.register_forward_hook(doubled)


def replace_the_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def replace_the_embedding(model: Any) -> None:
    model.model.embed_tokens = nn.Embedding(*model.model.embed_tokens.weight.shape)


def replace_a_norms_weight(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(torch.randn_like(norm.weight))


def give_a_weight_other_memory(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = torch.randn_like(weight)


def give_a_layer_another_forward(model: Any) -> None:
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.5


CHANGES = [
    shift_biases,
    wrap_projections,
    hook_a_layer,
    hook_a_projection_first,
    hook_the_model,
    replace_the_head,
    replace_the_embedding,
    replace_a_norms_weight,
    give_a_weight_other_memory,
    give_a_layer_another_forward,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_after_loading_counts(change: Callable[[Any], None]) -> None:
    case = FAMILIES["qwen2"]
    target = Target(case.model())
    assert target.is_lean
    before = tree_logits(target, "text", case)
    torch.manual_seed(0)
    change(target.model)
    ours = tree_logits(target, "text", case)
    theirs = tree_logits(Target(target.model, lean=False), "text", case)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)  # as above
    assert float((ours - before).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_global_hooks_count_for_as_long_as_they_are_registered(kind: str) -> None:
    case = FAMILIES["qwen2"]
    target = Target(case.model())
    before = tree_logits(target, "text", case)

    def doubled(module: Any, given: Any, out: Any = None) -> Any:
        return None if out is None or not isinstance(module, nn.Linear) else out * 1.5

    handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(doubled)
    try:
        assert not target.is_lean
        ours = tree_logits(target, "text", case)
        theirs = tree_logits(Target(target.model, lean=False), "text", case)
    finally:
        handle.remove()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert (float((ours - before).abs().max()) > 0.1) == (kind == "forward")
    assert target.is_lean
    torch.testing.assert_close(tree_logits(target, "text", case), before)


@pytest.mark.parametrize("change", [lambda m: m.model.layers.append(m.model.layers[0]), lambda m: m.double()])
def test_a_layer_that_is_added_and_weights_that_are_cast_send_the_adapter_back_to_the_stock_modules(
    change: Any,
) -> None:
    target = Target(FAMILIES["qwen2"].model())
    change(target.model)
    assert not target.is_lean


@pytest.mark.parametrize("name", ["ministral3", "mistral3_ministral3"])
def test_queries_that_are_scaled_by_position_show_even_if_the_class_were_let_in(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the beginning, where they were once compared, such models give the lean decoder's logits."""
    attention = "transformers.models.ministral3.modeling_ministral3.Ministral3Attention"
    monkeypatch.setattr(lean_module, "VERIFIED_ATTENTION", lean_module.VERIFIED_ATTENTION | {attention})
    near = lambda self, context: [8, 9]  # noqa: E731
    assert not Target(FAMILIES[name].model()).is_lean
    monkeypatch.setattr(lean_module.Thresholds, "probe_positions", near)
    assert Target(FAMILIES[name].model()).is_lean


def test_an_attention_class_that_is_not_known_stays_stock_whatever_it_is_built_of() -> None:
    model = FAMILIES["llama"].model()
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("LlamaAttention", (type(attention),), {})
    assert not Target(model).is_lean


def test_lengths_are_compared_on_both_sides_and_none_lies_beyond_the_context() -> None:
    config = FAMILIES["ministral3"].model().config
    config.sliding_window = 50
    thresholds = Thresholds.of(config)
    assert (thresholds.windows, thresholds.positions, thresholds.unknown) == ((50,), (32,), {})
    beyond = thresholds.probe_positions(1024)
    assert {31, 32, 33, 49, 50, 51, 64, 256, 1023} <= set(beyond)
    assert max(beyond) == 1023


def test_a_change_between_two_steps_counts_from_the_next_one() -> None:
    case = FAMILIES["llama"]
    tokens = []
    for lean in (True, False):
        target = Target(case.model(), lean=lean)
        prompts = split(target.config, case.inputs("text", rows=1))
        engine = Engine(target)
        run = engine.start([Request(prompts[0])], plan(target, prompts, max_new_tokens=30))
        for number, _ in enumerate(run.steps):
            if number == 9:
                hook_a_layer(target.model)
        tokens.append(run.outputs[0].tokens)
    assert tokens[0] == tokens[1]
    assert tokens[0] != case.reference("text", rows=1, n=30)[0]


def test_a_model_that_has_hooks_when_it_is_loaded_never_becomes_lean_unseen() -> None:
    model = FAMILIES["llama"].model()
    handle = model.register_forward_hook(lambda module, given, out: out)
    target = Target(model)
    handle.remove()
    assert not target.is_lean


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_model_that_is_cast_later_gives_what_a_new_adapter_of_it_gives(name: str) -> None:
    case = FAMILIES[name]
    target = Target(case.model())
    target.model.to(torch.float64)
    ours, theirs = (tree_logits(t, "image", case) for t in (target, Target(target.model, lean=False)))
    torch.testing.assert_close(ours, theirs)


def test_a_scaling_that_the_structure_does_not_show_is_noticed() -> None:
    model = FAMILIES["llama"].model()
    forward = type(model.model.layers[0]).forward

    def scaled(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, hidden, *args, **kwargs) * 1.1

    for layer in model.model.layers:
        layer.forward = scaled.__get__(layer)
    assert not Target(model).is_lean


@pytest.mark.parametrize("final", ["post", "pre"])
@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_5_vl", "gemma3", "qwen3_vl"])
def test_hidden_states_are_the_same_from_lean_and_stock_decoders(name: str, final: Literal["post", "pre"]) -> None:
    case = FAMILIES[name]
    kind = "image" if "image" in case.kinds else "text"
    read = []
    for lean in (True, False):
        target = Target(case.model(), lean=lean)
        context = Context(target, 2)
        context.requirements.add_layers(0, 1, len(target.layers))
        context.requirements.final = final
        for row, prompt in enumerate(split(target.config, case.inputs(kind, rows=2))):
            context.cache.reserve(row, len(prompt) + 4)
            assert context.load(row, prompt).hidden[1].shape[0] == len(prompt)
        read.append(context.forward([0, 1], torch.arange(40, 48).view(2, 4), TREE, DEPTH).hidden)
    assert read[0].keys() == read[1].keys() == {0, 1, len(target.layers)}
    for index, states in read[0].items():
        # fp32 sums in another order, as for the logits above
        torch.testing.assert_close(states, read[1][index], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "lean"), [("llava", True), ("llava", False), ("qwen2_5_vl", True), ("gemma3", False)])
def test_what_enters_a_layer_is_the_same_without_the_layers_behind_it(name: str, lean: bool) -> None:
    case = FAMILIES[name]
    target = Target(case.model(), lean=lean)
    assert target.is_lean == lean
    layer, rows, tokens = len(target.layers) - 1, [0, 1, 2], drafted()
    context = loaded(target, "image", case, (layer,))
    hooks = [len(module._forward_pre_hooks) for module in target.model.modules()]
    reading = context.forward(rows, tokens, TREE, DEPTH)
    context.cache.drop(rows)
    first = context.early_exit(rows, tokens[:, :1], TREE[:, :1, :1], DEPTH[:, :1], layer)
    rest = context.early_exit(rows, tokens[:, 1:], TREE[:, 1:], DEPTH, layer)  # behind the first, which is pending
    torch.testing.assert_close(torch.cat([first, rest], 1), reading.hidden[layer], rtol=1e-4, atol=1e-3)
    context.cache.drop(rows)
    torch.testing.assert_close(context.forward(rows, tokens, TREE, DEPTH).logits, reading.logits)
    assert [len(module._forward_pre_hooks) for module in target.model.modules()] == hooks
