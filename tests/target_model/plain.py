"""The slow reference: whole sequences through the model's own forward, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from families import FAMILIES, Inputs, reset_rope_deltas
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.tree import TreeShape, ancestors_of

SHAPE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
"""A tree with two branches."""


def tree_inputs(shape: TreeShape = SHAPE) -> tuple[Tensor, Tensor]:
    """Attention mask and depth of a tree's nodes."""
    return ancestors_of(torch.tensor([shape.parents]), shape.max_depth), torch.tensor([[0, *map(len, shape.paths)]])


@cache
def target(name: str) -> Target:
    return Target(FAMILIES[name].model())


def prompt(name: str, kind: str, row: int = 0) -> Prompt:
    return split(target(name).config, FAMILIES[name].row_inputs(kind, row))[0]


def extended(inputs: Inputs, more: Sequence[int]) -> Inputs:
    """One row's inputs with text after them."""
    out = dict(inputs)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            tail = {"input_ids": list(more), "attention_mask": [1] * len(more)}.get(name, [0] * len(more))
            out[name] = torch.cat([inputs[name], torch.tensor([tail], dtype=inputs[name].dtype)], 1)
    return out


@torch.no_grad()
def plain(model: Any, inputs: Inputs, **options: Any) -> Any:
    reset_rope_deltas(model)
    out = model(**inputs, use_cache=False, **options)
    reset_rope_deltas(model)
    return out


def plain_logits(name: str, kind: str, row: int, more: Sequence[int]) -> Tensor:
    """``[1 + len(more), V]`` logits after the prompt and after each further token."""
    inputs = extended(FAMILIES[name].row_inputs(kind, row), more)
    return plain(target(name).model, inputs).logits[0, -1 - len(more) :]


@cache
def _eager(name: str) -> Any:
    model = FAMILIES[name].model()
    model.set_attn_implementation("eager")
    return model


def eager_attentions(name: str, inputs: Inputs) -> tuple[Tensor, ...]:
    """``[B, H, Q, K]`` for every layer."""
    attentions: tuple[Tensor, ...] = plain(_eager(name), inputs, output_attentions=True).attentions
    return attentions
