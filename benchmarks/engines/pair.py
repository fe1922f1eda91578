"""The pair's text decoders and the prompts, for engines that take token ids alone.

Prompts with pictures become token ids of their own: what each of the two models reads of them follows the embeddings of
its vocabulary.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
END = 2
"""Token that ends an answer."""


@dataclass(frozen=True)
class Decoder:
    """A Llama decoder without biases: transformers' configuration, and weights `[out, in]` by their names there."""

    config: dict[str, Any]
    weights: dict[str, Array]
    prompts: list[Array]  # [N, width] each

    @classmethod
    def read(cls, folder: Path, name: str) -> Decoder:
        """The target's or the draft's."""
        read: Decoder = pickle.loads((folder / name).read_bytes())
        return read

    @property
    def embeddings(self) -> Array:
        """Of the vocabulary and of all prompts."""
        return np.concatenate([self.weights["embed_tokens.weight"], *self.prompts])

    @property
    def ids(self) -> list[Array]:
        """Token ids of the prompts."""
        ends = np.cumsum([self.config["vocab_size"], *map(len, self.prompts)])
        return [np.arange(first, last) for first, last in pairwise(ends)]
