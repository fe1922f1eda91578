"""Greedy decoding, alone and with a chain of drafted tokens, with contexts that read and forget, as llama.cpp has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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
