"""Processors of logits that requests ask for: penalties, log-probabilities and bounds of thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.serve.tools import ReplyFormat

UNKNOWN_LOGPROB = -9999.0  # OpenAI's value for tokens without a log-probability


class Penalties:
    """Presence and frequency penalty over the tokens of the answer, as OpenAI defines them.

    Stateless in the sense of `saccade.processors`: depends on the ids alone.
    """

    stateless = True

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        answer = ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


@dataclass(eq=False, slots=True)
class _Place:
    """Position after a path of tokens, with the logits that followed it."""

    logits: Tensor | None = None
    children: dict[int, _Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's own logits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest tokens and their log-probabilities


class LogprobRecorder:
    """A `StatefulProcessor` that changes nothing and records the logits of every node; one object serves one row."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._root = _Place()

    def start(self, prompt: Sequence[int]) -> _Place:
        return self._root

    def advance(self, state: _Place, token: int) -> _Place:
        return state.children.setdefault(token, _Place())

    def scores(self, state: _Place, scores: Tensor) -> Tensor:
        state.logits = scores.clone()
        return scores

    def pop(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Return the log-probabilities of tokens emitted since the last call, and forget their siblings."""
        logged = []
        for token in tokens:
            place = self._root
            self._root = self.advance(place, token)
            if place.logits is None:  # a lossy rule went where plain decoding cannot go
                logged.append(TokenLogprob(token, UNKNOWN_LOGPROB, ()))
                continue
            logprobs = torch.log_softmax(place.logits.float(), -1)
            values, ids = logprobs.topk(min(self._count, len(logprobs)))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            logged.append(TokenLogprob(token, float(logprobs[token]), top))
        return logged


class _Region(NamedTuple):
    """Part of an answer that a node of a draft tree is in."""

    ids: tuple[int, ...] = ()  # its last ones
    length: int = -1  # tokens of the thought; -1 outside
    begins: bool = False  # whether a thought can begin here


class ThoughtBudget:
    """A `StatefulProcessor` that writes the closing mark of a thought once it has had a number of tokens.

    Thoughts begin where `ReplyParser` finds them: first in an answer, or after a call. The mark waits for a processor
    before this one that does not allow it yet, as a grammar within a character.
    """

    def __init__(self, replies: ReplyFormat, budget: int, begun: str, hidden: frozenset[int]) -> None:
        begin, end = replies.thought or ("", "")
        self._tokenizer, self._budget, self._hidden = replies.tokenizer, budget, hidden
        self._begin, self._end, self._call = begin.strip(), end.strip(), replies.syntax.end.strip()
        self._mark = tuple(self._tokenizer.encode(self._end, add_special_tokens=False))
        self._span = max(map(len, (self._begin, self._end, self._call)))  # tokens that can be part of a mark
        self._first = _Region(length=0) if replies.opened(begun) else _Region(begins=True)

    def start(self, prompt: Sequence[int]) -> _Region:
        return self._first

    def advance(self, state: _Region, token: int) -> _Region:
        ids = state.ids if token in self._hidden else (*state.ids, token)[-self._span :]
        text = self._tokenizer.decode(ids).strip()
        if state.length >= 0:
            return _Region() if self._end in text else _Region(ids, state.length + 1)
        if state.begins and text.startswith(self._begin):
            return _Region(length=0)
        if (state.begins and not text) or (self._call and self._call in text):
            return _Region(begins=True)
        return _Region(ids, begins=state.begins and self._begin.startswith(text))

    def scores(self, state: _Region, scores: Tensor) -> Tensor:
        if state.length < self._budget:
            return scores
        ids, mark = state.ids, self._mark
        written = next(n for n in range(len(mark) - 1, -1, -1) if ids[len(ids) - n :] == mark[:n])
        only = torch.full_like(scores, float("-inf"))
        only[mark[written]] = scores[mark[written]]
        return only if only.max().isfinite() else scores
