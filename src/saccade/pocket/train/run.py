"""The stages of a run in their order, each skipped when its file is there."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from saccade.errors import TrainingError
from saccade.pocket.train.answers import target_answers
from saccade.pocket.train.draft import train_draft, train_follower
from saccade.pocket.train.export import Provenance, export, write_folder
from saccade.pocket.train.language import train_deep, train_shallow
from saccade.pocket.train.recipe import Recipe
from saccade.pocket.train.tokens import train_tokenizer
from saccade.pocket.train.tower import train_tower
from saccade.train import folders
from saccade.train.checkpoint import differences

STAGES = ("tokenizer", "tower", "shallow", "deep", "draft", "answers", "follow", "export")
_FREE = ("checkpoint_seconds", "evaluation_samples")  # settings that no weight depends on
_SPEAKER, _GUESSER = "answering", "guessing"  # folders of the target and the draft that have no card yet


def _hold(recipe: Recipe, folder: Path) -> None:
    """Write down of which recipe the folder's stage files are, or refuse those of another one."""
    path = folder / "recipe.json"
    ours = {
        name: value for name, value in json.loads(json.dumps(asdict(recipe))).items() if name not in _FREE
    }
    if path.exists():
        for key, here, there in differences(ours, json.loads(path.read_text())):
            raise TrainingError(
                f"{folder} holds stage files of another recipe: its {key} is {there!r}, here it is {here!r}; repeat "
                "the command that began it, or give another --out folder."
            )
        return
    if (folder / "tokenizer.json").exists():
        print(
            f"{folder} does not tell of which recipe its stage files are; taken to be of this one.",
            flush=True,
        )
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(ours, indent=1) + "\n")
    part.replace(path)


def _tokenizer(recipe: Recipe, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        part = folder / "tokenizer.json.part"
        train_tokenizer(recipe).save(str(part))
        part.rename(path)
    return Tokenizer.from_file(str(path))


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'' if threads == 1 else 's'}, bfloat16 autocast"


def run(recipe: Recipe, folder: Path, until: str = STAGES[-1]) -> None:
    """Run every stage up to `until`, going on from what is in `folder`.

    Raises:
        TrainingError: the folder holds stage files of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _hold(recipe, folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    last = STAGES.index(until)
    tokenizer = _tokenizer(recipe, folder)
    if last < STAGES.index("tower"):
        return
    tower, tower_minutes = train_tower(recipe, folder, device)
    if last < STAGES.index("shallow"):
        return
    shallow, shallow_minutes = train_shallow(recipe, tokenizer, tower, folder, device)
    if last < STAGES.index("deep"):
        return
    target, deep_minutes = train_deep(recipe, tokenizer, shallow, folder)
    if last < STAGES.index("draft"):
        return
    draft, draft_minutes = train_draft(recipe, tokenizer, tower, folder, device)
    if last < STAGES.index("answers"):
        return
    folders.write_folder(folder / _SPEAKER, lambda part: write_folder(target, tokenizer, part))
    folders.write_folder(folder / _GUESSER, lambda part: write_folder(draft, tokenizer, part))
    answered = target_answers(recipe, folder / _SPEAKER, folder / _GUESSER, folder)
    if last < STAGES.index("follow"):
        return
    follow_minutes = train_follower(recipe, tokenizer, draft, answered, folder)
    if last < STAGES.index("export"):
        return
    hardware = _hardware(device)
    how = (
        f"on the target's tower, frozen: {draft_minutes:.0f} min on ground truth, then {follow_minutes:.0f} min "
        f"with half of the batches from {len(answered)} answers of the target (half greedy, half at temperature "
        "1); every third batch without its pictures; no five-picture stories."
    )
    export(draft, tokenizer, folder / "draft", recipe, Provenance("Pocket draft", how, hardware))
    how = (
        f"tower on per-patch labels {tower_minutes:.0f} min; {recipe.shallow_layers} layers on the frozen tower "
        f"{shallow_minutes:.0f} min; grown to {recipe.target.layers} layers and trained on as a whole "
        f"{deep_minutes:.0f} min."
    )
    export(
        target,
        tokenizer,
        folder / "target",
        recipe,
        Provenance("Pocket target", how, hardware),
        folder / "draft",
    )
