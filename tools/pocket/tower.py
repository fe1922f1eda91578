"""Stage 2: the vision tower, trained to label every patch in place of CLIP pre-training, and the projector after it.

A fresh projector passes the tower's features on at fifty times the norm of a word embedding, most of it the same in
every patch, and the language model needs an hour to find the facts in them. `align_projector` therefore starts some
hidden units as detectors of the tower's labels, which point at the embedding of the label's word, and the others with
whitened features. All of it is trained further.
"""

from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import CLIPVisionModel

from saccade.pocket.labels import LABEL_WORDS
from saccade.train.optimiser import fast_products
from tools.pocket.batches import labelled_samples, labels, pixels
from tools.pocket.loop import train
from tools.pocket.models import PocketModel, tower_config
from tools.pocket.recipe import Recipe

_CLASSES = [1 + len(words) for words in LABEL_WORDS.values()]
"""Number of classes of each kind, including "nothing here"."""


class PatchClassifier(nn.Module):
    """A tower with one linear classifier per kind of label on its last hidden state."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.tower = CLIPVisionModel(tower_config(recipe.tower))
        self.norm = nn.LayerNorm(recipe.tower.width, elementwise_affine=False)
        self.head = nn.Linear(recipe.tower.width, sum(_CLASSES))

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """Logits per kind of label, `[B, 64, classes]` each."""
        seen = self.tower(pixel_values=pictures, output_hidden_states=True).hidden_states[-1][:, 1:]
        return torch.split(self.head(self.norm(seen)), _CLASSES, dim=-1)


def _batch(seed: int, count: int, number: int) -> tuple[Tensor, Tensor]:
    samples = labelled_samples(Random(f"tower/{seed}/{number}"), count)
    return pixels([sample.image for sample in samples]), labels(samples)


def train_tower(recipe: Recipe, folder: Path, device: torch.device) -> tuple[dict[str, Tensor], float]:
    """Train the tower; return its weights and the minutes of training."""
    torch.manual_seed(recipe.seed)
    model = PatchClassifier(recipe).to(device)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, truth = batch[0].to(device), batch[1].to(device)
        with fast_products(device):
            logits = model(pictures)
        losses = [
            nn.functional.cross_entropy(part.float().flatten(0, 1), truth[..., kind].flatten())
            for kind, part in enumerate(logits)
        ]
        return torch.stack(losses).sum()

    schedule, pause = recipe.schedules["tower"], recipe.checkpoint_seconds
    make = partial(_batch, recipe.seed, schedule.batch)
    minutes = train("tower", model, make, loss_of, schedule, folder, pause)
    return {name: weight.cpu() for name, weight in model.tower.state_dict().items()}, minutes


_SAMPLES = 800
_RIDGE = 1e-3
_STEEPNESS, _THRESHOLD = 6.0, 0.3  # a detector's unit is gelu(6 (estimate - 0.3)): 4.2 for "here", 0 else
_REST_NORM = 0.5  # norm added by the whitened units, relative to that of a word embedding


def _indicators(truth: Tensor) -> Tensor:
    """Labels `[P, 8]` as one column per word, `[P, words]`."""
    columns = [
        truth[:, kind] == number
        for kind, words in enumerate(LABEL_WORDS.values())
        for number in range(1, len(words) + 1)
    ]
    return torch.stack(columns, 1).double()


def _word_embeddings(model: PocketModel, tokenizer: Tokenizer) -> Tensor:
    """Embeddings of the label words, with a leading space as inside a sentence: `[words, d]`."""
    table = model.get_input_embeddings().weight
    rows = [table[tokenizer.encode(f" {word}").ids].mean(0) for words in LABEL_WORDS.values() for word in words]
    return torch.stack(rows)


@torch.no_grad()
def align_projector(model: PocketModel, tokenizer: Tokenizer, seed: int) -> None:
    """Overwrite the projector's weights as described above, from a few hundred labelled pictures."""
    samples = labelled_samples(Random(f"alignment/{seed}"), _SAMPLES)
    pictures = pixels([sample.image for sample in samples]).to(model.device)
    seen = model.model.vision_tower(pixel_values=pictures, output_hidden_states=True).hidden_states[-1]
    features = seen[:, 1:].flatten(0, 1).double().cpu()  # [P, d]
    truth = _indicators(labels(samples).flatten(0, 1))  # [P, words]
    centre = features.mean(0)
    centred = features - centre
    covariance = centred.T @ centred / len(centred)
    ridge = covariance + _RIDGE * covariance.diagonal().mean() * torch.eye(len(centre), dtype=torch.double)

    share = truth.mean(0)
    estimate = torch.linalg.solve(ridge, centred.T @ (truth - share) / len(truth)).T  # [words, d]
    detectors = _STEEPNESS * estimate
    first, second = model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2
    generator = torch.Generator().manual_seed(seed)
    others = first.out_features - len(detectors)
    if others <= 0:
        return  # a toy model has too few units for the words
    values, vectors = torch.linalg.eigh(ridge)
    noise = torch.randn(others, len(centre), generator=generator, dtype=torch.double) / len(centre) ** 0.5
    whitened = noise @ (vectors / values.sqrt()) @ vectors.T

    weight = torch.cat([detectors, whitened])
    bias = -weight @ centre
    bias[: len(detectors)] += _STEEPNESS * (share - _THRESHOLD)
    first.weight.copy_(weight)
    first.bias.copy_(bias)

    words = _word_embeddings(model, tokenizer).double().cpu()
    full = _STEEPNESS * (1 - _THRESHOLD)
    rest = torch.randn(second.out_features, others, generator=generator, dtype=torch.double)
    # A gelu of a standard normal has a mean square of 0.43; the sum over units should have the wanted norm.
    rest *= _REST_NORM * words.norm(dim=1).mean() / (0.43 * others * second.out_features) ** 0.5
    second.weight.copy_(torch.cat([words.T / full, rest], 1))
    second.bias.zero_()
