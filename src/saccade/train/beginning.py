"""The head that a run begins with."""

from __future__ import annotations

import torch

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head
from saccade.draft.heads.registry import build_head, kind_of
from saccade.errors import TrainingError
from saccade.target.adapter import Target
from saccade.train.recipe import Recipe


def new_head(target: Target, recipe: Recipe) -> Head:
    """A head with fresh weights that depend on the recipe's seed alone, float32, on the target's device.

    Raises:
        TrainingError: an option of the head is of another type than its default, or is not for training.
        ModelError: the kind of head has no such option, or a value is out of range.
    """
    for name, usual in kind_of(recipe.kind).defaults.items():
        value = recipe.head.get(name, usual)
        if type(value) is not type(usual) and not (type(usual) is float and type(value) is int):
            raise TrainingError(
                f"The setting head.{name} is {value!r}; expected {type(usual).__name__}, such as {usual!r}."
            )
    config = HeadConfig.from_target(target, recipe.kind, steps=recipe.deepest, **recipe.head)
    for name in kind_of(recipe.kind).loaded_only:
        if config.options[name] != kind_of(recipe.kind).defaults[name]:
            raise TrainingError(
                f"Heads with {name} {config.options[name]!r} can be loaded but not trained here; leave out head.{name}."
            )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        head = build_head(config)
    head.begin_from(target)
    if not recipe.residuals:
        for name, weight in head.named_parameters():
            if name in ("residuals", "w.weight"):  # r^s start at zero, and stay
                weight.requires_grad_(False)
    return head.float().to(target.device).train()
