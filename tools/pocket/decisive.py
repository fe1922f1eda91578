"""Which words of an answer decide it: one token of forty, that plain training learns last."""

import re

from tokenizers import Tokenizer

from saccade.pocket.sample import WORLD, Sample


def decisive_weights(tokenizer: Tokenizer, sample: Sample, weight: float) -> list[float]:
    """`weight` for every token of a sample's true answer that its task calls decisive, 1 for the others."""
    encoded = tokenizer.encode(sample.answer)
    pattern = WORLD[sample.task].decisive
    spans = [found.span() for found in re.finditer(pattern, sample.answer)] if pattern else []
    return [
        weight if any(first < end and start < last for first, last in spans) else 1.0
        for start, end in encoded.offsets
    ]
