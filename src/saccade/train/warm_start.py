"""Initial head of a run: fresh, or trained before."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head, HeadConfig, TargetShape, build_head, check_fit
from saccade.draft.heads.registry import head_class
from saccade.draft.heads.store import load_head
from saccade.errors import TrainingError
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import logit_map
from saccade.train.checkpoint import trained
from saccade.train.data import Source
from saccade.train.recipe import Recipe


def new_head(target: Target, recipe: Recipe, begin: str | Path | None = None) -> Head:
    """Return a float32 head on the target's device, with fresh weights of the recipe's seed or another head's."""
    known = None if begin is None else _known(begin, target, recipe)
    for name, usual in head_class(recipe.kind).defaults.items():
        value = recipe.head.get(name, usual)
        if type(value) is not type(usual) and not (type(usual) is float and type(value) is int):
            raise TrainingError(
                f"The setting head.{name} is {value!r}; expected {type(usual).__name__}, such as {usual!r}."
            )
    config = HeadConfig.from_target(target, recipe.kind, steps=recipe.deepest, **recipe.head)
    if known is not None:
        config = _agreed(begin, config, known, recipe)
    for name in head_class(recipe.kind).loaded_only:
        if config.options[name] != head_class(recipe.kind).defaults[name]:
            raise TrainingError(
                f"Heads with {name} {config.options[name]!r} can be loaded but not trained here; leave out head.{name}."
            )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        head = build_head(config)
    head.begin_from(target)
    if known is not None:
        weights = dict(known.state_dict())
        if "residuals" in weights:  # a new one starts as the last trained one, which was reused for it
            rows = weights["residuals"]
            weights["residuals"] = torch.cat([rows, rows[-1:].expand(head.config.steps - len(rows), -1)])
        head.load_state_dict(weights)
    if not recipe.residuals:
        for name, weight in head.named_parameters():
            if name in ("residuals", "w.weight"):  # HiViS's r^s stay at zero
                weight.requires_grad_(False)
    return head.float().to(target.device).train()


def weights_digest(head: Head) -> str:
    """Return a digest of a head's weights."""
    found = hashlib.sha256()
    for name, weight in head.state_dict().items():
        found.update(name.encode())
        found.update(weight.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def _known(begin: str | Path, target: Target, recipe: Recipe) -> Head:
    if found := trained(begin):
        head = build_head(HeadConfig.from_values(found[0], begin))
        check_fit(head.config, TargetShape.of(target))
        head.load_state_dict(found[1])
    else:
        head = load_head(begin, target, torch.float32)
    if head.kind != recipe.kind:
        raise TrainingError(
            f"The head {begin} is of the kind {head.kind}, but this recipe trains {recipe.kind}; begin with a "
            f"{recipe.kind} head, or give the recipe {head.kind}."
        )
    return head


def _agreed(begin: Any, fresh: HeadConfig, head: Head, recipe: Recipe) -> HeadConfig:
    """Return the configuration of the initial head; raise `TrainingError` if the recipe contradicts it."""
    known = head.config
    has = {"mlp": known.intermediate_size, **known.options}
    for name, value in recipe.head.items():
        if has[name] != value:
            raise TrainingError(
                f"The head {begin} has {name} {has[name]!r}, but this run asks for head.{name}={value!r}; leave it "
                "out, or begin with another head."
            )
    if fresh.steps > known.steps and head.reach is not None:
        raise TrainingError(
            f"The head {begin} has stacks for {known.steps} tokens ahead, but this run trains {fresh.steps}; set "
            f"draft_steps to {known.steps} at most, or begin with another head."
        )
    return replace(known, steps=max(known.steps, fresh.steps))


def choose_vocabulary(head: Eagle3, target: Target, source: Source) -> str:
    """Give a new head the answers' most frequent tokens, and the target's rows for them as its first LM head.

    On a vocabulary of 152,000 tokens the LM head costs a drafter of one block more than the block (EAGLE-3 as
    released). Tokens that are never drafted are still emitted where the target wants them; the draft ends there.
    """
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for answer in source.answers():
        ids = torch.tensor(answer, dtype=torch.long)
        counts += torch.bincount(ids[ids < len(counts)], minlength=len(counts))
    ids = counts.argsort(descending=True, stable=True)[: head.config.options["own_vocabulary"]].sort().values  # `[N]`
    rows = target.output_embeddings.weight[ids.to(target.device)].float() * logit_map(target).factor
    assert head.token_ids is not None
    head.token_ids.copy_(ids)
    head.lm_head.weight.data.copy_(rows)
    share = float(counts[ids].sum() / counts.sum().clamp(min=1))
    return (
        f"The head's vocabulary: the {len(ids):,} most frequent of {target.vocab_size:,} tokens, {share:.1%} of the "
        "tokens in the answers."
    )
