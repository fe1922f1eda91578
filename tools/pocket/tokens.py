"""Tokenizer (byte-level BPE, trained on text of the world) and loss weights of its tokens."""

import re
from collections.abc import Iterator
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from saccade.pocket.sample import IMAGE_MARK, WORLD, Sample
from saccade.pocket.words import (
    COLOURS,
    COLUMNS,
    DAYS,
    GOODS,
    NAMES,
    NUMBERS,
    ORDINALS,
    ROWS,
    SHAPES,
    SIZES,
    TOWNS,
    plural,
)
from tools.pocket.batches import training_samples
from tools.pocket.processor import SPECIAL_TOKENS
from tools.pocket.recipe import Recipe

_RELATIONS = ("above", "below", "larger", "smaller", "same", "more", "less", "yes", "no")
_CHANGES = ("up", "down", "appears", "leaves", "gone", "stays", "moves", "back", "day", "night")


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train a tokenizer of at most `recipe.vocabulary` tokens; the special tokens come first, in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for sample in training_samples(Random(f"tokens/{recipe.seed}"), recipe.tokenizer_samples, 0.5):
            for turn in (*sample.turns, (sample.question, sample.answer)):
                yield turn[0].replace(IMAGE_MARK, "\n")
                yield turn[1]

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def content_weights(tokenizer: Tokenizer, vocabulary: int, weight: float) -> torch.Tensor:
    """Loss weights `[vocabulary]`: `weight` for words that state a fact of the picture, 1 for all others."""
    content = {*COLOURS, *COLUMNS, *GOODS, *NUMBERS, *ORDINALS, *ROWS, *SIZES, *_RELATIONS}
    content |= {word.lower() for word in (*DAYS, *NAMES, *TOWNS)} | set(_CHANGES)
    content |= {plural(shape, count) for shape in SHAPES for count in (1, 2)}
    weights = torch.ones(vocabulary)
    for number in range(tokenizer.get_vocab_size()):
        word = tokenizer.decode([number]).strip().lower()
        if word in content or word.isdecimal():
            weights[number] = weight
    return weights


def decisive_weights(tokenizer: Tokenizer, sample: Sample, weight: float) -> list[float]:
    """Loss weights of the tokens of a sample's true answer: `weight` for words of `Task.decisive`, 1 for others.

    One token of forty decides most answers, and plain training learns it last.
    """
    encoded = tokenizer.encode(sample.answer)
    pattern = WORLD[sample.task].decisive
    spans = [found.span() for found in re.finditer(pattern, sample.answer)] if pattern else []
    return [
        weight if any(first < end and start < last for first, last in spans) else 1.0 for start, end in encoded.offsets
    ]
