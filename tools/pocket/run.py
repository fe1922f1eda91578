"""Stages of a run in order, each skipped when its file exists."""

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from saccade.errors import TrainingError
from saccade.files import write_file, write_folder
from saccade.formats import differences
from saccade.train import precision
from tools.pocket.draft import target_answers, train_draft, train_follower
from tools.pocket.export import Provenance, export, write_checkpoint
from tools.pocket.language import train_comparing, train_deep, train_refined, train_shallow
from tools.pocket.models import CONTEXT, PocketModel
from tools.pocket.recipe import Recipe
from tools.pocket.tokens import train_tokenizer
from tools.pocket.tower import train_tower

STAGES = (
    *("tokenizer", "tower", "shallow", "deep", "compare"),
    *("refine", "draft", "answers", "follow", "export"),
)
SINGLE_STAGES = ("tokenizer", "draft", "answers", "follow", "export")
"""Stages of a second draft for a pair's target (`run_single`)."""
PAIR_STAGES = ("tower", "shallow", "deep", "compare", "draft")
"""Stages whose result an earlier pair provides."""
_MODELS = ("target", "draft")
_FREE = ("checkpoint_seconds", "evaluation_samples", "evaluation_tasks")  # settings that no weight depends on
_TARGET, _DRAFT = "answering", "guessing"  # folders of target and draft before they have cards
_TRAINING = re.compile(r"^- Training: (.*?)\.?$", re.MULTILINE)


@dataclass(frozen=True)
class Beginning:
    """Target and draft, trained independently of each other; each story is a sentence without its full stop."""

    target: PocketModel
    target_story: str
    draft: PocketModel
    draft_story: str


def from_scratch(
    recipe: Recipe, tokenizer: Tokenizer, folder: Path, device: torch.device, until: str
) -> Beginning | None:
    """Run the stages from tower to draft; None if `until` is one of them."""
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
    """Train the target of an earlier pair further, and take its draft unchanged; None if `until` is "refine"."""
    target, draft = (PocketModel.from_pretrained(pair / name, dtype=torch.float32) for name in _MODELS)
    for model in (target, draft):  # rotary positions have no weights, so only the configuration changes
        model.config.text_config.max_position_embeddings = CONTEXT
    target.to(device)
    minutes = train_refined(recipe, tokenizer, target, folder)
    if until == "refine":
        return None
    before, draft_before = (_training_of(pair / name) for name in _MODELS)
    story = f"{before}; from those bfloat16 weights {_refined(minutes)}"
    return Beginning(target, story, draft.to(device), draft_before)


def _refined(minutes: float) -> str:
    return f"{minutes:.0f} min with larger shares of the tasks that are hard, with lessons in where to look"


def _training_of(model: Path) -> str:
    """Sentence on training in a model's card."""
    card = model / "README.md"
    found = _TRAINING.search(card.read_text()) if card.exists() else None
    return found[1] if found else "an earlier model without a card"


def pair_digest(pair: Path) -> str:
    """Return a digest of both models' weights, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in _MODELS:
        weights = pair / name / "model.safetensors"
        if not weights.exists():
            raise TrainingError(
                f"{pair} holds no pair to train on: there is no {name}/model.safetensors in it; give a folder that "
                "`python -m tools.pocket train` finished, or `pocket` for the built-in pair."
            )
        digest.update(weights.read_bytes())
    return digest.hexdigest()[:16]


def _check_recipe(recipe: Recipe, folder: Path, start: str | None) -> None:
    """Record the recipe and earlier pair of a folder's stage files, or refuse those of another."""
    path = folder / "recipe.json"
    ours = {name: value for name, value in json.loads(json.dumps(asdict(recipe))).items() if name not in _FREE}
    if start is not None:
        ours["from"] = start
    if path.exists():
        for key, here, there in differences(ours, json.loads(path.read_text())):
            raise TrainingError(
                f"{folder} has stage files of another recipe: its {key} is {there!r}, here it is {here!r}; repeat "
                "the command that began it, or give another --out folder."
            )
        return
    if (folder / "tokenizer.json").exists():
        print(f"{folder} has stage files but no recipe.json; they are taken to be of this recipe.", flush=True)
    write_file(path, json.dumps(ours, indent=1) + "\n", error=TrainingError)


def _tokenizer(recipe: Recipe, folder: Path, pair: Path | None) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        if pair is None:
            write_file(path, lambda part: train_tokenizer(recipe).save(str(part)), error=TrainingError)
        else:
            earlier = pair / "target" / "tokenizer.json"
            write_file(path, lambda part: shutil.copyfile(earlier, part), error=TrainingError)
    return Tokenizer.from_file(str(path))


def _begin(recipe: Recipe, folder: Path, pair: Path | None, start: str | None) -> tuple[Recipe, Tokenizer]:
    """Check the folder, and return the recipe with the seed of the run, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_recipe(recipe, folder, start)
    if start is not None:
        recipe = replace(recipe, seed=int(start[-16:], 16))  # other samples than those that the pair was trained on
    return recipe, _tokenizer(recipe, folder, pair)


def _hardware() -> tuple[torch.device, str]:
    """Device of the run, and its description for cards."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = precision.description(device)
    print(f"[train] on {hardware}", flush=True)
    return device, hardware


def run(recipe: Recipe, folder: Path, until: str = STAGES[-1], pair: Path | None = None) -> None:
    """Run every stage up to `until`, resuming from what is in `folder`."""
    if pair is not None and until in PAIR_STAGES:
        left = ", ".join(stage for stage in STAGES if stage not in PAIR_STAGES)
        raise TrainingError(f"A run from a pair has no stage {until!r}; choose from {left}.")
    recipe, tokenizer = _begin(recipe, folder, pair, None if pair is None else pair_digest(pair))
    if until == "tokenizer":
        return
    device, hardware = _hardware()
    if pair is None:
        begun = from_scratch(recipe, tokenizer, folder, device, until)
    else:
        begun = from_pair(recipe, tokenizer, folder, pair, device, until)
    if begun is None:
        return
    target, draft = begun.target, begun.draft
    write_folder(folder / _TARGET, lambda part: write_checkpoint(target, tokenizer, part))
    write_folder(folder / _DRAFT, lambda part: write_checkpoint(draft, tokenizer, part))
    answered = target_answers(recipe, folder / _TARGET, folder / _DRAFT, folder)
    if until == "answers":
        return
    minutes = train_follower(recipe, tokenizer, draft, answered, folder)
    if until == "follow":
        return
    how = f"{begun.draft_story}; then {_followed(minutes, len(answered))}"
    export(draft, tokenizer, folder / "draft", recipe, Provenance("Pocket draft", how, hardware))
    provenance = Provenance("Pocket target", f"{begun.target_story}.", hardware)
    export(target, tokenizer, folder / "target", recipe, provenance, folder / "draft")


def _followed(minutes: float, answers: int) -> str:
    return (
        f"{minutes:.0f} min with half of the batches from {answers} answers of the target (half greedy, half at "
        "temperature 1)."
    )


def run_single(recipe: Recipe, folder: Path, pair: Path, until: str = STAGES[-1]) -> None:
    """Train a second draft for the target of a pair, from scratch, that sees single pictures alone.

    Of tasks with several pictures or videos it learns the language without them: as in TABED, section 4, a language
    model that knows many texts learns to see from single pictures, and five of them are out of its distribution.
    It is written to `folder / "draft"`; the target does not change.
    """
    if until not in SINGLE_STAGES:
        raise TrainingError(
            f"A draft of single pictures has no stage {until!r}; choose from {', '.join(SINGLE_STAGES)}."
        )
    recipe, tokenizer = _begin(recipe, folder, pair, f"single pictures, {pair_digest(pair)}")
    if until == "tokenizer":
        return
    device, hardware = _hardware()
    tower = PocketModel.from_pretrained(pair / "target", dtype=torch.float32).model.vision_tower.state_dict()
    draft, first = train_draft(recipe, tokenizer, tower, folder, device, single=True)
    if until == "draft":
        return
    answered = target_answers(recipe, pair / "target", pair / "draft", folder, single=True)
    if until == "answers":
        return
    then = train_follower(recipe, tokenizer, draft, answered, folder, single=True)
    if until == "follow":
        return
    how = (
        f"on the target's tower, frozen, tasks of several pictures and videos without them: {first:.0f} min on ground "
        f"truth, every third batch of single pictures without them, too; then {_followed(then, len(answered))}"
    )
    provenance = Provenance("Pocket draft of single pictures", how, hardware)
    export(draft, tokenizer, folder / "draft", recipe, provenance)
