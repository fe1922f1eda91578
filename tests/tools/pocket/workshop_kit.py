"""Toy models and batches for the workshop's tests."""

import torch
from tokenizers import Tokenizer

from saccade.pocket import draw
from tools.pocket.batches import Batch, batch_of
from tools.pocket.models import PocketModel, build
from tools.pocket.recipe import LanguageShape, TowerShape

TOWER = TowerShape(layers=1, width=32, mlp=48, heads=2)
KINDS = ["scene", "difference", "story", "video", "knowledge"]
"""Tasks with one picture, two, five, a video, and two turns."""


def tiny_model(layers: int = 2) -> PocketModel:
    """A random model of width 64 with the vocabulary of the `tokenizer` fixture."""
    torch.manual_seed(0)
    return build(LanguageShape(layers, width=64, mlp=96), TOWER, vocabulary=448).eval()


def batch_of_tasks(tokenizer: Tokenizer, *tasks: str, seed: int = 3) -> Batch:
    """One sample of each task, with its true answer."""
    samples = [draw(seed + number, task) for number, task in enumerate(tasks)]
    return batch_of(tokenizer, samples, [tokenizer.encode(sample.answer).ids for sample in samples])
