"""Leaving the target early gives what the whole forward sees there, and leaves no trace."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES
from saccade.inputs.families import split
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context

TREE = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
DEPTH = torch.tensor([[0, 1, 1, 2]])


@pytest.mark.parametrize(("name", "lean"), [("llava", True), ("llava", False), ("qwen2_5_vl", True), ("gemma3", False)])
def test_what_enters_a_layer_is_the_same_without_the_layers_behind_it(name: str, lean: bool) -> None:
    case = FAMILIES[name]
    target = Target(case.model(), lean=lean)
    assert target.is_lean == lean
    prompts = split(target.config, case.inputs("image", rows=3))
    context = Context(target, 3)
    layer = len(target.layers) - 1
    context.requirements.add_layers(layer)
    for row, prompt in enumerate(prompts):
        context.cache.reserve(row, len(prompt) + 8)
        context.load(row, prompt)
    rows = [0, 1, 2]
    tokens = torch.randint(100, (3, 4), generator=torch.Generator().manual_seed(1))
    hooks = [len(module._forward_pre_hooks) for module in target.model.modules()]
    reading = context.forward(rows, tokens, TREE, DEPTH)
    context.cache.drop(rows)
    first = context.early_exit(rows, tokens[:, :1], TREE[:, :1, :1], DEPTH[:, :1], layer)
    rest = context.early_exit(rows, tokens[:, 1:], TREE[:, 1:], DEPTH, layer)  # behind the first, which is pending
    torch.testing.assert_close(torch.cat([first, rest], 1), reading.hidden[layer], rtol=1e-4, atol=1e-3)
    context.cache.drop(rows)
    torch.testing.assert_close(context.forward(rows, tokens, TREE, DEPTH).logits, reading.logits)
    assert [len(module._forward_pre_hooks) for module in target.model.modules()] == hooks
