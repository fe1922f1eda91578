"""The lean decoder is the stock decoder, only faster; where it is not, it is not used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from families import FAMILIES, STOCK
from saccade.engine import Engine, Request
from saccade.engine.batch import LOOK
from saccade.engine.row import plan
from saccade.inputs.families import split
from saccade.target_model import fusing
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.lean import rms_norm
from saccade.target_model.token_blocks import TokenBlock
from saccade.target_model.traits import Thresholds

pytestmark = pytest.mark.executors

LEAN = sorted(set(FAMILIES) - {"qwen3_vl_moe", "gemma3", "ministral3", "mistral3_ministral3", *STOCK})
# experts, norms on both sides of each block, and queries that are scaled by position
TREE = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
DEPTH = torch.tensor([[0, 1, 1, 2]])


@cache
def target(name: str) -> Target:
    return Target(FAMILIES[name].model())


def loaded(model: Target, kind: str, case: Any, layers: tuple[int, ...] = (), final: Any = "post") -> Context:
    """Three ragged rows in a context that returns the states of some layers."""
    context = Context(model, 3)
    context.requirements.add_layers(*layers)
    context.requirements.final = final
    for row, prompt in enumerate(split(model.config, case.inputs(kind, rows=3))):
        context.cache.reserve(row, len(prompt) + 8)
        states = context.load(row, prompt).hidden
        assert all(state.shape[0] == len(prompt) for state in states.values())
    return context


def drafted() -> torch.Tensor:
    return torch.randint(100, (3, 4), generator=torch.Generator().manual_seed(1))


def test_angles_of_any_position_are_those_that_the_model_computes() -> None:
    decoder = Target(FAMILIES["llama"].model(), "lean")._fast.decoder
    x = torch.zeros(1, decoder.width)
    for place in (0, 1023, 1024, 1025, 2047, 2048, 5, 1 << 15, (1 << 15) + 1):  # ends of tables, and beyond the largest
        at = torch.tensor([[place]])
        torch.testing.assert_close(decoder.angles(x, at), decoder._angles(x, at))


def tree_logits(model: Target, kind: str, case: Any) -> torch.Tensor:
    return loaded(model, kind, case).forward([0, 1, 2], drafted(), TREE, DEPTH).logits


@pytest.mark.parametrize(
    ("name", "final"), [*((name, "post") for name in LEAN), *((name, "pre") for name in ("llava", "qwen3_vl"))]
)
def test_logits_and_states_of_trees_equal_those_of_the_stock_modules_on_ragged_rows(name: str, final: str) -> None:
    case, model = FAMILIES[name], target(name)
    assert model.is_lean
    layers = (0, 1, len(model.layers))
    ours = loaded(model, case.kinds[0], case, layers, final).forward([0, 1, 2], drafted(), TREE, DEPTH)
    with model.stock():
        assert not model.is_lean
        theirs = loaded(model, case.kinds[0], case, layers, final).forward([0, 1, 2], drafted(), TREE, DEPTH)
    # fp32 sums in another order; the tiny models' logits are of order ten
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-3)
    assert ours.hidden.keys() == theirs.hidden.keys() == set(layers)
    for index, states in ours.hidden.items():
        torch.testing.assert_close(states, theirs.hidden[index], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(LEAN)))
def test_architectures_with_other_parts_stay_on_the_stock_modules(name: str) -> None:
    assert not target(name).is_lean


def test_fusing_leaves_the_stock_modules_as_they_were_and_a_second_adapter_shares_their_weights() -> None:
    model = FAMILIES["qwen2"].model()
    before = copy.deepcopy(model.state_dict())
    first = Target(model)
    place = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    second = Target(model)
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == place
    assert first.is_lean
    assert second.is_lean
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


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


@pytest.mark.parametrize(
    "change",
    [
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
    ],
)
def test_a_change_of_the_model_after_loading_counts(change: Callable[[Any], None]) -> None:
    case = FAMILIES["qwen2"]
    before = tree_logits(target("qwen2"), "text", case)
    changed = Target(case.model())
    assert changed.is_lean
    torch.manual_seed(0)
    change(changed.model)
    ours = tree_logits(changed, "text", case)
    theirs = tree_logits(Target(changed.model, executor="stock"), "text", case)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)  # as above
    assert float((ours - before).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_global_hooks_count_for_as_long_as_they_are_registered(kind: str) -> None:
    case, model = FAMILIES["qwen2"], target("qwen2")
    before = tree_logits(model, "text", case)

    def doubled(module: Any, given: Any, out: Any = None) -> Any:
        return None if out is None or not isinstance(module, nn.Linear) else out * 1.5

    handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(doubled)
    try:
        assert not model.is_lean
        ours = tree_logits(model, "text", case)
        theirs = tree_logits(Target(model.model, executor="stock"), "text", case)
    finally:
        handle.remove()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert (float((ours - before).abs().max()) > 0.1) == (kind == "forward")
    assert model.is_lean
    torch.testing.assert_close(tree_logits(model, "text", case), before)


def test_a_layer_that_is_added_sends_the_adapter_back_to_the_stock_modules() -> None:
    longer = Target(FAMILIES["qwen2"].model())
    longer.layers.append(longer.layers[0])
    assert not longer.is_lean


@pytest.mark.parametrize("name", ["ministral3", "mistral3_ministral3"])
def test_queries_that_are_scaled_by_position_show_even_if_the_class_were_let_in(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the beginning, where they were once compared, such models give the lean decoder's logits."""
    attention = "transformers.models.ministral3.modeling_ministral3.Ministral3Attention"
    monkeypatch.setattr(fusing, "VERIFIED_ATTENTION", fusing.VERIFIED_ATTENTION | {attention})
    assert not Target(FAMILIES[name].model()).is_lean
    monkeypatch.setattr(Thresholds, "probe_positions", lambda self, context: [8, 9])
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


def test_a_change_during_an_answer_counts_after_at_most_as_many_steps_as_the_engine_says() -> None:
    case = FAMILIES["llama"]

    def changed_before(step: int, lean: bool) -> list[int]:
        model = Target(case.model(), executor="lean" if lean else "stock")
        prompts = split(model.config, case.inputs("text", rows=1))
        run = Engine(model).start([Request(prompts[0])], plan(model, prompts, max_new_tokens=30))
        for number, _ in enumerate(run.steps, 1):
            if number == step - 1:
                hook_a_layer(model.model)
        return run.outputs[0].tokens

    expected = changed_before(2 * LOOK + 1, lean=False)
    assert expected != case.reference("text", rows=1, n=30)[0]
    assert expected == changed_before(2 * LOOK + 1, lean=True) == changed_before(LOOK + 2, lean=True)


def test_a_change_between_two_answers_counts_from_the_first_token_on() -> None:
    case = FAMILIES["llama"]
    model = Target(case.model())
    prompt = split(model.config, case.inputs("text", rows=1))[0]
    engine = Engine(model)
    session = engine.open()
    engine.generate([Request(prompt)], session, max_new_tokens=LOOK // 2)
    hook_the_model(model.model)
    ours = engine.generate([Request(prompt)], session, max_new_tokens=LOOK)[0].tokens
    theirs = Engine(Target(model.model, executor="stock")).generate([Request(prompt)], max_new_tokens=LOOK)[0].tokens
    assert ours == theirs != case.reference("text", rows=1, n=LOOK)[0]


def test_a_model_that_has_hooks_when_it_is_loaded_never_becomes_lean_unseen() -> None:
    model = FAMILIES["llama"].model()
    handle = model.register_forward_hook(lambda module, given, out: out)
    hooked = Target(model)
    handle.remove()
    assert not hooked.is_lean


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_model_that_is_cast_later_gives_what_a_new_adapter_of_it_gives(name: str) -> None:
    case = FAMILIES[name]
    cast = Target(case.model())
    cast.model.to(torch.float64)
    assert not cast.is_lean
    ours, theirs = (tree_logits(t, "image", case) for t in (cast, Target(cast.model, executor="stock")))
    torch.testing.assert_close(ours, theirs)


def test_a_scaling_that_the_structure_does_not_show_is_noticed() -> None:
    model = FAMILIES["llama"].model()
    forward = type(model.model.layers[0]).forward

    def scaled(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, hidden, *args, **kwargs) * 1.1

    for layer in model.model.layers:
        layer.forward = scaled.__get__(layer)
    assert not Target(model).is_lean


@pytest.mark.parametrize(("name", "lean"), [("llava", True), ("llava", False), ("qwen2_5_vl", True), ("gemma3", False)])
def test_what_enters_a_layer_is_the_same_without_the_layers_behind_it(name: str, lean: bool) -> None:
    case = FAMILIES[name]
    model = Target(case.model(), executor="lean" if lean else "stock")
    assert model.is_lean == lean
    layer, rows, tokens = len(model.layers) - 1, [0, 1, 2], drafted()
    context = loaded(model, "image", case, (layer,))
    hooks = [len(module._forward_pre_hooks) for module in model.model.modules()]
    reading = context.forward(rows, tokens, TREE, DEPTH)
    context.cache.drop(rows)
    parts = (tokens[:, :1], TREE[:, :1, :1], DEPTH[:, :1]), (tokens[:, 1:], TREE[:, 1:], DEPTH)
    states = [model.early_exit(context.cache, context.block(rows, *part), layer) for part in parts]
    torch.testing.assert_close(torch.cat(states, 1), reading.hidden[layer], rtol=1e-4, atol=1e-3)
    context.cache.drop(rows)
    torch.testing.assert_close(context.forward(rows, tokens, TREE, DEPTH).logits, reading.logits)
    assert [len(module._forward_pre_hooks) for module in model.model.modules()] == hooks


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e4, 1e15])
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (5, 3, 32)])
def test_a_norm_in_few_operations_is_torch_s(shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * size, torch.randn(shape[-1])
    x[0] = 0
    expected = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
    for factor in (1.0, 2.0**-14):
        ours = rms_norm(x, weight, 1e-6, factor)
        torch.testing.assert_close(ours, factor * expected, rtol=2e-6, atol=0.0)


def test_a_layer_takes_few_operations_of_torch() -> None:
    """As its profiler counts them, those inside of others and views with them."""
    model = target("llava")
    cache = model.new_cache(1)
    cache.reserve(0, 9)
    block = TokenBlock([0], torch.tensor([[5]]))

    def count() -> int:
        with torch.autograd.profiler.profile() as profile:
            model.forward(cache, [block])
        return len(profile.function_events)

    count()
    few = count()
    assert few <= 110 * len(model.layers) + 130  # fifty a layer more with torch's own RMS norm
    with model.stock():
        assert count() > few + 80 * len(model.layers)
