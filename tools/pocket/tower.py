"""Stage 2: the vision tower learns to name what is in every patch, which stands in for CLIP pre-training."""

from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from transformers import CLIPVisionModel

from saccade.pocket.labels import LABEL_CLASSES
from saccade.train.precision import fast_products
from tools.pocket.batches import labelled_samples, labels, pixels
from tools.pocket.loop import train
from tools.pocket.models import tower_config
from tools.pocket.recipe import Recipe


class PatchNamer(nn.Module):
    """A tower with one linear classifier per kind of label on its last hidden state."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.tower = CLIPVisionModel(tower_config(recipe.tower))
        self.norm = nn.LayerNorm(recipe.tower.width, elementwise_affine=False)
        self.head = nn.Linear(recipe.tower.width, sum(LABEL_CLASSES.values()))

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """Logits per kind of label, `[B, 64, classes]` each."""
        seen = self.tower(pixel_values=pictures, output_hidden_states=True).hidden_states[-1][:, 1:]
        return torch.split(self.head(self.norm(seen)), list(LABEL_CLASSES.values()), dim=-1)


def _batch(seed: int, count: int, number: int) -> tuple[Tensor, Tensor]:
    samples = labelled_samples(Random(f"tower/{seed}/{number}"), count)
    return pixels([sample.image for sample in samples]), labels(samples)


def train_tower(recipe: Recipe, folder: Path, device: torch.device) -> tuple[dict[str, Tensor], float]:
    """The trained tower's weights, and the minutes that it took."""
    torch.manual_seed(recipe.seed)
    model = PatchNamer(recipe).to(device)
    kept: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, truth = batch[0].to(device), batch[1].to(device)
        with fast_products(device):
            logits = model(pictures)
        kept[:] = [(truth, tuple(part.detach() for part in logits))]
        losses = [
            nn.functional.cross_entropy(part.float().flatten(0, 1), truth[..., kind].flatten())
            for kind, part in enumerate(logits)
        ]
        return torch.stack(losses).sum()

    def check() -> str:
        truth, logits = kept[0]
        words = []
        for kind, (name, part) in enumerate(zip(LABEL_CLASSES, logits, strict=True)):
            there = truth[..., kind] > 0
            right = (part.argmax(-1) == truth[..., kind])[there].float().mean().item()
            words.append(f"{name} {right:.2f}")
        return "named rightly where something is: " + ", ".join(words)

    schedule, pause = recipe.tower_schedule, recipe.checkpoint_seconds
    make = partial(_batch, recipe.seed, schedule.batch)
    minutes = train("tower", model, make, loss_of, schedule, folder, pause, check)
    return {name: weight.cpu() for name, weight in model.tower.state_dict().items()}, minutes
