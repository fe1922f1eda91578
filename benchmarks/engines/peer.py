"""What the processes of engines share: the pair for engines that take token ids alone, greedy chains, and requests.

Prompts with pictures become token ids of their own: what each of the two models reads of them follows the embeddings of
its vocabulary. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
END = 2  # token that ends an answer


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


class Context(Protocol):
    """A decoder with its keys and values."""

    def read(self, tokens: Sequence[int], outputs: int = 1) -> list[int]:
        """Append tokens; the likeliest next ones after the last ``outputs`` of them."""

    def cut(self, length: int) -> None:
        """Forget all after the first ``length`` tokens."""


def decode(
    target: Context, draft: Context | None, first: int, prompt: int, limit: int, gamma: int, end: int
) -> tuple[list[int], int]:
    """Continue a prompt of ``prompt`` tokens that both have read; new tokens from ``first`` on, and passes."""
    tokens, passes, drafted = [first], 0, 0  # so many of the tokens has the draft read
    while tokens[-1] != end and len(tokens) < limit:
        guesses, known = list[int](), len(tokens)
        if draft is not None:
            unread = tokens[drafted:]
            for _ in range(min(gamma, limit - known - 1)):
                guesses += draft.read(unread)
                unread = guesses[-1:]
        truth = target.read([tokens[-1], *guesses], len(guesses) + 1)
        passes += 1
        for token, guess in zip(truth, [*guesses, None], strict=True):
            tokens.append(token)
            if token != guess or token == end:
                break
        target.cut(prompt + len(tokens) - 1)
        if draft is not None and guesses:
            drafted = min(known + len(guesses), len(tokens)) - 1
            draft.cut(prompt + drafted)
    return tokens, passes


Answer = Callable[[int, str, int], tuple[list[int], int]]
"""Answer a prompt by number in a way, with at most so many tokens: new token ids, and passes of the target.

An answer of one token is made without the draft model, whose reading of the prompt counts as drafting."""


def serve(answer: Answer, about: str) -> None:
    """Say what engine this is, then answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    print(json.dumps(about), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        processor, wall = time.process_time(), time.perf_counter()
        tokens, passes = answer(**request)
        spent = {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall}
        print(json.dumps({"tokens": tokens, "passes": passes, **spent}), file=replies, flush=True)
