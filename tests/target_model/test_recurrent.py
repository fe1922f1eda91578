"""Draft trees through recurrent layers equal one recurrence per branch, and rows start from states that are theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from families import FAMILIES, HYBRIDS, reference_greedy
from harness import build, draft, prompts
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.target_model import recurrent
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context
from saccade.target_model.recurrent import Paths, PendingTokens, RecurrentLayer
from saccade.tree import ancestors_of

PREFIX = 5


def limited(model: Any) -> Any:
    """The model with a limit of Mamba-2's steps that most of a prompt's tokens meet."""
    for module in model.modules():
        if isinstance(module, NemotronHMamba2Mixer):
            module.time_step_limit = (0.7, float("inf"))
    return model


@cache
def layer_of(name: str) -> tuple[Target, int, Any]:
    """A recurrent module of a tiny model, and its place there."""
    target = Target(limited(FAMILIES[name].model()))
    kinds = (Qwen3_5GatedDeltaNet, NemotronHMamba2Mixer)
    index, module = next(
        (i, m) for i, layer in enumerate(target.layers) for m in layer.modules() if isinstance(m, kinds)
    )
    return target, index, module


@st.composite
def trees(draw: Callable[..., Any]) -> list[int]:
    """Parents of nodes in topological order; node 0 is the root."""
    count = draw(st.integers(2, 24))
    return [0, *(draw(st.integers(0, i - 1)) for i in range(1, count))]


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
@settings(max_examples=15, deadline=None)
@given(parents=trees(), seed=st.integers(0, 99), cut=st.integers(1, 23))
def test_every_node_equals_the_recurrence_along_its_branch(name: str, parents: list[int], seed: int, cut: int) -> None:
    """Outputs of all nodes, in one forward or two, and states after every path, against the module on each branch."""
    target, index, module = layer_of(name)
    generator = torch.Generator().manual_seed(seed)
    prefix, nodes = (torch.randn(2, n, 64, generator=generator) for n in (PREFIX, len(parents)))
    mask = ancestors_of(torch.tensor([parents]), len(parents))
    cut = min(cut, len(parents))

    def run(states: Tensor, part: Tensor | None, each: tuple[list[int], ...] = ([0, 1],), chain: int = 0) -> Tensor:
        count = states.shape[1]
        rows.states.plan([(some, count, part, chain, rows.pending[0]) for some in each], states.device)
        rows.pending = [count + states.shape[1] for count in rows.pending]
        out: Tensor = module(states.flatten(0, 1)[None], rows)
        return out[0].unflatten(0, (2, -1))

    with torch.inference_mode():
        rows = RowCache(target.layer_devices, 2, recurrent=[index])
        for row in (0, 1):
            rows.reserve(row, 64)
        run(prefix, None, ([0], [1]), PREFIX)
        rows.commit([0, 1], [range(PREFIX)] * 2)
        ours = [run(nodes[:, :cut], mask[:, :cut, :cut])]
        if cut < len(parents):
            ours.append(run(nodes[:, cut:], mask[:, cut:]))
        outputs = torch.cat(ours, 1)
        paths = [mask[0, leaf].nonzero().flatten().tolist() for leaf in (len(parents) - 1, len(parents) // 2)]
        rows.commit([0, 1], paths)
        after = torch.randn(2, 1, 64, generator=generator)
        following = run(after, None)
        for node in range(len(parents)):
            expected = token_by_token(target, module, prefix, nodes[:, mask[0, node]])
            torch.testing.assert_close(outputs[:, node], expected, atol=2e-5, rtol=2e-5)
        for row, path in enumerate(paths):
            expected = token_by_token(target, module, prefix[[row]], torch.cat([nodes[row, path], after[row]])[None])
            torch.testing.assert_close(following[row], expected, atol=2e-5, rtol=2e-5)


def token_by_token(target: Target, module: Any, prefix: Tensor, tokens: Tensor) -> Tensor:
    """Output ``[B, d]`` of the last of some tokens after a prefix, by transformers' own cache."""
    cache = DynamicCache(config=target.text_config)
    module(prefix, cache)
    outputs = [module(token[:, None], cache)[:, -1] for token in tokens.unbind(1)]
    last: Tensor = outputs[-1]
    return last


HONEST_PATHS, HONEST_SCAN, HONEST_COMMIT = Paths.__init__, PendingTokens.scan, RecurrentLayer.commit


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_later_prompt_starts_from_the_nearest_saved_states(name: str) -> None:
    case = FAMILIES[name]
    target, model = Target(case.model()), case.model()
    ids = torch.randint(8, 180, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    context = Context(target, 1)
    context.cache.reserve(0, 256)
    context.load(0, Prompt(tuple(ids[:40])))
    context.load(0, Prompt(tuple(ids[:80])))
    assert context.shared_prefixes([0], Prompt((*ids[:60], *ids[100:]))) == {0: 40}
    for prompt in ((*ids[:60], *ids[100:]), (*ids[:60], *ids[100:], *ids[:9])):
        prefill = context.prefill(0, Prompt(prompt))
        assert prefill.num_computed in (40, 80)
        logits = prefill.run(len(prompt)).logits
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_behind_a_part_that_another_prompt_has_replaced_are_gone(name: str) -> None:
    target, model = Target(FAMILIES[name].model()), FAMILIES[name].model()
    ids = torch.randint(8, 180, (160,), generator=torch.Generator().manual_seed(2)).tolist()
    replaced = [*ids[:40], *ids[100:]]
    context = Context(target, 1)
    context.cache.reserve(0, 256)
    for prompt in (ids[:40], ids[:80], replaced):
        context.load(0, Prompt(tuple(prompt)))
    last = [*replaced[:90], *ids[50:60]]
    prefill = context.prefill(0, Prompt(tuple(last)))
    assert prefill.num_computed == 40, "not 80, whose states are of the second prompt"
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([last])).logits[0, -1]
    torch.testing.assert_close(prefill.run(len(last)).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["dynamic", "lookup"])
def test_steps_are_limited_in_prompts_alone_as_generate_does(method: str) -> None:
    """A later turn runs the tokens of the answer again, because they are tokens of a prompt then."""
    case = FAMILIES["nemotron_h"]
    engine = build(Target(limited(case.model())), draft("nemotron_h"), method)
    session = engine.open(1)
    first = case.row_inputs("text", 1)
    expected = reference_greedy(limited(case.model()), first, 24)[0]
    assert expected != reference_greedy(case.model(), first, 24)[0]
    for inputs in (first, case.continued("text", 1, expected)):
        (answer,) = engine.generate([Request(p) for p in prompts(case, inputs)], max_new_tokens=24, session=session)
        assert answer.tokens == reference_greedy(limited(case.model()), inputs, 24)[0]
    assert answer.stats.reused_tokens == first["input_ids"].shape[1]


def test_rows_of_hybrids_cost_a_constant_and_entries_of_their_attention_layers() -> None:
    target = Target(FAMILIES["qwen3_5"].model())
    assert target.entry_bytes == 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 in the one attending layer
    state, inputs = 4 * 16 * 16 * 4, 3 * (4 * 16 + 2 * 2 * 16) * 4
    assert target.row_bytes == 2 * (state + inputs) * (1 + recurrent.CHECKPOINTS)


def test_a_wrapped_model_still_generates_by_itself() -> None:
    case = FAMILIES["qwen3_5"]
    model = case.model()
    inputs = case.row_inputs("image", 0)
    expected = reference_greedy(copy.deepcopy(model), inputs)
    Engine(Target(model)).generate([Request(p) for p in prompts(case, inputs)], max_new_tokens=4)
    assert reference_greedy(model, inputs) == expected
