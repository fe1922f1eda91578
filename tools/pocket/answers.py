"""Stage 5: what the target itself says about fresh pictures, for the draft to learn from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

import saccade
from saccade.pocket.evaluate import answer
from saccade.pocket.sample import Sample, draw
from tools.pocket.batches import FIRST_TRAINING_SEED
from tools.pocket.chat import SPECIAL_TOKENS
from tools.pocket.files import save
from tools.pocket.mixtures import DRAFTING
from tools.pocket.recipe import Recipe

_CHUNK = 128


@dataclass(frozen=True)
class Answered:
    """A sample, by the arguments of its `draw`, with the target's answer as token ids."""

    seed: int
    task: str
    grammar: str
    ids: list[int]

    def sample(self) -> Sample:
        """The sample, drawn again."""
        return draw(self.seed, self.task, self.grammar)


def _plan(recipe: Recipe, shares: Mapping[str, float]) -> list[tuple[int, str, str, float]]:
    """(seed, task, grammar, temperature) of every answer: half greedy, half at temperature 1."""
    rng = Random(f"answers/{recipe.seed}")
    plan = []
    for temperature in (0.0, 1.0):
        for task in rng.choices(list(shares), list(shares.values()), k=recipe.answers // 2):
            grammar = "verbose" if rng.random() < recipe.draft_schedule.verbose else "dense"
            plan.append((rng.randrange(FIRST_TRAINING_SEED, 2**48), task, grammar, temperature))
    return plan


def target_answers(
    recipe: Recipe, target: Path, drafter: Path, folder: Path, shares: Mapping[str, float] = DRAFTING
) -> list[Answered]:
    """What the target says, with a drafter to say it sooner; on from the file that an earlier run left."""
    path = folder / "answers.pt"
    plan = _plan(recipe, shares)
    rows: list[tuple[int, str, str, list[int]]] = torch.load(path) if path.exists() else []
    if len(rows) < len(plan):
        place = "cuda" if torch.cuda.is_available() else None
        vlm = saccade.load(target, drafter, method="chain", device_map=place)
        while len(rows) < len(plan):
            temperature = plan[len(rows)][3]
            chunk = [row for row in plan[len(rows) : len(rows) + _CHUNK] if row[3] == temperature]
            samples = [draw(seed, task, grammar) for seed, task, grammar, _ in chunk]
            first = recipe.seed % 2**62 + len(rows)  # the engine takes 63 bits
            told = answer(vlm, samples, temperature=temperature, seed=first)
            # A target of few steps may say special tokens at temperature 1: they would stand for pictures.
            plain = [[token for token in ids if token >= len(SPECIAL_TOKENS)] for ids in told]
            rows += [(*row[:3], ids) for row, ids in zip(chunk, plain, strict=True)]
            save(rows, path)
            print(f"[answers] {len(rows)} of {len(plan)}", flush=True)
    return [Answered(*row) for row in rows]
