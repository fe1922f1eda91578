"""The stages of a run in their order, each skipped when its file is there."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from saccade import files
from saccade.errors import TrainingError
from saccade.formats import differences
from saccade.train import precision
from tools.pocket.answers import target_answers
from tools.pocket.beginnings import LEARNT_BEFORE, from_nothing, from_pair, pair_digest
from tools.pocket.draft import train_draft, train_follower
from tools.pocket.export import Provenance, export, write_folder
from tools.pocket.mixtures import SINGLE_PICTURES
from tools.pocket.models import PocketModel
from tools.pocket.recipe import Recipe
from tools.pocket.tokens import train_tokenizer

STAGES = (
    "tokenizer",
    "tower",
    "shallow",
    "deep",
    "compare",
    "refine",
    "draft",
    "answers",
    "follow",
    "export",
)
SINGLE_STAGES = ("tokenizer", "draft", "answers", "follow", "export")
"""Those of a second draft for a pair's target (`run_single`)."""
_FREE = ("checkpoint_seconds", "evaluation_samples", "evaluation_tasks")  # settings that no weight depends on
_SPEAKER, _GUESSER = "answering", "guessing"  # folders of the target and the draft that have no card yet


def _hold(recipe: Recipe, folder: Path, start: str | None) -> None:
    """Write down of which recipe and earlier pair the folder's stage files are, or refuse those of another one."""
    path = folder / "recipe.json"
    ours = {
        name: value for name, value in json.loads(json.dumps(asdict(recipe))).items() if name not in _FREE
    }
    if start is not None:
        ours["from"] = start
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


def _tokenizer(recipe: Recipe, folder: Path, pair: Path | None) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        part = folder / "tokenizer.json.part"
        if pair is None:
            train_tokenizer(recipe).save(str(part))
        else:
            shutil.copyfile(pair / "target" / "tokenizer.json", part)
        part.rename(path)
    return Tokenizer.from_file(str(path))


def run(recipe: Recipe, folder: Path, until: str = STAGES[-1], pair: Path | None = None) -> None:
    """Run every stage up to `until`, going on from what is in `folder`.

    Args:
        pair: the folder of a finished pair whose target is trained on, in place of one from nothing.

    Raises:
        TrainingError: the folder holds stage files of another recipe or another pair, or `pair` holds none or
            brings the stage `until` along.
    """
    if pair is not None and until in LEARNT_BEFORE:
        left = ", ".join(stage for stage in STAGES if stage not in LEARNT_BEFORE)
        raise TrainingError(f"A run from a pair has no stage {until!r}; choose from {left}.")
    start = None if pair is None else pair_digest(pair)
    folder.mkdir(parents=True, exist_ok=True)
    _hold(recipe, folder, start)
    if start is not None:
        recipe = replace(recipe, seed=int(start, 16))  # not the samples that the pair has seen
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = precision.told(device)
    tokenizer = _tokenizer(recipe, folder, pair)
    if until == "tokenizer":
        return
    print(f"[train] on {hardware}", flush=True)
    if pair is None:
        begun = from_nothing(recipe, tokenizer, folder, device, until)
    else:
        begun = from_pair(recipe, tokenizer, folder, pair, device, until)
    if begun is None:
        return
    target, draft = begun.target, begun.draft
    files.write_folder(folder / _SPEAKER, lambda part: write_folder(target, tokenizer, part))
    files.write_folder(folder / _GUESSER, lambda part: write_folder(draft, tokenizer, part))
    answered = target_answers(recipe, folder / _SPEAKER, folder / _GUESSER, folder)
    if until == "answers":
        return
    minutes = train_follower(recipe, tokenizer, draft, answered, folder)
    if until == "follow":
        return
    how = (
        f"{begun.draft_story}; then {minutes:.0f} min with half of the batches from {len(answered)} answers of the "
        "target (half greedy, half at temperature 1)."
    )
    export(draft, tokenizer, folder / "draft", recipe, Provenance("Pocket draft", how, hardware))
    how = f"{begun.target_story}."
    provenance = Provenance("Pocket target", how, hardware)
    export(target, tokenizer, folder / "target", recipe, provenance, folder / "draft")


def run_single(recipe: Recipe, folder: Path, pair: Path, until: str = STAGES[-1]) -> None:
    """Train a second draft for the target of a pair: one from nothing that sees no video and no several pictures, ever.

    Prompts of five pictures are then out of its range, as they are for drafters trained on single pictures alone
    (TABED, section 4). It ends up in `folder / "draft"`; the target stays as it is.

    Raises:
        TrainingError: the folder holds stage files of another recipe or pair, or there is no such stage.
    """
    if until not in SINGLE_STAGES:
        raise TrainingError(
            f"A draft of single pictures has no stage {until!r}; choose from {', '.join(SINGLE_STAGES)}."
        )
    digest = pair_digest(pair)
    folder.mkdir(parents=True, exist_ok=True)
    _hold(recipe, folder, f"single pictures, {digest}")
    recipe = replace(recipe, seed=int(digest, 16))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = precision.told(device)
    tokenizer = _tokenizer(recipe, folder, pair)
    if until == "tokenizer":
        return
    print(f"[train] on {hardware}", flush=True)
    tower = PocketModel.from_pretrained(pair / "target", dtype=torch.float32).model.vision_tower.state_dict()
    draft, first = train_draft(recipe, tokenizer, tower, folder, device, SINGLE_PICTURES)
    if until == "draft":
        return
    answered = target_answers(recipe, pair / "target", pair / "draft", folder, SINGLE_PICTURES)
    if until == "answers":
        return
    then = train_follower(recipe, tokenizer, draft, answered, folder, SINGLE_PICTURES)
    if until == "follow":
        return
    how = (
        f"on the target's tower, frozen, and on single pictures alone: {first:.0f} min on ground truth, every third "
        f"batch without its pictures; then {then:.0f} min with half of the batches from {len(answered)} answers of "
        "the target (half greedy, half at temperature 1)."
    )
    provenance = Provenance("Pocket draft of single pictures", how, hardware)
    export(draft, tokenizer, folder / "draft", recipe, provenance)
