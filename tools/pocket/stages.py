"""Stages of a run in order, each skipped when its file exists.

Stages 1 to 6 make the target: a tokenizer, a tower, a shallow model that is trained to read pictures, grown, and
trained to compare and on all that is hard. Stages 7 to 9 train the draft, on the target's tower, on ground truth and
then on the target's own answers; the last one writes both with their cards.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

import saccade
from saccade.errors import TrainingError
from saccade.files import write_file, write_folder
from saccade.pocket import Sample, draw
from saccade.train.optimiser import description
from saccade.wording import differences
from tools.pocket.accuracy import answer, export, write_checkpoint
from tools.pocket.batches import (
    FIRST_TRAINING_SEED,
    SPECIAL_TOKENS,
    Batch,
    batch_of,
    length_of,
    neighbours,
    sorted_batch,
    thinned,
)
from tools.pocket.lessons import Lessons, drills, with_lessons
from tools.pocket.loop import save, train
from tools.pocket.models import CONTEXT, PocketModel, build, grow, prepare, training_loss
from tools.pocket.recipe import SHARES, Recipe, Schedule, drafting
from tools.pocket.tokens import content_weights, decisive_weights, train_tokenizer
from tools.pocket.tower import align_projector, train_tower

STAGES = ("tokenizer", "tower", "shallow", "deep", "compare", "refine", "draft", "answers", "follow", "export")
PAIR_STAGES = ("tokenizer", "refine", "answers", "follow", "export")
"""Stages of a run from an earlier pair, which provides the results of the others."""
_MODELS = ("target", "draft")
_FREE = ("checkpoint_seconds", "evaluation_samples", "evaluation_tasks")  # settings that no weight depends on
_TRAINING = re.compile(r"^- Training: (.*?)\.?$", re.MULTILINE)
_LESSONS = "lessons"
_CHUNK = 128  # answers between two saves
_BLIND_EVERY = 3  # every third batch of a draft has no media, so that it also works without


# -- batches ---------------------------------------------------------------------------------------------------


def true_answers(
    tokenizer: Tokenizer, samples: list[Sample], media: bool = True, tiled: bool = True, decisive: float = 1.0
) -> Batch:
    """Samples with their true answers as a batch; `decisive` is the loss weight of decisive words."""
    weights = [decisive_weights(tokenizer, sample, decisive) for sample in samples] if decisive != 1 else None
    answers = [tokenizer.encode(sample.answer).ids for sample in samples]
    return batch_of(tokenizer, samples, answers, media, tiled, weights)


@dataclass(frozen=True)
class Answered:
    """Arguments of a sample's `draw`, and the target's answer as token ids."""

    seed: int
    task: str
    grammar: str
    ids: list[int]

    def sample(self) -> Sample:
        return draw(self.seed, self.task, self.grammar)


@dataclass(frozen=True)
class TargetBatches:
    """Batches of a stage of the target by number, in worker processes as well."""

    name: str
    seed: int
    schedule: Schedule
    tokenizer: Tokenizer
    shares: Mapping[str, float] | None = None

    def __call__(self, number: int) -> Batch:
        rng, schedule = Random(f"{self.name}/{self.seed}/{number}"), self.schedule
        if schedule.drill and rng.random() < schedule.drill:
            samples = drills(rng, schedule.batch)
        else:
            samples = sorted_batch(rng, schedule.batch, schedule.verbose, self.shares)
        tiled = schedule.tiled_at(number)
        batch = true_answers(self.tokenizer, samples, tiled=tiled, decisive=schedule.decisive)
        return with_lessons(batch, samples) if any(schedule.lessons) else batch


@dataclass(frozen=True)
class DraftBatches:
    """Batches of a stage of the draft by number; with answers, every second group of batches has those."""

    name: str
    seed: int
    schedule: Schedule
    tokenizer: Tokenizer
    answered: Sequence[Answered] | None = None

    def __call__(self, number: int) -> Batch:
        schedule, source = self.schedule, f"{self.name}/{self.seed}/{number}"
        if self.answered is None or number // _BLIND_EVERY % 2 == 0:
            samples = sorted_batch(Random(source), schedule.batch, schedule.verbose, drafting())
            media = has_media(number, samples)
            return true_answers(self.tokenizer, samples, media, schedule.tiled_at(number))
        rows, rng = neighbours(Random(source), self.answered, schedule.batch), Random(f"thinned/{self.seed}/{number}")
        samples = [thinned(rng, row.sample()) for row in rows]
        return batch_of(self.tokenizer, samples, [row.ids for row in rows], has_media(number, samples))


def has_media(number: int, samples: Sequence[Sample]) -> bool:
    """Whether a batch has media; one mostly of several pictures never has, as for the drafters of the papers."""
    blind = sum(len(sample.images) > 1 for sample in samples) > len(samples) / 2
    return not blind and number % _BLIND_EVERY != 0


# -- a run -----------------------------------------------------------------------------------------------------


class Run:
    """Recipe, tokenizer, folder and device of a run, and its stages; `pair` as in `run`.

    `stages` yields the name of every stage that is complete.
    """

    def __init__(self, recipe: Recipe, folder: Path, pair: Path | None = None) -> None:
        self.folder, self.pair = folder, pair
        start = None if pair is None else pair_digest(pair)
        folder.mkdir(parents=True, exist_ok=True)
        self._check(recipe, start)
        if start is not None:
            recipe = replace(recipe, seed=int(start, 16))  # other samples than those that the pair was trained on
        self.recipe = recipe
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _check(self, recipe: Recipe, start: str | None) -> None:
        """Record the recipe and earlier pair of a folder's stage files, or refuse those of another."""
        path = self.folder / "recipe.json"
        ours = {name: value for name, value in json.loads(json.dumps(asdict(recipe))).items() if name not in _FREE}
        if start is not None:
            ours["from"] = start
        if path.exists():
            for key, here, there in differences(ours, json.loads(path.read_text())):
                raise TrainingError(
                    f"{self.folder} has stage files of another recipe: its {key} is {there!r}, here it is {here!r}; "
                    "repeat the command that began it, or choose another --out folder."
                )
            return
        write_file(path, json.dumps(ours, indent=1) + "\n", error=TrainingError)

    def stages(self) -> Iterator[str]:
        """Run one stage after another."""
        path = self.folder / "tokenizer.json"
        if not path.exists():
            if self.pair is None:
                write_file(path, lambda part: train_tokenizer(self.recipe).save(str(part)), error=TrainingError)
            else:
                write_file(path, (self.pair / "target" / "tokenizer.json").read_text("utf-8"), error=TrainingError)
        self.tokenizer = Tokenizer.from_file(str(path))
        yield "tokenizer"
        self.hardware = description(self.device)
        print(f"[train] on {self.hardware}", flush=True)
        yield from self._from_scratch() if self.pair is None else self._from_pair(self.pair)
        first = {"target": self.folder / "answering", "draft": self.folder / "guessing"}  # before they have cards
        for model, folder in zip((self.target, self.draft), first.values(), strict=True):
            write_folder(folder, partial(write_checkpoint, model, self.tokenizer))
        yield from self._follow(first["target"], first["draft"])
        self._export(self.draft, "draft", "Pocket draft", self.draft_story)
        self._export(self.target, "target", "Pocket target", f"{self.target_story}.", self.folder / "draft")
        yield "export"

    def _from_scratch(self) -> Iterator[str]:
        recipe, minutes = self.recipe, dict[str, float]()
        tower, minutes["tower"] = train_tower(recipe, self.folder, self.device)
        yield "tower"
        torch.manual_seed(recipe.seed)
        self.target = build(replace(recipe.target, layers=recipe.shallow_layers), recipe.tower, self._vocabulary)
        self.target.model.vision_tower.load_state_dict(tower)
        align_projector(self.target, self.tokenizer, recipe.seed)
        self.target.to(self.device)
        minutes["shallow"] = self._train_target("shallow")
        yield "shallow"
        self.target = grow(self.target, recipe.target.layers)
        minutes["deep"] = self._train_target("deep")
        yield "deep"
        minutes["compare"] = self._train_target("compare")
        yield "compare"
        minutes["refine"] = self._train_target("refine")
        yield "refine"
        draft_minutes = self._train_draft(tower)
        yield "draft"
        self.target_story = (
            f"tower on per-patch labels {minutes['tower']:.0f} min; {recipe.shallow_layers} layers on the frozen tower "
            f"{minutes['shallow']:.0f} min; grown to {recipe.target.layers} layers and trained on as a whole "
            f"{minutes['deep']:.0f} min; {minutes['compare']:.0f} min of comparing, with lessons in where to look; "
            f"{_refined(minutes['refine'])}"
        )
        self.draft_story = (
            f"on the target's tower, frozen: {draft_minutes:.0f} min on ground truth, every third batch without its "
            "pictures, and all that are mostly of several; no five-picture stories"
        )

    def _from_pair(self, pair: Path) -> Iterator[str]:
        """Train the target of an earlier pair further, and take its draft unchanged."""
        self.target, self.draft = (PocketModel.from_pretrained(pair / name, dtype=torch.float32) for name in _MODELS)
        for model in (self.target, self.draft):  # rotary positions have no weights: only the configuration changes
            model.config.text_config.max_position_embeddings = CONTEXT
            model.to(self.device)
        minutes = self._train_target("refine")
        yield "refine"
        cards = [pair / name / "README.md" for name in _MODELS]
        lines = [_TRAINING.search(card.read_text()) if card.exists() else None for card in cards]
        before, self.draft_story = (line[1] if line else "an earlier model without a card" for line in lines)
        self.target_story = f"{before}; from those bfloat16 weights {_refined(minutes)}"

    @property
    def _vocabulary(self) -> int:
        """Vocabulary size of the models: the tokenizer's, rounded up to a multiple of 64."""
        return int(-(-self.tokenizer.get_vocab_size() // 64) * 64)

    def _train(
        self, name: str, model: PocketModel, make: Callable[[int], Batch], lesson: Lessons | None = None
    ) -> float:
        """Train a model through a stage, its tower frozen; return the minutes of training."""
        schedule = self.recipe.schedules[name]
        weights = content_weights(self.tokenizer, self._vocabulary, schedule.content).to(model.device)
        weighted = partial(training_loss, prepare(model), token_weights=weights, lesson=lesson)
        return train(name, model, make, weighted, schedule, self.folder, self.recipe.checkpoint_seconds)

    def _train_target(self, name: str) -> float:
        """Train the target through a stage; return the minutes of training."""
        model, schedule = self.target, self.recipe.schedules[name]
        make = TargetBatches(name, self.recipe.seed, schedule, self.tokenizer, SHARES.get(name))
        if not any(schedule.lessons):
            return self._train(name, model, make)
        lessons = Lessons(model.config.text_config.hidden_size, *schedule.lessons).to(model.device)
        model.add_module(_LESSONS, lessons)  # trained and saved in checkpoints like the rest, until the stage ends
        try:
            return self._train(name, model, make, lessons)
        finally:
            delattr(model, _LESSONS)

    def _train_draft(self, tower: dict[str, Tensor]) -> float:
        """Train a draft on ground truth in a mixture of tasks; return the minutes of training."""
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        self.draft = build(recipe.draft, recipe.tower, self._vocabulary).to(self.device)
        self.draft.model.vision_tower.load_state_dict(tower)
        align_projector(self.draft, self.tokenizer, recipe.seed)
        make = DraftBatches("draft", recipe.seed, recipe.schedules["draft"], self.tokenizer)
        return self._train("draft", self.draft, make)

    def _answers(self, target: Path, drafter: Path) -> list[Answered]:
        """Answers of the target to fresh samples, half greedy, half at temperature 1; resumes from `answers.pt`."""
        recipe, path, rng = self.recipe, self.folder / "answers.pt", Random(f"answers/{self.recipe.seed}")
        shares = drafting()
        plan: list[tuple[int, str, str, float]] = []
        for temperature in (0.0, 1.0):
            for task in rng.choices(list(shares), list(shares.values()), k=recipe.answers // 2):
                grammar = "verbose" if rng.random() < recipe.schedules["draft"].verbose else "dense"
                plan.append((rng.randrange(FIRST_TRAINING_SEED, 2**48), task, grammar, temperature))
        rows: list[tuple[int, str, str, list[int]]] = torch.load(path) if path.exists() else []
        if len(rows) < len(plan):
            place = "cuda" if torch.cuda.is_available() else None
            vlm = saccade.load(target, drafter, method="chain", device_map=place)
        while len(rows) < len(plan):
            temperature = plan[len(rows)][3]
            chunk = [row for row in plan[len(rows) : len(rows) + _CHUNK] if row[3] == temperature]
            samples = [draw(seed, task, grammar) for seed, task, grammar, _ in chunk]
            first = recipe.seed % 2**62 + len(rows)  # the engine takes 63 bits
            answers = answer(vlm, samples, temperature=temperature, seed=first)
            # After few training steps, special tokens occur at temperature 1; as input they would be pictures.
            plain = [[token for token in ids if token >= len(SPECIAL_TOKENS)] for ids in answers]
            rows += [(*row[:3], ids) for row, ids in zip(chunk, plain, strict=True)]
            save(rows, path)
            print(f"[answers] {len(rows)} of {len(plan)}", flush=True)
        return [Answered(*row) for row in rows]

    def _follow(self, target: Path, drafter: Path) -> Iterator[str]:
        """Train the draft further, half of it on answers of the target."""
        answered = self._answers(target, drafter)
        yield "answers"
        recipe, order = self.recipe, sorted(answered, key=lambda row: length_of(row.sample()))
        make = DraftBatches("follow", recipe.seed, recipe.schedules["follow"], self.tokenizer, order)
        minutes = self._train("follow", self.draft, make)
        yield "follow"
        self.draft_story += (
            f"; then {minutes:.0f} min with half of the batches from {len(answered)} answers of the target (half "
            "greedy, half at temperature 1)."
        )

    def _export(self, model: PocketModel, name: str, title: str, story: str, drafter: Path | None = None) -> None:
        words = {"title": title, "training": story, "hardware": self.hardware}
        export(model, self.tokenizer, self.folder / name, self.recipe, **words, drafter=drafter)


def _refined(minutes: float) -> str:
    return f"{minutes:.0f} min with larger shares of the tasks that are hard, with lessons in where to look"


def pair_digest(pair: Path) -> str:
    """Return a digest of both models' weights, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in _MODELS:
        weights = pair / name / "model.safetensors"
        if not weights.exists():
            raise TrainingError(
                f"{pair} holds no pair to train on: there is no {name}/model.safetensors in it; name a folder that "
                "`python -m tools.pocket train` finished, or `pocket` for the built-in pair."
            )
        digest.update(weights.read_bytes())
    return digest.hexdigest()[:16]


def run(recipe: Recipe, folder: Path, until: str = STAGES[-1], pair: Path | None = None) -> None:
    """Run every stage up to `until`, resuming from what is in `folder`; from a pair, both its models go on training."""
    if pair is not None and until not in PAIR_STAGES:
        raise TrainingError(f"A run from a pair has no stage {until!r}; choose from {', '.join(PAIR_STAGES)}.")
    for stage in Run(recipe, folder, pair).stages():
        if stage == until:
            return
