"""How a target and a draft come to be that do not know of each other yet: from nothing, or from an earlier pair."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from saccade.errors import TrainingError
from tools.pocket.draft import train_draft
from tools.pocket.language import train_comparing, train_deep, train_refined, train_shallow
from tools.pocket.models import CONTEXT, PocketModel
from tools.pocket.recipe import Recipe
from tools.pocket.tower import train_tower

LEARNT_BEFORE = ("tower", "shallow", "deep", "compare", "draft")
"""Stages whose outcome an earlier pair brings along."""
_TOLD = re.compile(r"^- Training: (.*?)\.?$", re.MULTILINE)


@dataclass(frozen=True)
class Beginning:
    """Target and draft, each with a sentence, without its full stop, on how it was trained."""

    target: PocketModel
    target_story: str
    draft: PocketModel
    draft_story: str


def from_nothing(
    recipe: Recipe, tokenizer: Tokenizer, folder: Path, device: torch.device, until: str
) -> Beginning | None:
    """The stages from tower to draft; None where `until` is among them."""
    tower, tower_minutes = train_tower(recipe, folder, device)
    if until == "tower":
        return None
    shallow, shallow_minutes = train_shallow(recipe, tokenizer, tower, folder, device)
    if until == "shallow":
        return None
    target, deep_minutes = train_deep(recipe, tokenizer, shallow, folder)
    if until == "deep":
        return None
    compare_minutes = train_comparing(recipe, tokenizer, target, folder)
    if until == "compare":
        return None
    minutes = train_refined(recipe, tokenizer, target, folder)
    if until == "refine":
        return None
    draft, draft_minutes = train_draft(recipe, tokenizer, tower, folder, device)
    if until == "draft":
        return None
    return Beginning(
        target,
        f"tower on per-patch labels {tower_minutes:.0f} min; {recipe.shallow_layers} layers on the frozen tower "
        f"{shallow_minutes:.0f} min; grown to {recipe.target.layers} layers and trained on as a whole "
        f"{deep_minutes:.0f} min; {compare_minutes:.0f} min of comparing, with lessons in where to look; "
        f"{_refined(minutes)}",
        draft,
        f"on the target's tower, frozen: {draft_minutes:.0f} min on ground truth, every third batch without its "
        "pictures, and all that are mostly of several; no five-picture stories",
    )


def from_pair(
    recipe: Recipe, tokenizer: Tokenizer, folder: Path, pair: Path, device: torch.device, until: str
) -> Beginning | None:
    """The target of an earlier pair, trained on, and its draft as it is; None where `until` is that stage."""
    target, draft = (PocketModel.from_pretrained(pair / name, dtype=torch.float32) for name in _NAMES)
    for model in (target, draft):  # rotary positions have no weights: only what the folder says of them grows
        model.config.text_config.max_position_embeddings = CONTEXT
    target.to(device)
    minutes = train_refined(recipe, tokenizer, target, folder)
    if until == "refine":
        return None
    before, draft_before = (_told(pair / name) for name in _NAMES)
    story = f"{before}; from those bfloat16 weights {_refined(minutes)}"
    return Beginning(target, story, draft.to(device), draft_before)


_NAMES = ("target", "draft")


def _refined(minutes: float) -> str:
    return f"{minutes:.0f} min with larger shares of the tasks that are hard, with lessons in where to look"


def _told(model: Path) -> str:
    """What a model's card says of its training."""
    card = model / "README.md"
    found = _TOLD.search(card.read_text()) if card.exists() else None
    return found[1] if found else "an earlier model of which no card tells"


def pair_digest(pair: Path) -> str:
    """What tells one earlier pair from another.

    Raises:
        TrainingError: the folder holds no pair.
    """
    digest = hashlib.sha256()
    for name in _NAMES:
        weights = pair / name / "model.safetensors"
        if not weights.exists():
            raise TrainingError(
                f"{pair} holds no pair to train on: there is no {name}/model.safetensors in it; give a folder that "
                "`python -m tools.pocket train` finished, or `pocket` for the built-in pair."
            )
        digest.update(weights.read_bytes())
    return digest.hexdigest()[:16]
